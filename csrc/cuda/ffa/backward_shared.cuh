// What the parts of the attention backward share: sizes, kernel parameters, layout of shared memory.
#pragma once

#include "arrive.cuh"
#include "bit_tiles.cuh"
#include "ptx.cuh"
#include "score.cuh"
#include "select_type.cuh"

namespace ffa {

constexpr bool kCounted = FFA_COUNTED;  // the entries have room for more than there are

constexpr int kRowGroup = 8;       // query rows of a group of the dQ buffer
constexpr int kPanelColumns = 64;  // 128-byte swizzled panels of 16-bit elements
constexpr int kPanelBytes = 128;   // of one row
constexpr int kConsumers = 256, kConsumerWarps = kConsumers / 32;
constexpr int kConsumerArrivals = kConsumerWarps * kWarpArrivals;
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
constexpr int kThreads = 128 + kConsumers;
// Named barriers: of the consumers; of each warpgroup with the warp that sums its dQ.
constexpr int kDsBarrier = 1, kDqEmptyBarrier = 2, kDqFullBarrier = 4;
constexpr int kSumThreads = 128 + 32;

// The plan's arrays (TilePlan, transposed: row tiles are key tiles, runs are query runs) and the row intervals.
struct MaskParams {
    const int* head_ptr;      // [mask_batches * mask_heads + 1]
    const int* tile_begin;    // [N], keys
    const int* tile_end;      // [N]
    const int* full_ptr;      // [N + 1]
    const int2* full_runs;    // [F] query rows
    const int* partial_ptr;   // [N + 1]
    const int2* partial_runs; // [P]
    const int4* entries;      // key tiles in working order: mask of the item's first head, tile in it, steps, 0
    const int* starts;        // [mask_batches, mask_heads, intervals, q_len]
    const int* ends;
    int mask_batches, mask_heads, intervals;
    // Items are numbered section by section; a section is all entries for a few replicas: (batch, key/value head, part)
    // triples that share the mask, few enough that what they read and sum into stays in L2.
    int entry_count, replicas, section;
};

struct BackwardParams {
    ptx::TensorMap q, k, v, d_out;
    MaskParams mask;
    // [B * H / kPack, padded_rows, kPack]: lse (log2 domain), +inf for empty rows, and delta.
    const float* row_shift;
    const float* row_delta;
    float* dq_buffer;        // [kPanels, dq_groups, 8 * kPanelColumns], see backward_convert.cuh
    float* dkv_buffer;  // null, or [blocks, kKeys * (kHeadDim + kVDim)]: dK and dV are summed there in float32
    void* dk;
    void* dv;
    int64 dk_batch, dk_head, dk_row;  // strides in elements
    int64 dv_batch, dv_head, dv_row;
    int* work_counter;  // zero at launch
    // Null, or whether dQ is left to gradient_q.cu, which is decided on the device; kernels of the other way have been
    // launched as well, and return at once.
    const int* split;
    int kv_heads, parts, group;  // a key/value head's query heads are split into `parts` items of `group` heads each
    int q_len, padded_rows, head_dim, v_dim;
    int tiles;  // of one mask head where the mask depends on the head, else of all masks
    float scale;        // from dS^T Q to dK; has the constant factors of the score steps
    float scale_log2;   // from scores (after the score steps, if there are any) to powers of two
    float score_scale;  // from k q^T to what the first score step sees
    int dq_groups;      // B * H * padded_rows / 8
    Score::Params score_params;
    BitTileParams bit_tiles;
    const int* entry_count;  // where they are counted
};

// kKeys is 128 (Consumer: each warpgroup has 64 keys) or 64 (WideConsumer: one has dV, one dK).
template <DType kType_, int kHeadDim_, int kVDim_, int kRows_, int kPack_, int kKeys_, bool kSumDq_, bool kWide_>
struct BackwardConfig {
    static constexpr DType kType = kType_;
    static constexpr int kHeadDim = kHeadDim_;  // of q, k; smaller ones are padded with zeros by TMA
    static constexpr int kVDim = kVDim_;        // of v, dO
    static constexpr int kRows = kRows_;        // query rows of a step: (position, head) pairs, head first
    static constexpr int kPack = kPack_;        // heads of a step
    static constexpr int kPositions = kRows / kPack;
    static constexpr int kRunAlign = kRowGroup / kPack;  // positions that steps begin at are multiples of it
    static constexpr int kKeys = kKeys_;        // keys of a tile
    static constexpr int kKeyWords = kKeys / 32;
    static constexpr bool kSumDq = kSumDq_;     // else dQ is another kernel's (gradient_q.cu)
    using GradientType = typename SelectType<kWide_, float, uint16>::type;
    static constexpr int kStages = 2;           // of Q, dO and dS
    static constexpr int kKvStages = FFA_KV_STAGES;  // of K and V
    static constexpr int kPanels = kHeadDim / kPanelColumns;
    static constexpr int kVPanels = kVDim / kPanelColumns;
    static constexpr int kRowPanelBytes = kRows * kPanelBytes;
    static constexpr int kKeyPanelBytes = kKeys * kPanelBytes;
    // Of dQ^T's panels of 64 columns each warpgroup has one with all query rows (where there are two or three), and
    // half the rows of the middle one (where there are one or three).
    static constexpr int kWholeDqRows = kPanels > 1 ? kRows : 0;
    static constexpr int kHalfDqRows = kPanels % 2 ? kRows / 2 : 0;
    static constexpr int kDqRows = kWholeDqRows + kHalfDqRows;
    static_assert(kHeadDim % kPanelColumns == 0 && kVDim % kPanelColumns == 0, "tiles are whole panels");
    static_assert(!kSumDq || (kKeys == 128 && kPanels <= 3), "how the warpgroups share dQ");
    static_assert(kKeys == 128 || (kKeys == 64 && kRows == 64), "how the warpgroups share the work");
    static_assert(kRows % 16 == 0, "dV and dK contract over the rows in steps of 16");
    static_assert(kRowGroup % kPack == 0 && (kPack == 1 || !kSumDq), "the dQ buffer has one head after the other");
};

// One key tile of one key/value head, for some of its query heads.
struct Item {
    int steps;  // -1: no more work
    int batch, kv_head, first_head;
    int key_begin, key_end;
    int tile;   // counted inside its mask
    int block;  // of dkv_buffer
};

// Positions [row, row + kPositions) of kPack heads; masked steps attend only inside [run_begin, run_end) and the
// intervals.
struct Step {
    int row_group;  // of the dQ buffer and the statistics, counted over all batch entries and heads; -1: no more steps
    int masked;     // 0: no; else 2 and 3 by turns, the lowest bit being the phase of mask_full
    int batch, head, row;
    int run_begin, run_end;
    int key_begin, key_end;
};

template <class C> struct BackwardShared {
    alignas(1024) uint16 k[C::kKvStages][C::kPanels][C::kKeys][kPanelColumns];
    alignas(1024) uint16 v[C::kKvStages][C::kVPanels][C::kKeys][kPanelColumns];
    alignas(1024) uint16 q[C::kStages][C::kPanels][C::kRows][kPanelColumns];
    alignas(1024) uint16 d_out[C::kStages][C::kVPanels][C::kRows][kPanelColumns];
    union {
        alignas(1024) uint16 ds[C::kStages][2][C::kSumDq ? C::kRows : 1][kPanelColumns];  // [stage][keys of a warpgroup]
        alignas(1024) float4 weights[2][C::kKeys == 64 ? C::kRows / 8 : 1][128];  // [buffer][fragment][thread], see WideConsumer
    };
    alignas(128) float4 dq[C::kSumDq ? 2 : 1][C::kSumDq ? C::kDqRows / 8 * 128 : 1];  // of a warpgroup: its part of dQ^T
    alignas(16) float shift[C::kStages][C::kRows];
    alignas(16) float delta[C::kStages][C::kRows];
    alignas(16) uint32 mask[C::kKeyWords][C::kPositions];
    Step step[C::kStages];
    int last_mask;  // Planner's: what the last masked step had
    Item item[2 * C::kKvStages];  // in turn: the next ones are written while others are worked on
    uint64 kv_full[C::kKvStages], kv_empty[C::kKvStages];
    uint64 step_full[C::kStages];  // step[] is written
    uint64 q_full[C::kStages], q_empty[C::kStages];
    uint64 d_out_full[C::kStages], d_out_empty[C::kStages];
    uint64 mask_full, mask_empty;  // of masked steps only
    uint64 weights_full[2], weights_empty[2];  // WideConsumer
};

// Position in a ring of kStages buffers.
template <int kStages> struct Ring {
    int stage = 0;
    uint32 phase = 0;
    FFA_DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Two neighbouring elements of a result.
template <DType kType> FFA_DEVICE void store_pair(uint16* to, float low, float high) {
    *reinterpret_cast<uint32*>(to) = ptx::pack_pair<kType>(low, high);
}
template <DType kType> FFA_DEVICE void store_pair(float* to, float low, float high) {
    *reinterpret_cast<float2*>(to) = {low, high};
}

}  // namespace ffa
