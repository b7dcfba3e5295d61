// Gradient of q for Hopper, driven by a tile plan: one writer per row and a fixed order of sums, so that results are
// bitwise repeatable; also where heads are too wide for the K/V-stationary kernel (backward.cuh) to sum dQ beside dK and dV.
//
// Q-stationary: one persistent CTA per SM; two consumer warpgroups own 64 rows each and hold dQ in registers over all key
// tiles of a row tile:
//
//     S = Q K^T              P = exp2(scale log2e S - lse), masked
//     dP = dO V^T            dS = P (dP - delta)           dQ += dS K
//
// (FlashAttention-2, arXiv 2307.08691, algorithm 2, with the loops exchanged.)  dQ of the last key tile, S and dP run on the
// tensor cores one after the other; the exponentials run beside dP, and each warpgroup's other work beside the products of
// the other one.  Rows of a tile are (position, head) pairs, as in the forward kernel.
//
// The rows' statistics (row_statistics.cuh) are made here, from dO where it is in shared memory anyway, and written for the
// kernel of dK and dV, which runs next.
#include "gradient_q_producer.cuh"

struct Consumer {
    using D = Descriptor<kSwizzle>;
    using Out = Eight<kType, SelectType<FFA_WIDE_OUT, float, uint16>::type>;
    static constexpr int kOutParts = kVDim / 32;  // of a row, for each of the four lanes that have it
    // Statistics are made while the first products run; else before them, to have registers enough.
    static constexpr bool kLateStatistics = kRowStages > 1 && kKvTile == 64 && sizeof(Out) == 16;

    const GradientQParams& params;
    Shared& shared;
    const int group;   // warpgroup
    const int thread;  // in the warpgroup
    Item item;
    // Of the rows of this thread's fragment: statistics, what they are made from, and the first interval.
    RowStatistics statistics[2];
    Out out[2][kOutParts];
    int start[2], end[2];
    Ring<kRowStages> row_ring;
    Ring<kKStages> k_ring;
    Ring<kVStages> v_ring;

    // Row h (0, 1) of this thread's fragment, counted from the first row of the tile.
    FFA_DEVICE int fragment_row(int h) const { return 64 * group + 16 * (thread / 32) + lane_index() / 4 + 8 * h; }
    // Its position; behind the last one (such rows are not stored) the last one, because tables must be readable.
    FFA_DEVICE int position(int h) const { return min(item.row_begin + fragment_row(h) / kPack, params.q_len - 1); }
    FFA_DEVICE int head(int h) const { return item.head + fragment_row(h) % kPack; }

    // Starts scores = rows keys^T, for Q K^T and dO V^T.
    template <int kColumns>
    FFA_DEVICE void issue_scores(float (&scores)[kKvTile / 2], const void* rows, const void* keys) const {
        const uint64 a = D::advance(D::contraction_is_contiguous(rows), group * 64 * kSwizzle);
        const uint64 b = D::contraction_is_contiguous(keys);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step) {
            const int panel = step / 4, offset = step % 4 * 32;
            Wgmma<kType, kKvTile>::ss(scores, D::advance(a, panel * kRows * kSwizzle + offset),
                                      D::advance(b, panel * kKvTile * kSwizzle + offset), step != 0);
        }
        wgmma_commit();
    }

    // Starts dq += dS K.
    FFA_DEVICE void issue_dq(float (&dq)[kHeadDim / 2], const uint32 (&ds)[kKvTile / 4], const void* keys) const {
        const uint64 b = D::contraction_is_strided(keys, kKvTile * kSwizzle);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kKvTile / 16; ++step) {
            Wgmma<kType, kHeadDim, false, true>::rs(dq, ds[4 * step], ds[4 * step + 1], ds[4 * step + 2],
                                                    ds[4 * step + 3], D::advance(b, step * 16 * kSwizzle), 1);
        }
        wgmma_commit();
    }

    FFA_DEVICE void build_mask(FragmentMask<kKvTile>& mask, const KeyTile& tile) const {
        const int64 base = static_cast<int64>(item.mask) * params.intervals * params.q_len;
        const int rows[2] = {position(0), position(1)};
        mask.clear();
#pragma unroll
        for (int h = 0; h < 2; ++h) mask.add_interval(h, start[h], end[h], tile.begin, tile.limit);
        mask.add_intervals(params.starts + base + params.q_len, params.ends + base + params.q_len, rows,
                           params.intervals - 1, params.q_len, tile.begin, tile.limit);
        if constexpr (kBitTiles) mask.add_bit_tiles(params.bit_tiles, item.mask, rows, tile.begin, tile.limit);
    }

    // S becomes P times the derivative of the score mod.
    FFA_DEVICE void make_weights(float (&scores)[kKvTile / 2], const KeyTile& tile) const {
        if constexpr (Score::kCount == 0) {
#pragma unroll
            for (int i = 0; i < kKvTile / 2; ++i) {
                scores[i] = exp2_approx(fmaf(scores[i], params.scale_log2, -statistics[i / 2 % 2].shift));
            }
        } else {
            static_assert(8 % kPack == 0, "both rows of a thread's fragment are of one head");
            const auto head = Score::of_head(params.score_params, item.batch, item.head + fragment_row(0) % kPack);
            const int row = item.row_begin + fragment_row(0) / kPack, last_row = params.q_len - 1;
            const typename Score::Row rows[2] = {Score::of_row(params.score_params, head, row, 0, last_row),
                                                 Score::of_row(params.score_params, head, row, 8 / kPack, last_row)};
            const int first_key = tile.begin + 2 * (lane_index() & 3), last_key = params.kv_len - 1;
#pragma unroll
            for (int c = 0; c < kKvTile / 4; ++c) {
                const auto key = Score::of_key(params.score_params, head, first_key, 8 * (c / 2) + c % 2, last_key);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float& weight = scores[4 * (c / 2) + 2 * h + c % 2];
                    float slope = 1.0f;
                    const float score =
                        Score::apply(weight * params.score_scale, params.score_params, head, rows[h], key, slope);
                    weight = exp2_approx(fmaf(score, params.scale_log2, -statistics[h].shift)) * slope;
                }
            }
        }
    }

    // The next item, and what its rows need beside Q and dO.
    FFA_DEVICE void fetch_item() {
        mbarrier_wait(&shared.rows_full[row_ring.stage], row_ring.parity);
        item = shared.items[row_ring.stage];
        item.key_tiles = warp_uniform(item.key_tiles);
        const bool has_keys = item.key_tiles > 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // Assigned in any case: registers that keep what they had are not free for anything else.
            if constexpr (kRowStages > 1) load_out(h, has_keys);
            if (!has_keys) continue;
            const int64 plane = static_cast<int64>(item.batch) * params.heads + head(h);
            statistics[h] = RowStatistics::load(params.lse, params.d_lse, plane * params.q_len + position(h));
            const int64 interval = static_cast<int64>(item.mask) * params.intervals * params.q_len + position(h);
            start[h] = __ldg(params.starts + interval);
            end[h] = __ldg(params.ends + interval);
        }
    }

    FFA_DEVICE void load_out(int h, bool has_keys) {
        using Element = SelectType<FFA_WIDE_OUT, float, uint16>::type;
        const Element* const from = static_cast<const Element*>(params.out) + item.batch * params.out_batch +
                                    head(h) * params.out_head + position(h) * params.out_row;
#pragma unroll
        for (int part = 0; part < kOutParts; ++part) {
            const int column = out_column(part);
            out[h][part] = has_keys && column < params.v_dim ? Out::load(from + column) : Out{};
        }
    }

    // The four lanes of a row take turns at groups of eight columns.
    FFA_DEVICE static int out_column(int part) { return 8 * (4 * part + (lane_index() & 3)); }

    // Completes the statistics of the item's rows, and writes them.
    FFA_DEVICE void make_statistics() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int tile_row = fragment_row(h);
            if (item.key_tiles > 0) {
                if constexpr (kRowStages == 1) load_out(h, true);
                float sum = 0.0f;
#pragma unroll
                for (int part = 0; part < kOutParts; ++part) {
                    const int panel = out_column(part) / kPanelColumns, eighth = out_column(part) % kPanelColumns / 8;
                    const uint16* const from =
                        &shared.d_out[row_ring.stage][panel][tile_row][8 * (eighth ^ tile_row % 8)];  // as TMA swizzles
                    sum = dot(out[h][part], Eight<kType, uint16>::load(from), sum);
                }
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                statistics[h].finish(sum);
            } else {
                statistics[h] = RowStatistics{};
            }
            if ((lane_index() & 3) == 0 && item.row_begin + tile_row / kPack < item.row_end) {
                write_statistics(item.row_begin * kPack + tile_row, statistics[h]);
            }
        }
        // Rows behind the last one, which steps of the next kernel reach.
        if (item.row_end < params.q_len) return;
        for (int entry = params.q_len * kPack + 128 * group + thread; entry < params.padded_rows * kPack;
             entry += 128 * kConsumers) {
            write_statistics(entry, RowStatistics{});
        }
    }

    FFA_DEVICE void write_statistics(int entry, const RowStatistics& of_row) const {
        const int64 plane = (item.batch * params.heads + item.head) / kPack;
        const int64 at = plane * params.padded_rows * kPack + entry;
        params.row_shift[at] = of_row.shift;
        params.row_delta[at] = of_row.delta;
    }

    FFA_DEVICE void run_item(float (&dq)[kHeadDim / 2]) {
        uint32 ds[kKvTile / 4];
        int last_stage = 0;
        for (int i = 0; i < item.key_tiles; ++i) {
            float scores[kKvTile / 2], d_weights[kKvTile / 2];
            const int stage = k_ring.stage;
            mbarrier_wait(&shared.k_full[stage], k_ring.parity);
            const KeyTile tile = shared.key_tiles[stage];
            issue_scores<kHeadDim>(scores, shared.q[row_ring.stage], shared.k[stage]);
            mbarrier_wait(&shared.v_full[v_ring.stage], v_ring.parity);
            issue_scores<kVDim>(d_weights, shared.d_out[row_ring.stage], shared.v[v_ring.stage]);
            if (kLateStatistics && i == 0) make_statistics();
            FragmentMask<kKvTile> mask;
            if (tile.masked) build_mask(mask, tile);
            wgmma_wait<1>();  // S, and dQ of the tile before
            fence_registers(scores);
            if (i > 0) arrive_warp(&shared.k_empty[last_stage]);
            make_weights(scores, tile);
            if (tile.masked) mask.apply(scores, 0.0f);
            wgmma_wait<0>();
            fence_registers(d_weights);
            arrive_warp(&shared.v_empty[v_ring.stage]);
            if (i + 1 == item.key_tiles) arrive_warp(&shared.rows_empty[row_ring.stage]);
#pragma unroll
            for (int j = 0; j < kKvTile / 4; ++j) {
                const float delta = statistics[j % 2].delta;
                ds[j] = pack_pair<kType>(scores[2 * j] * (d_weights[2 * j] - delta),
                                         scores[2 * j + 1] * (d_weights[2 * j + 1] - delta));
            }
            issue_dq(dq, ds, shared.k[stage]);
            last_stage = stage;
            k_ring.advance();
            v_ring.advance();
        }
        wgmma_wait<0>();
        fence_registers(dq);
        arrive_warp(&shared.k_empty[last_stage]);
    }

    FFA_DEVICE void store(const float (&dq)[kHeadDim / 2], const Item& done) const {
        using Element = SelectType<FFA_WIDE, float, uint16>::type;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = done.row_begin + fragment_row(h) / kPack;
            Element* const to = static_cast<Element*>(params.dq) + done.batch * params.dq_batch +
                                (done.head + fragment_row(h) % kPack) * params.dq_head + row * params.dq_row;
            store_row<kType, kHeadDim>(to, row < done.row_end, dq, h, params.head_dim);
        }
    }

    FFA_DEVICE void run() {
        fetch_item();
        while (item.key_tiles >= 0) {
            if (!kLateStatistics || item.key_tiles == 0) make_statistics();
            float dq[kHeadDim / 2] = {};
            if (item.key_tiles > 0) {
                run_item(dq);
#pragma unroll
                for (int i = 0; i < kHeadDim / 2; ++i) dq[i] *= params.scale;
            } else {
                arrive_warp(&shared.rows_empty[row_ring.stage]);
            }
            const Item done = item;
            row_ring.advance();
            // Where the next rows have a buffer of their own, what they need is on its way while this dQ is written.
            if constexpr (kRowStages > 1) fetch_item();
            store(dq, done);
            if constexpr (kRowStages == 1) fetch_item();
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    ffa_gradient_q(const __grid_constant__ GradientQParams params) {
    if (params.split != nullptr && *params.split == 0) return;
    extern __shared__ __align__(1024) uint8 shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    if (threadIdx.x == 0) {
        constexpr uint32 kArrivals = 4 * kConsumers * kWarpArrivals;
#pragma unroll
        for (int s = 0; s < kRowStages; ++s) {
            mbarrier_init(&shared.rows_full[s], 1);
            mbarrier_init(&shared.rows_empty[s], kArrivals);
        }
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
        Consumer consumer{params, shared, warpgroup - 1, static_cast<int>(threadIdx.x % 128)};
        consumer.run();
    }
}

extern "C" __device__ const int ffa_gradient_q_shared_bytes = sizeof(Shared);
