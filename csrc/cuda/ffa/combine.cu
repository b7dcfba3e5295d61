// Joins attention over parts of the keys: the mean of their outputs weighted by 2^lse (Flash-Decoding), a warp a row.
//
// Options: FFA_DTYPE (bf16 or fp16), FFA_WIDE_OUT (float32 result).
#include "ptx.cuh"
#include "select_type.cuh"

constexpr DType kType = DType::FFA_DTYPE;
constexpr int kThreads = 256, kWarps = kThreads / 32;
using Element = SelectType<FFA_WIDE_OUT, float, uint16>::type;

struct CombineParams {
    const float* part_out;  // [parts, rows, v_dim], rows: batch, head, position
    const float* part_lse;  // [parts, rows]
    const float* part_max;
    void* out;
    float* lse;        // [rows]
    float* max_score;
    int64 out_batch, out_head, out_row;  // strides in elements
    int parts, rows, heads, q_len, v_dim;  // parts: at most 32; v_dim: a multiple of 8, at most 256
};
static_assert(sizeof(CombineParams) == 96, "the host packs what the kernel reads");

FFA_DEVICE void store_eight(float* to, const float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        *reinterpret_cast<float4*>(to + i) = {values[i], values[i + 1], values[i + 2], values[i + 3]};
    }
}
FFA_DEVICE void store_eight(uint16* to, const float (&values)[8]) {
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = ptx::pack_pair<kType>(values[2 * i], values[2 * i + 1]);
    *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    ffa_combine(const __grid_constant__ CombineParams params) {
    const int lane = ptx::lane_index(), row = blockIdx.x * kWarps + ptx::warp_uniform(threadIdx.x / 32);
    if (row >= params.rows) return;
    // Lane p has part p.
    float lse = ptx::negative_infinity, largest = ptx::negative_infinity;
    if (lane < params.parts) {
        lse = params.part_lse[static_cast<int64>(lane) * params.rows + row];
        largest = params.part_max[static_cast<int64>(lane) * params.rows + row];
    }
    float top = lse;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    // Of a row without keys every part has -inf, and zeros.
    const float weight = top == ptx::negative_infinity ? 0.0f : ptx::exp2_approx(lse - top);
    float sum = weight;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    const int column = 8 * lane;
    float total[8] = {};
    for (int part = 0; part < params.parts; ++part) {
        const float share = __shfl_sync(0xffffffffu, weight, part) * inverse;
        if (column >= params.v_dim) continue;
        const auto* from = reinterpret_cast<const float4*>(
            params.part_out + (static_cast<int64>(part) * params.rows + row) * params.v_dim + column);
        const float4 low = from[0], high = from[1];
        const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] = fmaf(share, values[i], total[i]);
    }
    if (column < params.v_dim) {
        const int position = row % params.q_len, head_row = row / params.q_len;
        store_eight(static_cast<Element*>(params.out) + head_row / params.heads * params.out_batch +
                        head_row % params.heads * params.out_head + position * params.out_row + column,
                    total);
    }
    if (lane == 0) {
        params.lse[row] = top == ptx::negative_infinity ? top : top + ptx::log2_approx(sum);
        params.max_score[row] = largest;
    }
}
