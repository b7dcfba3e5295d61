// The forward kernel's options, parameters, work items and shared memory.
//
// Options are macros, so that one source gives every instance: FFA_DTYPE (bf16 or fp16), FFA_HEAD_DIM, FFA_V_DIM,
// FFA_KV_TILE, FFA_NARROW_TILE, FFA_CONSUMERS, FFA_K_STAGES, FFA_V_STAGES, FFA_PACK, FFA_STAGE_OUT, FFA_WIDE_OUT,
// FFA_ACCUMULATE, FFA_SPLIT_KEYS, FFA_SCORE_STEPS (a list of ScoreStep values), FFA_GENERATED_SCORE (instead of them),
// FFA_BIT_TILES.
#pragma once

#include "arrive.cuh"
#include "bit_tiles.cuh"
#include "row_tiles.cuh"
#include "score.cuh"

constexpr DType kType = DType::FFA_DTYPE;
constexpr int kHeadDim = FFA_HEAD_DIM;
constexpr int kVDim = FFA_V_DIM;
constexpr int kKvTile = FFA_KV_TILE;
constexpr int kConsumers = FFA_CONSUMERS;     // warpgroups
constexpr int kKStages = FFA_K_STAGES;        // buffers of K
constexpr int kVStages = FFA_V_STAGES;        // buffers of V
constexpr bool kStageOut = FFA_STAGE_OUT;     // 16-bit output goes through shared memory and TMA
constexpr bool kWideOut = FFA_WIDE_OUT;       // float32 output
constexpr bool kAccumulate = FFA_ACCUMULATE;  // merged with what out, lse and max_score hold already, of other keys
constexpr bool kSplitKeys = FFA_SPLIT_KEYS;   // batch entries are parts of the keys of fewer ones
static_assert(!kSplitKeys || Score::kCount == 0, "score steps see the batch entry");
static_assert(kWideOut || !kAccumulate, "only float32 output is merged");
static_assert(!(kStageOut && kWideOut), "float32 output is not staged");

constexpr int kRows = 64 * kConsumers;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

FFA_DEVICE constexpr int swizzle_width(int columns) { return columns % 64 == 0 ? 128 : columns % 32 == 0 ? 64 : 32; }
constexpr int kSwizzleQK = swizzle_width(kHeadDim);
constexpr int kSwizzleV = swizzle_width(kVDim);
constexpr int kPanelsQK = kHeadDim * 2 / kSwizzleQK;
constexpr int kPanelsV = kVDim * 2 / kSwizzleV;

constexpr uint32 kBytesQ = kRows * kHeadDim * 2;
constexpr uint32 kBytesK = kKvTile * kHeadDim * 2;
constexpr uint32 kBytesV = kKvTile * kVDim * 2;

struct ForwardParams {
    TensorMap q, k, v, out;
    // Row intervals [mask_batch, mask_heads, intervals, q_len].
    const int* starts;
    const int* ends;
    // Row tiles in the order in which they are worked on.
    const int4* tile_rows;   // first row, end row, mask (batch * mask_heads + head), whole key tiles to visit
    const int4* tile_runs;   // begin and end in partial_runs, begin and end in full_runs
    const int2* tile_heads;  // begin and end of the keys of a short step before the runs; empty where there is none
    const int2* partial_runs;
    const int2* full_runs;
    void* out_pointer;
    float* lse;        // [batch, heads, q_len]
    float* max_score;  // the same, or null
    int* next_item;    // zero at launch; null where there is no more than one item a CTA
    int64 out_stride_batch, out_stride_head, out_stride_row;
    float scale_log2;   // positive; from scores (after the score steps, if there are any) to powers of two
    float score_scale;  // from q k^T to what the first score step sees
    int q_len, kv_len, heads, group, v_dim;
    int intervals, mask_batch, mask_heads;
    int row_tiles, replicas, replica_heads, section;  // see Item
    int kv_batch;  // of k and v, where keys are split
    Score::Params score_params;
    BitTileParams bit_tiles;
    const int* row_tile_count;  // where they are counted, see row_tiles.cuh
};

static_assert(sizeof(ForwardParams) == FFA_PARAMS_BYTES, "the host packs what the kernel reads");

struct Shared {
    alignas(1024) uint8 q[kBytesQ];
    alignas(1024) uint8 k[kKStages][kBytesK];
    alignas(1024) uint8 v[kVStages][kBytesV];
    alignas(1024) uint8 out[kStageOut ? kRows * kVDim * 2 : 16];
    KeyTile key_tiles[kKStages];
    Item item;
    alignas(8) uint64 q_full, q_empty;
    uint64 k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
};
