// FlashAttention forward for Hopper, driven by a tile plan (magi_flex/tiles.py).
//
// One persistent CTA per SM: a producer warp walks the key runs of a row tile and feeds Q, K and V by TMA; two or three
// consumer warpgroups own 64 rows each.  Q K^T of the next key tile runs on the tensor cores beside the softmax of the
// current one, and warpgroups take turns at issuing products (the ping-pong of FlashAttention-3, Shah et al. 2024).
// Rows of a tile are (position, head) pairs: kPack query heads that share a key/value head are packed into one tile.
//
// Options are macros, so that one source gives every instance: FFA_DTYPE (bf16 or fp16), FFA_HEAD_DIM, FFA_V_DIM,
// FFA_KV_TILE, FFA_CONSUMERS, FFA_K_STAGES, FFA_V_STAGES, FFA_NARROW_TILE,
// FFA_PACK, FFA_STAGE_OUT, FFA_WIDE_OUT, FFA_SCORE_STEPS (a list of ScoreStep values).
#include "mask.cuh"
#include "ptx.cuh"
#include "score.cuh"
#include "softmax.cuh"

using namespace ptx;

constexpr DType kType = DType::FFA_DTYPE;
constexpr int kHeadDim = FFA_HEAD_DIM;
constexpr int kVDim = FFA_V_DIM;
constexpr int kKvTile = FFA_KV_TILE;
constexpr int kConsumers = FFA_CONSUMERS;  // warpgroups
constexpr int kNarrowTile = FFA_NARROW_TILE;  // keys of the short step that an item may begin with; 0: there is none
constexpr int kKStages = FFA_K_STAGES;      // buffers of K
constexpr int kVStages = FFA_V_STAGES;      // buffers of V
constexpr int kPack = FFA_PACK;  // query heads in a row tile
constexpr bool kStageOut = FFA_STAGE_OUT;    // 16-bit output goes through shared memory and TMA
constexpr bool kWideOut = FFA_WIDE_OUT;      // float32 output
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

// ---- producer ------------------------------------------------------------------------------------------------------

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

struct Producer {
    const ForwardParams& params;
    Shared& shared;
    Ring<kKStages> k_ring;
    Ring<kVStages> v_ring;
    uint32 q_parity = 0;
    int pending_key = 0;  // the key tile whose values are still to be loaded

    FFA_DEVICE void load_q(const Item& item) {
        mbarrier_wait(&shared.q_empty, q_parity ^ 1);
        q_parity ^= 1;
        shared.item = item;
        if (item.key_tiles < 0 || !item.has_keys()) {
            mbarrier_arrive(&shared.q_full);
            return;
        }
        mbarrier_arrive_expect_bytes(&shared.q_full, kBytesQ);
#pragma unroll
        for (int p = 0; p < kPanelsQK; ++p) {
            tma_load_4d(shared.q + p * kRows * kSwizzleQK, params.q, &shared.q_full, p * kSwizzleQK / 2, item.head,
                        item.row_begin, item.batch, kEvictFirst);
        }
    }

    FFA_DEVICE void load_k(const Item& item, int key, int limit, bool masked) {
        const int stage = k_ring.stage;
        mbarrier_wait(&shared.k_empty[stage], k_ring.parity ^ 1);
        k_ring.advance();
        shared.key_tiles[stage] = KeyTile{key, limit, masked};
        mbarrier_arrive_expect_bytes(&shared.k_full[stage], kBytesK);
#pragma unroll
        for (int p = 0; p < kPanelsQK; ++p) {
            tma_load_4d(shared.k[stage] + p * kKvTile * kSwizzleQK, params.k, &shared.k_full[stage], p * kSwizzleQK / 2,
                        key, item.kv_head, item.batch, kEvictLast);
        }
    }

    FFA_DEVICE void load_pending_v(const Item& item) {
        const int stage = v_ring.stage;
        mbarrier_wait(&shared.v_empty[stage], v_ring.parity ^ 1);
        v_ring.advance();
        mbarrier_arrive_expect_bytes(&shared.v_full[stage], kBytesV);
#pragma unroll
        for (int p = 0; p < kPanelsV; ++p) {
            tma_load_4d(shared.v[stage] + p * kKvTile * kSwizzleV, params.v, &shared.v_full[stage], p * kSwizzleV / 2,
                        pending_key, item.kv_head, item.batch, kEvictLast);
        }
    }

    FFA_DEVICE void run() {
        const int items = params.row_tiles * params.replicas;
        int index = blockIdx.x;
        Item item = load_item(params, index);
        while (index < items) {
            // The next item is fetched while this one is loaded: the latencies overlap.
            const int next_index =
                params.next_item == nullptr ? items : static_cast<int>(gridDim.x) + atomicAdd(params.next_item, 1);
            bool first = true;
            const auto load = [&](int key, int limit, bool masked) {
                load_k(item, key, limit, masked);
                if (first) {
                    load_q(item);
                    first = false;
                } else {
                    load_pending_v(item);
                }
                pending_key = key;
            };
            if (item.has_short_step()) load(item.short_step.x, item.short_step.y, true);
            for (int kind = 0; kind < 2; ++kind) {
                const bool partial = kind == 0;
                const int2* runs = partial ? params.partial_runs : params.full_runs;
                const int run_end = partial ? item.runs.y : item.runs.w;
                for (int r = partial ? item.runs.x : item.runs.z; r < run_end; ++r) {
                    const int2 run = __ldg(runs + r);
                    for (int key = run.x; key < run.y; key += kKvTile) {
                        load(key, run.y, partial || key + kKvTile > run.y);
                    }
                }
            }
            if (first) {
                load_q(item);
            } else {
                load_pending_v(item);
            }
            index = next_index;
            if (index < items) item = load_item(params, index);
        }
        item.key_tiles = -1;
        load_q(item);
    }
};

// ---- consumers -----------------------------------------------------------------------------------------------------

struct Consumer {
    const ForwardParams& params;
    Shared& shared;
    const int group;   // consumer warpgroup
    const int thread;  // in the warpgroup
    Ring<kKStages> k_ring;
    Ring<kVStages> v_ring;
    float (&acc_o)[kVDim / 2];
    OnlineSoftmax rows;
    Item item;

    FFA_DEVICE void release(uint64* barrier) {
        if (lane_index() == 0) mbarrier_arrive(barrier);
    }

    // Row h (0, 1) of this thread's fragment, counted from the first row of the tile.
    FFA_DEVICE int fragment_row(int h) const { return 64 * group + 16 * (thread / 32) + lane_index() / 4 + 8 * h; }

    template <int kColumns> FFA_DEVICE void build_mask(FragmentMask<kColumns>& mask, const KeyTile& tile) {
        if (!tile.masked) return;
        const int64 base = static_cast<int64>(item.mask) * params.intervals * params.q_len;
        int rows_of_fragment[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // Rows behind the last one are not stored; their intervals must be readable all the same.
            rows_of_fragment[h] = min(item.row_begin + fragment_row(h) / kPack, params.q_len - 1);
        }
        mask.from_intervals(params.starts + base, params.ends + base, rows_of_fragment, params.intervals, params.q_len,
                            tile.begin, tile.limit);
    }

    // Starts scores = Q K^T for the first kColumns keys of a buffer.
    template <int kColumns> FFA_DEVICE void issue_scores(float (&scores)[kColumns / 2], int stage) {
        const uint64 q_operand = Descriptor<kSwizzleQK>::contraction_is_contiguous(shared.q + group * 64 * kSwizzleQK);
        const uint64 k_operand = Descriptor<kSwizzleQK>::contraction_is_contiguous(shared.k[stage]);
        fence_registers(scores);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
            const int panel = step * 32 / kSwizzleQK, offset = step * 32 % kSwizzleQK;
            Wgmma<kType, kColumns>::ss(
                scores, Descriptor<kSwizzleQK>::advance(q_operand, panel * kRows * kSwizzleQK + offset),
                Descriptor<kSwizzleQK>::advance(k_operand, panel * kKvTile * kSwizzleQK + offset), step != 0);
        }
        wgmma_commit();
    }

    template <int kColumns> FFA_DEVICE void modify_scores(float (&scores)[kColumns / 2], const KeyTile& tile) {
        if constexpr (Score::kCount > 0) {
#pragma unroll
            for (int i = 0; i < kColumns / 2; ++i) {
                const int tile_row = fragment_row(i / 2 % 2);
                // Positions outside of the lengths are masked; their tables must be readable all the same.
                const ScoreIndex at{item.batch, item.head + tile_row % kPack,
                                    min(item.row_begin + tile_row / kPack, params.q_len - 1),
                                    min(tile.begin + 8 * (i / 4) + 2 * (lane_index() & 3) + i % 2, params.kv_len - 1)};
                scores[i] = Score::apply(scores[i] * params.score_scale, params.score_steps, at);
            }
        }
    }

    // Starts output += P V for the first kColumns keys of a buffer.
    template <int kColumns> FFA_DEVICE void issue_output(uint32 (&p)[kColumns / 4], int stage) {
        const uint64 v_operand = Descriptor<kSwizzleV>::contraction_is_strided(shared.v[stage], kKvTile * kSwizzleV);
        fence_registers(acc_o);
        fence_registers(p);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step) {
            Wgmma<kType, kVDim, false, true>::rs(acc_o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                                 Descriptor<kSwizzleV>::advance(v_operand, step * 16 * kSwizzleV), 1);
        }
        wgmma_commit();
    }

    FFA_DEVICE void rescale_output() {
        if (!rows.moved) return;
#pragma unroll
        for (int i = 0; i < kVDim / 2; ++i) acc_o[i] *= rows.factor[(i / 2) % 2];
    }

    template <int kCount> FFA_DEVICE static void pack_probabilities(const float (&scores)[kCount], uint32 (&p)[kCount / 2]) {
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) p[i] = pack_pair<kType>(scores[2 * i], scores[2 * i + 1]);
    }

    FFA_DEVICE void run() {
        for (uint32 q_parity = 0;; q_parity ^= 1) {
            mbarrier_wait(&shared.q_full, q_parity);
            item = shared.item;
            const int key_tiles = warp_uniform(item.key_tiles);
            if (key_tiles < 0) return;
            if (item.has_keys()) {
#pragma unroll
                for (int i = 0; i < kVDim / 2; ++i) acc_o[i] = 0.0f;
                rows.reset();
                if constexpr (kNarrowTile > 0) {
                    if (warp_uniform(item.has_short_step())) attend_short_step<kNarrowTile>(key_tiles == 0);
                }
                if (key_tiles > 0) attend(key_tiles);
                store();
            } else {
                store_empty();
                release(&shared.q_empty);
            }
        }
    }

    // Up to kColumns keys, one thing after the other: half the work of a whole tile for what is left over of a run.
    template <int kColumns> FFA_DEVICE void attend_short_step(bool item_ends) {
        float scores[kColumns / 2];
        uint32 p[kColumns / 4];
        FragmentMask<kColumns> mask;
        const int stage = k_ring.stage;
        mbarrier_wait(&shared.k_full[stage], k_ring.parity);
        const KeyTile tile = shared.key_tiles[stage];
        issue_scores<kColumns>(scores, stage);
        build_mask(mask, tile);
        wgmma_wait<0>();
        fence_registers(scores);
        finish_scores(stage, item_ends);
        modify_scores<kColumns>(scores, tile);
        mask.apply(scores);
        rows.update(scores, params.scale_log2);
        pack_probabilities(scores, p);
        mbarrier_wait(&shared.v_full[v_ring.stage], v_ring.parity);
        issue_output<kColumns>(p, v_ring.stage);
        wgmma_wait<0>();
        fence_registers(acc_o);
        finish_output();
    }

    FFA_DEVICE void attend(int key_tiles) {
        float scores[kKvTile / 2];
        uint32 p[kKvTile / 4];
        FragmentMask<kKvTile> mask;
        // The first tile has no product with V to hide behind, and is kept out of the loop: the compiler serializes
        // products whose waits depend on a branch.
        int stage = k_ring.stage;
        mbarrier_wait(&shared.k_full[stage], k_ring.parity);
        KeyTile tile = shared.key_tiles[stage];
        issue_scores<kKvTile>(scores, stage);
        build_mask(mask, tile);
        wgmma_wait<0>();
        fence_registers(scores);
        finish_scores(stage, key_tiles == 1);
        modify_scores<kKvTile>(scores, tile);
        if (tile.masked) mask.apply(scores);
        rows.update(scores, params.scale_log2);
        if constexpr (kNarrowTile > 0) rescale_output();
        pack_probabilities(scores, p);
        for (int i = 1; i < key_tiles; ++i) {
            stage = k_ring.stage;
            mbarrier_wait(&shared.k_full[stage], k_ring.parity);
            tile = shared.key_tiles[stage];
            named_barrier_sync(1 + group, 256);
            issue_scores<kKvTile>(scores, stage);
            mbarrier_wait(&shared.v_full[v_ring.stage], v_ring.parity);
            issue_output<kKvTile>(p, v_ring.stage);
            named_barrier_arrive(1 + (group + 1) % kConsumers, 256);
            build_mask(mask, tile);
            wgmma_wait<1>();
            fence_registers(scores);
            finish_scores(stage, i + 1 == key_tiles);
            modify_scores<kKvTile>(scores, tile);
            if (tile.masked) mask.apply(scores);
            rows.update(scores, params.scale_log2);
            wgmma_wait<0>();
            fence_registers(acc_o);
            finish_output();
            rescale_output();
            pack_probabilities(scores, p);
        }
        mbarrier_wait(&shared.v_full[v_ring.stage], v_ring.parity);
        issue_output<kKvTile>(p, v_ring.stage);
        wgmma_wait<0>();
        fence_registers(acc_o);
        finish_output();
    }

    FFA_DEVICE void finish_scores(int stage, bool item_ends) {
        release(&shared.k_empty[stage]);
        k_ring.advance();
        if (item_ends) release(&shared.q_empty);
    }

    FFA_DEVICE void finish_output() {
        release(&shared.v_empty[v_ring.stage]);
        v_ring.advance();
    }

    FFA_DEVICE void store_statistics(int h, float lse, float max_score) {
        const int row = item.row_begin + fragment_row(h) / kPack;
        if (lane_index() % 4 != 0 || row >= item.row_end) return;
        const int64 head = static_cast<int64>(item.batch) * params.heads + item.head + fragment_row(h) % kPack;
        params.lse[head * params.q_len + row] = lse;
        if (params.max_score != nullptr) params.max_score[head * params.q_len + row] = max_score;
    }

    // Rows that attend to nothing.
    FFA_DEVICE void store_empty() {
        constexpr int kElementBytes = kWideOut ? 4 : 2;
        constexpr int kElements = 16 / kElementBytes;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            store_statistics(h, negative_infinity, negative_infinity);
            if (item.row_begin + fragment_row(h) / kPack >= item.row_end) continue;
            uint8* const row = static_cast<uint8*>(params.out_pointer) + output_offset(fragment_row(h)) * kElementBytes;
            for (int column = kElements * (lane_index() & 3); column < params.v_dim; column += 4 * kElements) {
                *reinterpret_cast<uint4*>(row + column * kElementBytes) = make_uint4(0, 0, 0, 0);
            }
        }
    }

    FFA_DEVICE void store() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = rows.sum[h], top = rows.seen[h];
#pragma unroll
            for (int lanes = 1; lanes <= 2; lanes *= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
            }
            const bool empty = top == negative_infinity;
            const float inverse = empty ? 0.0f : 1.0f / sum;
#pragma unroll
            for (int j = 0; j < kVDim / 8; ++j) {
                acc_o[4 * j + 2 * h] *= inverse;
                acc_o[4 * j + 2 * h + 1] *= inverse;
            }
            store_statistics(h,
                             empty ? negative_infinity : rows.max[h] * params.scale_log2 + log2_approx(sum),
                             empty ? negative_infinity : top * params.scale_log2);
        }
        if constexpr (kWideOut) {
            store_wide();
        } else if constexpr (kStageOut) {
            store_staged();
        } else {
            store_direct();
        }
    }

    FFA_DEVICE int64 output_offset(int tile_row) const {
        return item.batch * params.out_stride_batch + (item.head + tile_row % kPack) * params.out_stride_head +
               (item.row_begin + tile_row / kPack) * params.out_stride_row;
    }

    // float32, straight from the registers.
    FFA_DEVICE void store_wide() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (item.row_begin + fragment_row(h) / kPack >= item.row_end) continue;
            float* row = static_cast<float*>(params.out_pointer) + output_offset(fragment_row(h));
#pragma unroll
            for (int j = 0; j < kVDim / 8; ++j) {
                const int column = 8 * j + 2 * (lane_index() & 3);
                if (column < params.v_dim) {
                    *reinterpret_cast<float2*>(row + column) = make_float2(acc_o[4 * j + 2 * h], acc_o[4 * j + 2 * h + 1]);
                }
            }
        }
    }

    // In the input's type, straight from the registers.  The four lanes of a row exchange their pairs, so that each holds
    // eight neighbouring columns.
    FFA_DEVICE void store_direct() {
        const int lane = lane_index() & 3;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bool valid = item.row_begin + fragment_row(h) / kPack < item.row_end;
            uint16* const row = static_cast<uint16*>(params.out_pointer) + output_offset(fragment_row(h));
#pragma unroll
            for (int j = 0; j < kVDim / 8; j += 4) {
                uint32 pair[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    pair[i] = pack_pair<kType>(acc_o[4 * (j + i) + 2 * h], acc_o[4 * (j + i) + 2 * h + 1]);
                }
                transpose_quad(pair);
                const int column = 8 * (j + lane);
                if (valid && column < params.v_dim) {
                    *reinterpret_cast<uint4*>(row + column) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
                }
            }
        }
    }

    // Lane i of four gets element i of each: a 4 x 4 transpose in two exchanges.
    FFA_DEVICE static void transpose_quad(uint32 (&x)[4]) {
        const bool odd = lane_index() & 1, upper = lane_index() & 2;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32 received = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
            (odd ? x[i] : x[i + 1]) = received;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32 received = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + 2], 2);
            (upper ? x[i] : x[i + 2]) = received;
        }
    }

    // In the input's type: through shared memory, by TMA where all 64 rows are stored.
    FFA_DEVICE void store_staged() {
        uint8* const staging = shared.out + group * 64 * kVDim * 2;
        const uint32 barrier = 1 + kConsumers + group;
        if (thread == 0) bulk_wait_read<0>();
        named_barrier_sync(barrier, 128);
        const int row = 16 * (thread / 32) + (lane_index() & 15);
#pragma unroll
        for (int c = 0; c < kVDim / 16; ++c) {
            const int byte = 32 * c + 16 * (lane_index() / 16);
            const float* const value = acc_o + 8 * c;
            stmatrix_x4(smem_address(staging) + staging_offset(row, byte), pack_pair<kType>(value[0], value[1]),
                        pack_pair<kType>(value[2], value[3]), pack_pair<kType>(value[4], value[5]),
                        pack_pair<kType>(value[6], value[7]));
        }
        const int end_row = item.row_begin + (group + 1) * (64 / kPack);
        const bool whole = end_row <= item.row_end || item.row_end == params.q_len;  // TMA clips at q_len
        fence_proxy_async();
        named_barrier_sync(barrier, 128);
        if (whole) {
            if (thread == 0) {
#pragma unroll
                for (int panel = 0; panel < kPanelsV; ++panel) {
                    tma_store_4d(params.out, staging + panel * 64 * kSwizzleV, panel * kSwizzleV / 2, item.head,
                                 item.row_begin + group * (64 / kPack), item.batch);
                }
                bulk_commit();
            }
        } else {
            constexpr int kChunks = kVDim / 8;  // of 16 bytes
            for (int i = thread; i < 64 * kChunks; i += 128) {
                const int tile_row = 64 * group + i / kChunks, chunk = i % kChunks;
                if (item.row_begin + tile_row / kPack < item.row_end && 8 * chunk < params.v_dim) {
                    *reinterpret_cast<uint4*>(static_cast<uint16*>(params.out_pointer) + output_offset(tile_row) +
                                              8 * chunk) =
                        *reinterpret_cast<const uint4*>(staging + staging_offset(i / kChunks, 16 * chunk));
                }
            }
        }
    }

    // Where byte `byte` of row `row` of the warpgroup's output lies in its swizzled panels.
    FFA_DEVICE static int staging_offset(int row, int byte) {
        const int offset = byte / kSwizzleV * 64 * kSwizzleV + row * kSwizzleV + byte % kSwizzleV;
        return offset ^ (((offset >> 7) & (kSwizzleV / 16 - 1)) << 4);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    ffa_forward(const __grid_constant__ ForwardParams params) {
    extern __shared__ __align__(1024) uint8 shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    if (threadIdx.x == 0) {
        tma_prefetch_map(params.q);
        tma_prefetch_map(params.k);
        tma_prefetch_map(params.v);
        constexpr uint32 kConsumerWarps = 4 * kConsumers;
        mbarrier_init(&shared.q_full, 1);
        mbarrier_init(&shared.q_empty, kConsumerWarps);
#pragma unroll
        for (int s = 0; s < kKStages; ++s) {
            mbarrier_init(&shared.k_full[s], 1);
            mbarrier_init(&shared.k_empty[s], kConsumerWarps);
        }
#pragma unroll
        for (int s = 0; s < kVStages; ++s) {
            mbarrier_init(&shared.v_full[s], 1);
            mbarrier_init(&shared.v_empty[s], kConsumerWarps);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = warp_uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        register_decrease<kProducerRegisters>();
        if (threadIdx.x < 32 && elect_one()) {
            Producer producer{params, shared};
            producer.run();
        }
    } else {
        register_increase<kConsumerRegisters>();
        // The first warpgroup's turn at the products comes first.
        if (warpgroup == kConsumers) named_barrier_arrive(1, 256);
        float acc_o[kVDim / 2];
        Consumer consumer{params, shared, warpgroup - 1, static_cast<int>(threadIdx.x % 128), {}, {}, acc_o};
        consumer.run();
        bulk_wait<0>();
    }
}

extern "C" __device__ const int ffa_forward_shared_bytes = sizeof(Shared);
