// The producer of the forward kernel: one thread that decides what to load and in which order.
#pragma once

#include "forward_work.cuh"

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

    FFA_DEVICE int kv_batch(const Item& item) const {
        return kSplitKeys ? item.batch % params.kv_batch : item.batch;
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
                        key, item.kv_head, kv_batch(item), kEvictLast);
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
                        pending_key, item.kv_head, kv_batch(item), kEvictLast);
        }
    }

    FFA_DEVICE void run() {
        const int items = count_row_tiles(params) * params.replicas;
        int index = blockIdx.x;
        // Where row tiles are counted there may be more CTAs than items.
        Item item = load_item(params, kCounted ? max(min(index, items - 1), 0) : index);
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
