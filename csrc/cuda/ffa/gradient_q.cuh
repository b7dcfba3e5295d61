// What the parts of the gradient_q kernel share: options, parameters, shared memory.
//
// Options are macros: FFA_DTYPE (bf16 or fp16), FFA_HEAD_DIM, FFA_V_DIM (multiples of 64), FFA_KV_TILE, FFA_ROW_STAGES,
// FFA_K_STAGES, FFA_V_STAGES, FFA_WIDE (float32 result), FFA_WIDE_OUT (the given output is float32), FFA_SCORE_STEPS (a list of ScoreStep values), FFA_GENERATED_SCORE (instead of
// them), FFA_BIT_TILES, and those of row_tiles.cuh.
#pragma once

#include "arrive.cuh"
#include "mask.cuh"
#include "row_output.cuh"
#include "row_statistics.cuh"
#include "row_tiles.cuh"
#include "score.cuh"
#include "select_type.cuh"

constexpr DType kType = DType::FFA_DTYPE;
constexpr int kHeadDim = FFA_HEAD_DIM;
constexpr int kVDim = FFA_V_DIM;
constexpr int kKvTile = FFA_KV_TILE;
constexpr int kRowStages = FFA_ROW_STAGES;  // buffers of Q and dO
constexpr int kKStages = FFA_K_STAGES;
constexpr int kVStages = FFA_V_STAGES;
static_assert(kHeadDim % 64 == 0 && kVDim % 64 == 0 && kKvTile % 16 == 0, "tiles are whole panels");

constexpr int kConsumers = 2;  // warpgroups of 64 rows
constexpr int kRows = 64 * kConsumers;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr int kSwizzle = 128;       // bytes of a panel's row
constexpr int kPanelColumns = 64;
constexpr int kPanelsQK = kHeadDim / kPanelColumns, kPanelsV = kVDim / kPanelColumns;

struct GradientQParams {
    TensorMap q, k, v, d_out;
    // As in ForwardParams.
    const int* starts;
    const int* ends;
    const int4* tile_rows;
    const int4* tile_runs;
    const int2* tile_heads;
    const int2* partial_runs;
    const int2* full_runs;
    const void* out;
    const float* lse;    // [batch * heads, q_len], log2 domain
    const float* d_lse;  // the same, or null
    float* row_shift;    // [batch * heads / kPack, padded_rows, kPack], see row_statistics.cuh
    float* row_delta;
    void* dq;
    int* next_item;          // zero at launch; null where there is no more than one item a CTA
    const int* split;        // null, or whether this kernel makes dQ; else it returns at once
    int64 dq_batch, dq_head, dq_row;  // strides in elements
    int64 out_batch, out_head, out_row;
    float scale;        // from dS K to dQ; has the constant factors of the score steps
    float scale_log2;   // from scores (after the score steps, if there are any) to powers of two
    float score_scale;  // from q k^T to what the first score step sees
    int q_len, kv_len, padded_rows, heads, group, head_dim;
    int intervals, mask_batch, mask_heads;
    int row_tiles, replicas, replica_heads, section;  // see Item
    int v_dim, unused;
    Score::Params score_params;
    BitTileParams bit_tiles;
    const int* row_tile_count;  // where they are counted, see row_tiles.cuh
};

static_assert(sizeof(GradientQParams) == FFA_PARAMS_BYTES, "the host packs what the kernel reads");

struct Shared {
    alignas(1024) uint16 q[kRowStages][kPanelsQK][kRows][kPanelColumns];
    alignas(1024) uint16 d_out[kRowStages][kPanelsV][kRows][kPanelColumns];
    alignas(1024) uint16 k[kKStages][kPanelsQK][kKvTile][kPanelColumns];
    alignas(1024) uint16 v[kVStages][kPanelsV][kKvTile][kPanelColumns];
    KeyTile key_tiles[kKStages];
    Item items[kRowStages];
    alignas(8) uint64 rows_full[kRowStages], rows_empty[kRowStages];
    uint64 k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
};
