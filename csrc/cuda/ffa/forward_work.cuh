// The forward kernel's options, parameters, work items and shared memory.
//
// Options are macros, so that one source gives every instance: FFA_DTYPE (bf16 or fp16), FFA_HEAD_DIM, FFA_V_DIM,
// FFA_KV_TILE, FFA_NARROW_TILE, FFA_CONSUMERS, FFA_K_STAGES, FFA_V_STAGES, FFA_PACK, FFA_STAGE_OUT, FFA_WIDE_OUT,
// FFA_SCORE_STEPS (a list of ScoreStep values).
#pragma once

#include "ptx.cuh"
#include "score.cuh"

using namespace ptx;

constexpr DType kType = DType::FFA_DTYPE;
constexpr int kHeadDim = FFA_HEAD_DIM;
constexpr int kVDim = FFA_V_DIM;
constexpr int kKvTile = FFA_KV_TILE;
constexpr int kNarrowTile = FFA_NARROW_TILE;  // keys of the short step that an item may begin with; 0: there is none
constexpr int kConsumers = FFA_CONSUMERS;     // warpgroups
constexpr int kKStages = FFA_K_STAGES;        // buffers of K
constexpr int kVStages = FFA_V_STAGES;        // buffers of V
constexpr int kPack = FFA_PACK;               // query heads in a row tile
constexpr bool kStageOut = FFA_STAGE_OUT;     // 16-bit output goes through shared memory and TMA
constexpr bool kWideOut = FFA_WIDE_OUT;       // float32 output
using Score = ScoreSteps<FFA_SCORE_STEPS>;
static_assert(!(kStageOut && kWideOut), "float32 output is not staged");

constexpr int kRows = 64 * kConsumers;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
static_assert(64 % kPack == 0, "a warpgroup holds whole positions");

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
    ScoreStepParams score_steps[Score::kCount > 0 ? Score::kCount : 1];
};

static_assert(sizeof(ForwardParams) == FFA_PARAMS_BYTES, "the host packs what the kernel reads");

// What a consumer must know about a key tile.
struct KeyTile {
    int begin, limit, masked;
};

// A row tile of one head group.  Items are numbered section by section; a section is all row tiles for a few replicas
// ((batch, head group) pairs that share the mask), whose keys and values fit into L2 together.
struct Item {
    int row_begin, row_end, mask, key_tiles;
    int batch, head, kv_head;
    int2 short_step;
    int4 runs;

    FFA_DEVICE bool has_short_step() const { return kNarrowTile > 0 && short_step.y > short_step.x; }
    FFA_DEVICE bool has_keys() const { return key_tiles > 0 || has_short_step(); }
};

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

FFA_DEVICE Item load_item(const ForwardParams& params, int index) {
    const int section_items = params.row_tiles * params.section;
    const int section = index / section_items;
    const int in_section = index - section * section_items;
    const int width = min(params.section, params.replicas - section * params.section);
    const int tile = in_section / width;
    const int replica = section * params.section + in_section - tile * width;
    const int4 rows = __ldg(params.tile_rows + tile);
    Item item;
    item.runs = __ldg(params.tile_runs + tile);
    item.short_step = __ldg(params.tile_heads + tile);
    item.row_begin = rows.x;
    item.row_end = rows.y;
    item.mask = rows.z;
    item.key_tiles = rows.w;
    const int mask_batch = rows.z / params.mask_heads;
    const int replica_batch = replica / params.replica_heads;
    item.batch = params.mask_batch == 1 ? replica_batch : mask_batch;
    item.head = params.mask_heads == 1 ? (replica - replica_batch * params.replica_heads) * kPack
                                       : rows.z - mask_batch * params.mask_heads;
    item.kv_head = item.head / params.group;
    return item;
}

// Position in a ring of buffers.
template <int kSize> struct Ring {
    int stage = 0;
    uint32 parity = 0;
    FFA_DEVICE void advance() {
        if (++stage == kSize) {
            stage = 0;
            parity ^= 1;
        }
    }
};
