// Attention backward for Hopper: gradients of q, k, v over the tiles of a transposed plan.
//
// K/V-stationary: a work item is one key tile of one key/value head; it walks the query runs of every query head of the
// group in steps of kRows query rows.  Per step, with S^T, dP^T kept transposed so that they feed products from registers:
//
//     S^T = K Q^T            P^T = exp2(scale log2e S^T - lse), masked
//     dP^T = V dO^T          dS^T = P^T (dP^T - delta)
//     dV += P^T dO           dK += dS^T Q         dQ^T = K^T dS^T, added to a float32 buffer
//
// (FlashAttention-2/3, arXiv 2307.08691 and 2407.08608.)  Two consumer warpgroups own 64 keys each and exchange dS
// through shared memory for dQ; one producer warp walks the plan, loads tiles with TMA and turns row intervals into
// bits.  Products are issued so that the tensor cores have work during every elementwise phase: dP beside the
// exponentials, dV beside dS, dK and the next step's S beside the sums into dQ.
//
// The dQ buffer (see backward_convert.cuh) holds groups of 8 query rows in fragment order, so that a warp adds 512
// contiguous bytes at once; that is why steps begin at multiples of 8 rows.
#pragma once

#include "ptx.cuh"

namespace ffa {

constexpr int kKeys = 128;         // keys of a tile: 64 for each consumer warpgroup
constexpr int kKeyWords = kKeys / 32;
constexpr int kRowGroup = 8;       // query rows of a group of the dQ buffer
constexpr int kPanelColumns = 64;  // 128-byte swizzled panels of 16-bit elements
constexpr int kPanelBytes = 128;   // of one row
constexpr int kConsumers = 256;
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
constexpr int kThreads = 128 + kConsumers;
constexpr int kDsBarrier = 1;  // named barrier of the consumers

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
    const float* row_shift;  // [B * H, padded_rows]: lse (log2 domain), +inf for empty rows
    const float* row_delta;  // [B * H, padded_rows]
    float* dq_buffer;        // [B * H, padded_rows / 8, 8 * kHeadDim]
    float* dkv_buffer;  // null, or [blocks, 2, kKeys, kHeadDim]: dK and dV are summed there in float32, fragment order
    void* dk;
    void* dv;
    int64 dk_batch, dk_head, dk_row;  // strides in elements
    int64 dv_batch, dv_head, dv_row;
    int* work_counter;  // zero at launch
    int kv_heads, parts, group;  // a key/value head's query heads are split into `parts` items of `group` heads each
    int q_len, padded_rows, head_dim, v_dim;
    int tiles;  // of one mask head where the mask depends on the head, else of all masks
    float scale, scale_log2;
};

template <bool kFirst, class First, class Second> struct SelectType {
    using type = First;
};
template <class First, class Second> struct SelectType<false, First, Second> {
    using type = Second;
};

template <DType kType_, int kHeadDim_, int kRows_, bool kWide_> struct BackwardConfig {
    static constexpr DType kType = kType_;
    static constexpr int kHeadDim = kHeadDim_;  // of q, k, v: 64 or 128; smaller ones are padded with zeros by TMA
    static constexpr int kRows = kRows_;        // query rows of a step
    static constexpr bool kWide = kWide_;       // dk and dv in float32
    using GradientType = typename SelectType<kWide_, float, uint16>::type;
    static constexpr int kStages = 2;           // of Q and dO; dS is double-buffered too
    static constexpr int kPanels = kHeadDim / kPanelColumns;
    static constexpr int kRowPanelBytes = kRows * kPanelBytes;
    static constexpr int kKeyPanelBytes = kKeys * kPanelBytes;
    // dQ^T has kHeadDim rows: the warpgroups share them where there are two panels, else they share the query rows.
    static constexpr int kDqRows = kPanels == 2 ? kRows : kRows / 2;
    static_assert(kHeadDim == 64 || kHeadDim == 128, "other head dims need another split of dQ");
    static_assert(kRows % 16 == 0, "dV and dK contract over the rows in steps of 16");
};

// One key tile of one key/value head, for some of its query heads.
struct Item {
    int steps;  // -1: no more work
    int batch, kv_head, first_head;
    int key_begin, key_end;
    int tile;   // counted inside its mask
    int block;  // of dkv_buffer
};

// Query rows [row, row + kRows) of one head; masked steps attend only inside [run_begin, run_end) and the intervals.
struct Step {
    int row_group;  // of the dQ buffer, counted over all batch entries and heads; -1: no more steps
    int masked;
    int batch, head, row;
    int run_begin, run_end;
    int key_begin, key_end;
};

template <class C> struct BackwardShared {
    alignas(1024) uint16 k[C::kPanels][kKeys][kPanelColumns];
    alignas(1024) uint16 v[C::kPanels][kKeys][kPanelColumns];
    alignas(1024) uint16 q[C::kStages][C::kPanels][C::kRows][kPanelColumns];
    alignas(1024) uint16 d_out[C::kStages][C::kPanels][C::kRows][kPanelColumns];
    alignas(1024) uint16 ds[2][2][C::kRows][kPanelColumns];  // [buffer][keys of a warpgroup]
    alignas(16) float shift[C::kStages][C::kRows];
    alignas(16) float delta[C::kStages][C::kRows];
    alignas(16) uint32 mask[C::kStages][kKeyWords][C::kRows];
    Step step[C::kStages];
    Item item[2];  // by turns: the next one is written while one is worked on
    uint64 kv_full, kv_empty;
    uint64 step_full[C::kStages];  // step[] is written; the stage's mask may be overwritten
    uint64 q_full[C::kStages], q_empty[C::kStages];
    uint64 d_out_full[C::kStages], d_out_empty[C::kStages];
    uint64 mask_full[C::kStages];
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

// Which mask a query head has, counted over mask batch entries and mask heads.
FFA_DEVICE int mask_head_of(const BackwardParams& params, int batch, int head) {
    return (params.mask.mask_batches == 1 ? 0 : batch) * params.mask.mask_heads +
           (params.mask.mask_heads == 1 ? 0 : head);
}

// ---- producer warps ------------------------------------------------------------------------------------------------

// Walks the plan (one thread): publishes items, with their keys and values, and steps.  Few registers: what lasts is in
// shared memory.
template <class C> struct Planner {
    const BackwardParams& params;
    BackwardShared<C>& shared;
    Ring<C::kStages> ring;

    // Writes the item that work number `work` stands for.
    FFA_DEVICE bool find_item(int work, Item& item) const {
        const MaskParams& mask = params.mask;
        if (work >= mask.entry_count * mask.replicas) return false;
        const int section = work / (mask.entry_count * mask.section);
        const int first = section * mask.section;
        const int width = min(mask.section, mask.replicas - first);
        work -= first * mask.entry_count;
        const int4 entry = __ldg(mask.entries + work / width);
        const int replica = first + work % width;
        const int mask_batch = entry.x / mask.mask_heads;
        // Replicas are batch entries times key/value heads times parts, where the mask does not distinguish them.
        const int replica_heads = mask.mask_heads == 1 ? params.kv_heads * params.parts : 1;
        item.batch = mask.mask_batches == 1 ? replica / replica_heads : mask_batch;
        item.first_head = mask.mask_heads == 1 ? replica % replica_heads * params.group : entry.x % mask.mask_heads;
        item.kv_head = item.first_head / (params.group * params.parts);
        item.tile = entry.y;
        item.steps = entry.z;
        const int index = __ldg(mask.head_ptr + entry.x) + entry.y;
        item.key_begin = __ldg(mask.tile_begin + index);
        item.key_end = __ldg(mask.tile_end + index);
        const int plane = (mask.mask_heads > 1 || mask.mask_batches == 1 ? item.batch * params.kv_heads : 0) + item.kv_head;
        item.block = plane * params.tiles + (mask.mask_heads > 1 ? entry.y : index);
        return true;
    }

    FFA_DEVICE void load_keys(const Item& item) const {
        ptx::mbarrier_arrive_expect_bytes(&shared.kv_full, 2 * kKeys * C::kHeadDim * 2);
#pragma unroll
        for (int p = 0; p < C::kPanels; ++p) {
            const int column = p * kPanelColumns;
            ptx::tma_load_4d(shared.k[p], params.k, &shared.kv_full, column, item.key_begin, item.kv_head, item.batch);
            ptx::tma_load_4d(shared.v[p], params.v, &shared.kv_full, column, item.key_begin, item.kv_head, item.batch);
        }
    }

    // Walks a run from its end, so that the tiles of a causal mask visit the same rows at the same time.
    FFA_DEVICE void publish_run(const Item& item, int head, int2 run, bool partial) {
        const int first = run.x & ~(kRowGroup - 1);
#pragma unroll 1
        for (int row = first + (run.y - 1 - first) / C::kRows * C::kRows; row >= first; row -= C::kRows) {
            ptx::mbarrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
            const bool whole = item.key_end - item.key_begin == kKeys && row >= run.x && row + C::kRows <= run.y;
            const int plane = item.batch * params.kv_heads * params.parts * params.group + head;
            shared.step[ring.stage] = {(plane * params.padded_rows + row) / kRowGroup,
                                       partial || !whole,
                                       item.batch,
                                       head,
                                       row,
                                       run.x,
                                       run.y,
                                       item.key_begin,
                                       item.key_end};
            ptx::mbarrier_arrive(&shared.step_full[ring.stage]);
            ring.advance();
        }
    }

    FFA_DEVICE void publish_head(const Item& item, int head) {
        const MaskParams& mask = params.mask;
#pragma unroll 1
        for (int partial = 0; partial < 2; ++partial) {
            const int* ptr = partial ? mask.partial_ptr : mask.full_ptr;
            const int index = mask.head_ptr[mask_head_of(params, item.batch, head)] + item.tile;
            const int end = ptr[index + 1];
#pragma unroll 1
            for (int r = ptr[index]; r < end; ++r) {
                publish_run(item, head, (partial ? mask.partial_runs : mask.full_runs)[r], partial);
            }
        }
    }

    FFA_DEVICE void run() {
#pragma unroll 1
        for (int turn = 0;; turn ^= 1) {
            Item& item = shared.item[turn];
            const bool found = find_item(atomicAdd(params.work_counter, 1), item);
            if (!found) item.steps = -1;
            ptx::mbarrier_wait(&shared.kv_empty, turn ^ 1);
            if (!found) break;
            load_keys(item);
#pragma unroll 1
            for (int h = 0; h < params.group; ++h) publish_head(item, item.first_head + h);
        }
        ptx::mbarrier_arrive(&shared.kv_full);
        ptx::mbarrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
        shared.step[ring.stage].row_group = -1;
        ptx::mbarrier_arrive(&shared.step_full[ring.stage]);
    }
};

// Loads the tiles of Q and dO, and their rows' statistics.
template <class C> struct RowLoader {
    const BackwardParams& params;
    BackwardShared<C>& shared;

    FFA_DEVICE void load(const ptx::TensorMap& map, const float* statistics, uint16* tile, float* rows, uint64* full,
                         const Step& step) const {
        ptx::mbarrier_arrive_expect_bytes(full, C::kRows * C::kHeadDim * 2 + C::kRows * 4);
#pragma unroll
        for (int p = 0; p < C::kPanels; ++p) {
            ptx::tma_load_4d(tile + p * C::kRows * kPanelColumns, map, full, p * kPanelColumns, step.row, step.head,
                             step.batch);
        }
        ptx::bulk_load(rows, statistics + static_cast<int64>(step.row_group) * kRowGroup, full, C::kRows * 4);
    }

    FFA_DEVICE void run() const {
#pragma unroll 1
        for (Ring<C::kStages> ring;; ring.advance()) {
            const int stage = ring.stage;
            ptx::mbarrier_wait(&shared.step_full[stage], ring.phase);
            const Step& step = shared.step[stage];
            if (step.row_group < 0) return;
            load(params.q, params.row_shift, shared.q[stage][0][0], shared.shift[stage], &shared.q_full[stage], step);
            ptx::mbarrier_wait(&shared.d_out_empty[stage], ring.phase ^ 1);
            load(params.d_out, params.row_delta, shared.d_out[stage][0][0], shared.delta[stage],
                 &shared.d_out_full[stage], step);
        }
    }
};

// Turns the row intervals of masked steps into bits: mask[w][i] has the keys 32 w, 32 w + 1, ... of query row i.  Two
// warps share the rows, one row a lane at a time.
template <class C> struct Masker {
    const BackwardParams& params;
    BackwardShared<C>& shared;
    const int first_row;  // of this lane

    FFA_DEVICE void write_row(const Step& step, uint32 (&mask)[kKeyWords][C::kRows], int row) const {
        uint32 words[kKeyWords] = {};
        const int query = step.row + row;
        if (query >= step.run_begin && query < step.run_end) {
            const int key_begin = step.key_begin, key_count = step.key_end - key_begin;
            uint32 index = mask_head_of(params, step.batch, step.head) * params.mask.intervals * params.q_len + query;
#pragma unroll 1
            for (int r = 0; r < params.mask.intervals; ++r, index += params.q_len) {
                const int begin = __ldg(params.mask.starts + index) - key_begin;
                const int end = min(__ldg(params.mask.ends + index) - key_begin, key_count);
#pragma unroll
                for (int w = 0; w < kKeyWords; ++w) {
                    const int first = max(begin - 32 * w, 0);
                    words[w] |= ptx::bit_mask(first, max(end - 32 * w - first, 0));
                }
            }
        }
#pragma unroll
        for (int w = 0; w < kKeyWords; ++w) mask[w][row] = words[w];
    }

    FFA_DEVICE void run() const {
#pragma unroll 1
        for (Ring<C::kStages> ring;; ring.advance()) {
            const int stage = ring.stage;
            ptx::mbarrier_wait(&shared.step_full[stage], ring.phase);
            const Step& step = shared.step[stage];
            if (step.row_group < 0) return;
            if (step.masked) {
#pragma unroll 1
                for (int row = first_row; row < C::kRows; row += 64) write_row(step, shared.mask[stage], row);
                __syncwarp();
            }
            if (ptx::lane_index() == 0) {
                ptx::mbarrier_arrive(&shared.mask_full[stage]);
                ptx::mbarrier_arrive(&shared.q_empty[stage]);  // done with step[stage]
            }
        }
    }
};

// ---- consumers -----------------------------------------------------------------------------------------------------

// Two neighbouring elements of a result.
template <DType kType> FFA_DEVICE void store_pair(uint16* to, float low, float high) {
    *reinterpret_cast<uint32*>(to) = ptx::pack_pair<kType>(low, high);
}
template <DType kType> FFA_DEVICE void store_pair(float* to, float low, float high) {
    *reinterpret_cast<float2*>(to) = {low, high};
}

template <class C> struct Consumer {
    using Shared = BackwardShared<C>;
    using D = ptx::Descriptor<128>;
    template <int kN, bool kStridedA, bool kStridedB> using Mma = ptx::Wgmma<C::kType, kN, kStridedA, kStridedB>;
    static constexpr int kScores = C::kRows / 2;        // registers of S^T and dP^T
    static constexpr int kGradients = C::kHeadDim / 2;  // of dK and dV
    static constexpr int kDq = C::kDqRows / 2;

    const BackwardParams& params;
    Shared& shared;
    const int warpgroup;  // 0 or 1
    const int warp = ptx::warp_uniform((threadIdx.x / 32) & 3);
    const int lane = ptx::lane_index();
    Ring<C::kStages> ring;
    int ds_buffer = 0;

    FFA_DEVICE void arrive_warp(uint64* barrier) const {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(barrier);
    }

    // scores[64 keys x kRows] = keys_operand queries_operand^T, for K Q^T and V dO^T.
    FFA_DEVICE void issue_scores(float (&scores)[kScores], const void* keys_operand, const void* queries_operand) const {
        const uint64 a = D::advance(D::contraction_is_contiguous(keys_operand), warpgroup * 64 * kPanelBytes);
        const uint64 b = D::contraction_is_contiguous(queries_operand);
#pragma unroll
        for (int step = 0; step < C::kHeadDim / 16; ++step) {
            const int panel = step / 4, column_bytes = step % 4 * 32;
            Mma<C::kRows, false, false>::ss(scores, D::advance(a, panel * C::kKeyPanelBytes + column_bytes),
                                            D::advance(b, panel * C::kRowPanelBytes + column_bytes), step > 0);
        }
        ptx::wgmma_commit();
    }

    // dv[64 keys x kHeadDim] += P^T dO
    FFA_DEVICE void issue_dv(float (&dv)[kGradients], const uint32 (&weights)[kScores / 2], const void* d_out) const {
        const uint64 b = D::contraction_is_strided(d_out, C::kRowPanelBytes);
#pragma unroll
        for (int step = 0; step < C::kRows / 16; ++step) {
            Mma<C::kHeadDim, false, true>::rs(dv, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
                                              weights[4 * step + 3], D::advance(b, step * 16 * kPanelBytes), 1);
        }
        ptx::wgmma_commit();
    }

    // dk[64 keys x kHeadDim] += dS^T Q; dS from shared memory, because as a register operand it would have to stay put
    // until the product is done, when those registers are needed for the next step.
    FFA_DEVICE void issue_dk(float (&dk)[kGradients], const void* q) const {
        const uint64 a = D::contraction_is_strided(shared.ds[ds_buffer][warpgroup], C::kRowPanelBytes);
        const uint64 b = D::contraction_is_strided(q, C::kRowPanelBytes);
#pragma unroll
        for (int step = 0; step < C::kRows / 16; ++step) {
            const int bytes = step * 16 * kPanelBytes;
            Mma<C::kHeadDim, true, true>::ss(dk, D::advance(a, bytes), D::advance(b, bytes), 1);
        }
        ptx::wgmma_commit();
    }

    // dq[64 columns x kDqRows] = K^T dS^T
    FFA_DEVICE void issue_dq(float (&dq)[kDq]) const {
        const int panel = C::kPanels == 2 ? warpgroup : 0;
        const int first_row = C::kPanels == 2 ? 0 : warpgroup * C::kDqRows;
        const uint64 a = D::contraction_is_strided(shared.k[panel], C::kKeyPanelBytes);
        const uint64 b = D::contraction_is_contiguous(shared.ds[ds_buffer][0][first_row]);
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
            Mma<C::kDqRows, true, false>::ss(dq, D::advance(a, step * 16 * kPanelBytes),
                                             D::advance(b, step / 4 * C::kRowPanelBytes + step % 4 * 32), step > 0);
        }
        ptx::wgmma_commit();
    }

    FFA_DEVICE void exponentiate(float (&scores)[kScores], int stage) const {
        const float2* shift = reinterpret_cast<const float2*>(shared.shift[stage]) + lane % 4;
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            const float2 row = shift[4 * j];
            scores[4 * j] = ptx::exp2_approx(fmaf(scores[4 * j], params.scale_log2, -row.x));
            scores[4 * j + 1] = ptx::exp2_approx(fmaf(scores[4 * j + 1], params.scale_log2, -row.y));
            scores[4 * j + 2] = ptx::exp2_approx(fmaf(scores[4 * j + 2], params.scale_log2, -row.x));
            scores[4 * j + 3] = ptx::exp2_approx(fmaf(scores[4 * j + 3], params.scale_log2, -row.y));
        }
    }

    FFA_DEVICE void apply_mask(float (&weights)[kScores], int stage) const {
        const uint2* words =
            reinterpret_cast<const uint2*>(shared.mask[stage][2 * warpgroup + warp / 2]) + lane % 4;
        const uint32 low = 1u << (warp % 2 * 16 + lane / 4), high = low << 8;
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            const uint2 word = words[4 * j];
            if (!(word.x & low)) weights[4 * j] = 0.0f;
            if (!(word.y & low)) weights[4 * j + 1] = 0.0f;
            if (!(word.x & high)) weights[4 * j + 2] = 0.0f;
            if (!(word.y & high)) weights[4 * j + 3] = 0.0f;
        }
    }

    // dP becomes dS.
    FFA_DEVICE void score_gradients(const float (&weights)[kScores], float (&d_weights)[kScores], int stage) const {
        const float2* delta = reinterpret_cast<const float2*>(shared.delta[stage]) + lane % 4;
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            const float2 row = delta[4 * j];
            d_weights[4 * j] = weights[4 * j] * (d_weights[4 * j] - row.x);
            d_weights[4 * j + 1] = weights[4 * j + 1] * (d_weights[4 * j + 1] - row.y);
            d_weights[4 * j + 2] = weights[4 * j + 2] * (d_weights[4 * j + 2] - row.x);
            d_weights[4 * j + 3] = weights[4 * j + 3] * (d_weights[4 * j + 3] - row.y);
        }
    }

    static FFA_DEVICE void pack(const float (&values)[kScores], uint32 (&pairs)[kScores / 2]) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) pairs[i] = ptx::pack_pair<C::kType>(values[2 * i], values[2 * i + 1]);
    }

    // dS into shared memory, keys contiguous.
    FFA_DEVICE void store_ds(const uint32 (&ds)[kScores / 2]) const {
        const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        const uint32 address =
            ptx::smem_address(shared.ds[ds_buffer][warpgroup]) + row * kPanelBytes + (chunk ^ lane % 8) * 16;
#pragma unroll
        for (int step = 0; step < C::kRows / 16; ++step) {
            ptx::stmatrix_x4_transposed(address + step * 16 * kPanelBytes, ds[4 * step], ds[4 * step + 1],
                                        ds[4 * step + 2], ds[4 * step + 3]);
        }
    }

    FFA_DEVICE void add_dq(const float (&dq)[kDq], int row_group) const {
        const int panel = C::kPanels == 2 ? warpgroup : 0;
        const int first_group = C::kPanels == 2 ? 0 : warpgroup * (C::kDqRows / kRowGroup);
        float* out = params.dq_buffer + static_cast<int64>(row_group + first_group) * (kRowGroup * C::kHeadDim) +
                     panel * (kRowGroup * kPanelColumns) + warp * 128 + lane * 4;
#pragma unroll
        for (int j = 0; j < C::kDqRows / 8; ++j) {
            ptx::reduce_add_global_v4(out + j * (kRowGroup * C::kHeadDim), dq[4 * j], dq[4 * j + 1], dq[4 * j + 2],
                                      dq[4 * j + 3]);
        }
    }

    FFA_DEVICE void issue_next_scores(float (&scores)[kScores]) const {
        ptx::wgmma_fence();
        issue_scores(scores, shared.k, shared.q[ring.stage]);
    }

    // One key tile: every step of the item, then dK and dV.
    FFA_DEVICE void run_item(int steps, const Item& item) {
        float dk[kGradients] = {}, dv[kGradients] = {}, scores[kScores];
        if (steps > 0) {
            ptx::mbarrier_wait(&shared.q_full[ring.stage], ring.phase);
            issue_next_scores(scores);
            ptx::wgmma_wait<0>();
            ptx::fence_registers(scores);
        }
        for (int remaining = steps; remaining > 0; --remaining) {
            const int stage = ring.stage;
            float d_weights[kScores];
            ptx::mbarrier_wait(&shared.d_out_full[stage], ring.phase);
            ptx::wgmma_fence();
            issue_scores(d_weights, shared.v, shared.d_out[stage]);

            exponentiate(scores, stage);
            if (shared.step[stage].masked) {
                ptx::mbarrier_wait(&shared.mask_full[stage], ring.phase);
                apply_mask(scores, stage);
            }
            uint32 pairs[kScores / 2];
            pack(scores, pairs);
            ptx::wgmma_fence();
            issue_dv(dv, pairs, shared.d_out[stage]);

            ptx::wgmma_wait<1>();  // dP; dV runs on
            ptx::fence_registers(d_weights);
            score_gradients(scores, d_weights, stage);
            uint32 ds[kScores / 2];
            pack(d_weights, ds);
            store_ds(ds);
            ptx::fence_proxy_async();
            ptx::named_barrier_sync(kDsBarrier, kConsumers);

            const int row_group = shared.step[stage].row_group;
            float dq[kDq];
            ptx::wgmma_fence();
            issue_dq(dq);
            issue_dk(dk, shared.q[stage]);
            ring.advance();
            // After the last step this product is of stale rows and never read: a branch around it would make the
            // compiler serialize all products.
            if (remaining > 1) ptx::mbarrier_wait(&shared.q_full[ring.stage], ring.phase);
            issue_next_scores(scores);
            ptx::wgmma_wait<2>();  // dV and dQ
            ptx::fence_registers(dq);
            arrive_warp(&shared.d_out_empty[stage]);
            add_dq(dq, row_group);
            ds_buffer ^= 1;
            ptx::wgmma_wait<0>();
            ptx::fence_registers(scores);
            arrive_warp(&shared.q_empty[stage]);
        }
        ptx::wgmma_wait<0>();
        ptx::fence_registers(dk);
        ptx::fence_registers(dv);
        const Item done = item;  // its slot may be written again once all warps have arrived
        arrive_warp(&shared.kv_empty);
        if (params.dkv_buffer) {
            float* block = params.dkv_buffer + static_cast<int64>(done.block) * (2 * kKeys * C::kHeadDim);
            add_gradient(dk, block);
            add_gradient(dv, block + kKeys * C::kHeadDim);
        } else {
            store_gradient(dk, params.scale, done, params.head_dim, params.dk, params.dk_batch, params.dk_head, params.dk_row);
            store_gradient(dv, 1.0f, done, params.v_dim, params.dv, params.dv_batch, params.dv_head, params.dv_row);
        }
    }

    // A fragment is stored as [warpgroup][columns / 8][thread] float4, see backward_convert.cuh.
    FFA_DEVICE void add_gradient(const float (&gradient)[kGradients], float* block) const {
        float* out = block + warpgroup * 64 * C::kHeadDim + (warp * 32 + lane) * 4;
#pragma unroll
        for (int j = 0; j < C::kHeadDim / 8; ++j) {
            ptx::reduce_add_global_v4(out + j * 512, gradient[4 * j], gradient[4 * j + 1], gradient[4 * j + 2],
                                      gradient[4 * j + 3]);
        }
    }

    FFA_DEVICE void store_gradient(const float (&gradient)[kGradients], float factor, const Item& item, int columns,
                                   void* out, int64 batch_stride, int64 head_stride, int64 row_stride) const {
        using Element = typename C::GradientType;
        const int key = warpgroup * 64 + warp * 16 + lane / 4;
        Element* base = static_cast<Element*>(out) + item.batch * batch_stride + item.kv_head * head_stride +
                        (item.key_begin + key) * row_stride;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (item.key_begin + key + 8 * half >= item.key_end) continue;
            Element* row = base + 8 * half * row_stride;
#pragma unroll
            for (int j = 0; j < C::kHeadDim / 8; ++j) {
                const int column = 8 * j + lane % 4 * 2;
                if (column >= columns) continue;
                store_pair<C::kType>(row + column, gradient[4 * j + 2 * half] * factor,
                                     gradient[4 * j + 2 * half + 1] * factor);
            }
        }
    }

    FFA_DEVICE void run() {
        for (uint32 phase = 0;; phase ^= 1) {
            ptx::mbarrier_wait(&shared.kv_full, phase);
            const int steps = shared.item[phase].steps;
            if (steps < 0) return;
            run_item(steps, shared.item[phase]);
        }
    }
};

// ---- kernel --------------------------------------------------------------------------------------------------------

template <class C> FFA_DEVICE void backward(const BackwardParams& params) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    auto& shared = *reinterpret_cast<BackwardShared<C>*>(dynamic_shared);
    if (threadIdx.x == 0) {
        constexpr int kConsumerWarps = kConsumers / 32, kMaskerWarps = 2;
        ptx::mbarrier_init(&shared.kv_full, 1);
        ptx::mbarrier_init(&shared.kv_empty, kConsumerWarps);
        for (int i = 0; i < C::kStages; ++i) {
            ptx::mbarrier_init(&shared.step_full[i], 1);
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], kConsumerWarps + kMaskerWarps);
            ptx::mbarrier_init(&shared.d_out_full[i], 1);
            ptx::mbarrier_init(&shared.d_out_empty[i], kConsumerWarps);
            ptx::mbarrier_init(&shared.mask_full[i], kMaskerWarps);
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = ptx::warp_uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        ptx::register_decrease<kProducerRegisters>();
        const int warp = ptx::warp_uniform(threadIdx.x / 32);
        if (warp == 0) {
            if (ptx::elect_one()) Planner<C>{params, shared}.run();
        } else if (warp == 1) {
            if (ptx::elect_one()) RowLoader<C>{params, shared}.run();
        } else {
            Masker<C>{params, shared, static_cast<int>(threadIdx.x) - 64}.run();
        }
    } else {
        ptx::register_increase<kConsumerRegisters>();
        Consumer<C>{params, shared, warpgroup - 1}.run();
    }
}

}  // namespace ffa
