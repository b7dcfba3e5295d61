// FlashAttention forward for Hopper, driven by a tile plan (magi_flex/tiles.py).
//
// One persistent CTA per SM: a producer warp walks the key runs of a row tile and feeds Q, K and V by TMA; two or three
// consumer warpgroups own 64 rows each.  Q K^T of the next key tile runs on the tensor cores beside the softmax of the
// current one, and warpgroups take turns at issuing products (the ping-pong of FlashAttention-3, Shah et al. 2024).
// Rows of a tile are (position, head) pairs: kPack query heads that share a key/value head are packed into one tile.
#include "forward_output.cuh"
#include "forward_producer.cuh"
#include "mask.cuh"

struct Consumer : OutputRows {
    Ring<kKStages> k_ring;
    Ring<kVStages> v_ring;
    OnlineSoftmax rows;

    template <int kColumns> FFA_DEVICE void build_mask(FragmentMask<kColumns>& mask, const KeyTile& tile) {
        if (!tile.masked) return;
        const int64 base = static_cast<int64>(item.mask) * params.intervals * params.q_len;
        int rows_of_fragment[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // Rows behind the last one are not stored; their intervals must be readable all the same.
            rows_of_fragment[h] = min(item.row_begin + fragment_row(h) / kPack, params.q_len - 1);
        }
        mask.clear();
        mask.add_intervals(params.starts + base, params.ends + base, rows_of_fragment, params.intervals, params.q_len,
                           tile.begin, tile.limit);
        if constexpr (kBitTiles) {
            mask.add_bit_tiles(params.bit_tiles, item.mask, rows_of_fragment, tile.begin, tile.limit);
        }
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
            static_assert(8 % kPack == 0, "both rows of a thread's fragment are of one head");
            const auto head = Score::of_head(params.score_params, item.batch, item.head + fragment_row(0) % kPack);
            const int row = item.row_begin + fragment_row(0) / kPack, last_row = params.q_len - 1;
            const typename Score::Row rows[2] = {Score::of_row(params.score_params, head, row, 0, last_row),
                                                 Score::of_row(params.score_params, head, row, 8 / kPack, last_row)};
            const int first_key = tile.begin + 2 * (lane_index() & 3), last_key = params.kv_len - 1;
#pragma unroll
            for (int c = 0; c < kColumns / 4; ++c) {
                const auto key = Score::of_key(params.score_params, head, first_key, 8 * (c / 2) + c % 2, last_key);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float& score = scores[4 * (c / 2) + 2 * h + c % 2];
                    score = Score::apply(score * params.score_scale, params.score_params, head, rows[h], key);
                }
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
                store(rows);
            } else {
                store_empty();
                arrive_warp(&shared.q_empty);
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
        arrive_warp(&shared.k_empty[stage]);
        k_ring.advance();
        if (item_ends) arrive_warp(&shared.q_empty);
    }

    FFA_DEVICE void finish_output() {
        arrive_warp(&shared.v_empty[v_ring.stage]);
        v_ring.advance();
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
        constexpr uint32 kArrivals = 4 * kConsumers * kWarpArrivals;
        mbarrier_init(&shared.q_full, 1);
        mbarrier_init(&shared.q_empty, kArrivals);
#pragma unroll
        for (int s = 0; s < kKStages; ++s) {
            mbarrier_init(&shared.k_full[s], 1);
            mbarrier_init(&shared.k_empty[s], kArrivals);
        }
#pragma unroll
        for (int s = 0; s < kVStages; ++s) {
            mbarrier_init(&shared.v_full[s], 1);
            mbarrier_init(&shared.v_empty[s], kArrivals);
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
        Consumer consumer{{params, shared, warpgroup - 1, static_cast<int>(threadIdx.x % 128), acc_o}};
        consumer.run();
        bulk_wait<0>();
    }
}

extern "C" __device__ const int ffa_forward_shared_bytes = sizeof(Shared);
