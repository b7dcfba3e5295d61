// The producer of the gradient_q kernel: one thread that decides what to load and in which order.
#pragma once

#include "gradient_q.cuh"

struct Producer {
    const GradientQParams& params;
    Shared& shared;
    Ring<kKStages> k_ring;
    Ring<kVStages> v_ring;
    Ring<kRowStages> row_ring;

    // Q and dO of an item; of an item without keys only the item itself.
    FFA_DEVICE void load_rows(const Item& item) {
        const int stage = row_ring.stage;
        uint64* const full = &shared.rows_full[stage];
        mbarrier_wait(&shared.rows_empty[stage], row_ring.parity ^ 1);
        row_ring.advance();
        shared.items[stage] = item;
        if (item.key_tiles <= 0) {
            mbarrier_arrive(full);
            return;
        }
        mbarrier_arrive_expect_bytes(full, kRows * (kHeadDim + kVDim) * 2);
#pragma unroll
        for (int p = 0; p < kPanelsQK; ++p) {
            tma_load_4d(shared.q[stage][p], params.q, full, p * kPanelColumns, item.head, item.row_begin, item.batch,
                        kEvictFirst);
        }
#pragma unroll
        for (int p = 0; p < kPanelsV; ++p) {
            tma_load_4d(shared.d_out[stage][p], params.d_out, full, p * kPanelColumns, item.head, item.row_begin,
                        item.batch, kEvictFirst);
        }
    }

    FFA_DEVICE void load_keys(const Item& item, int key, int limit, bool masked) {
        const int k_stage = k_ring.stage, v_stage = v_ring.stage;
        mbarrier_wait(&shared.k_empty[k_stage], k_ring.parity ^ 1);
        k_ring.advance();
        shared.key_tiles[k_stage] = KeyTile{key, limit, masked};
        mbarrier_arrive_expect_bytes(&shared.k_full[k_stage], kKvTile * kHeadDim * 2);
#pragma unroll
        for (int p = 0; p < kPanelsQK; ++p) {
            tma_load_4d(shared.k[k_stage][p], params.k, &shared.k_full[k_stage], p * kPanelColumns, key, item.kv_head,
                        item.batch, kEvictLast);
        }
        mbarrier_wait(&shared.v_empty[v_stage], v_ring.parity ^ 1);
        v_ring.advance();
        mbarrier_arrive_expect_bytes(&shared.v_full[v_stage], kKvTile * kVDim * 2);
#pragma unroll
        for (int p = 0; p < kPanelsV; ++p) {
            tma_load_4d(shared.v[v_stage][p], params.v, &shared.v_full[v_stage], p * kPanelColumns, key, item.kv_head,
                        item.batch, kEvictLast);
        }
    }

    FFA_DEVICE void run() {
        const int items = count_row_tiles(params) * params.replicas;
        int index = blockIdx.x;
        while (index < items) {
            const Item item = load_item(params, index);
            index = params.next_item == nullptr ? items : static_cast<int>(gridDim.x) + atomicAdd(params.next_item, 1);
            load_rows(item);
#pragma unroll 1
            for (int partial = 1; partial >= 0; --partial) {
                const int2* runs = partial ? params.partial_runs : params.full_runs;
                const int run_end = partial ? item.runs.y : item.runs.w;
#pragma unroll 1
                for (int r = partial ? item.runs.x : item.runs.z; r < run_end; ++r) {
                    const int2 run = __ldg(runs + r);
#pragma unroll 1
                    for (int key = run.x; key < run.y; key += kKvTile) {
                        load_keys(item, key, run.y, partial || key + kKvTile > run.y);
                    }
                }
            }
        }
        Item end{};
        end.key_tiles = -1;
        load_rows(end);
    }
};
