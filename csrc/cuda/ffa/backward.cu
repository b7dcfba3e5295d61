// One instance of the attention backward: three kernels that run one after the other (see backward.cuh).
//
// Options are macros, so that one source gives every instance: FFA_DTYPE (bf16 or fp16), FFA_HEAD_DIM, FFA_V_DIM
// (multiples of 64), FFA_ROWS (query rows of a step), FFA_PACK (query heads in them), FFA_KEYS (of a tile: 128 or 64),
// FFA_KV_STAGES (buffers of K and V), FFA_SUM_DQ (dQ too), FFA_WIDE (dk and dv in float32), FFA_WIDE_DQ (dq in float32),
// FFA_WIDE_OUT (the given output is float32), FFA_SCORE_STEPS (a list of ScoreStep values), FFA_GENERATED_SCORE (instead of
// them), FFA_BIT_TILES, FFA_COUNTED (the work list has room for more entries than there are).
#include "backward.cuh"
#include "backward_convert.cuh"

using Config =
    ffa::BackwardConfig<DType::FFA_DTYPE, FFA_HEAD_DIM, FFA_V_DIM, FFA_ROWS, FFA_PACK, FFA_KEYS, FFA_SUM_DQ, FFA_WIDE>;
using OutElement = SelectType<FFA_WIDE_OUT, float, uint16>::type;

// What the host packs (magi_flex/kernels/ffa_backward.py).
static_assert(sizeof(ffa::BackwardParams) == FFA_PARAMS_BYTES, "the host packs what the kernel reads");
static_assert(sizeof(ffa::PrepareParams) == 136 && sizeof(ffa::FinishParams) == 192, "layout of the parameters");

extern "C" {

__device__ int ffa_backward_shared_bytes = sizeof(ffa::BackwardShared<Config>);

__global__ void __launch_bounds__(ffa::kThreads, 1) ffa_backward(const __grid_constant__ ffa::BackwardParams params) {
    ffa::backward<Config>(params);
}

__global__ void __launch_bounds__(ffa::kConvertThreads, 6)
    ffa_backward_prepare(const __grid_constant__ ffa::PrepareParams params) {
    ffa::prepare<Config::kType, Config::kHeadDim, Config::kVDim, OutElement>(params);
}

__global__ void __launch_bounds__(ffa::kConvertThreads, 6)
    ffa_backward_finish(const __grid_constant__ ffa::FinishParams params) {
    ffa::finish<Config, SelectType<FFA_WIDE_DQ, float, uint16>::type>(params);
}

}  // extern "C"
