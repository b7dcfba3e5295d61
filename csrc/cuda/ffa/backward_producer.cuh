// The producer warps of the attention backward: walk the plan, load tiles, make mask bits.
#pragma once

#include "backward_shared.cuh"

namespace ffa {

// Which mask a query head has, counted over mask batch entries and mask heads.
FFA_DEVICE int mask_head_of(const BackwardParams& params, int batch, int head) {
    return (params.mask.mask_batches == 1 ? 0 : batch) * params.mask.mask_heads +
           (params.mask.mask_heads == 1 ? 0 : head);
}

// Walks the plan (one thread): publishes items, with their keys and values, and steps.  Few registers: what lasts is in
// shared memory.
template <class C> struct Planner {
    const BackwardParams& params;
    BackwardShared<C>& shared;
    Ring<C::kStages> ring;
    int items = 0;  // so far

    // Writes the item that work number `work` stands for.
    FFA_DEVICE bool find_item(int work, Item& item) const {
        const MaskParams& mask = params.mask;
        const int entries = kCounted ? __ldg(params.entry_count) : mask.entry_count;
        if (work >= entries * mask.replicas) return false;
        const int section = work / (entries * mask.section);
        const int first = section * mask.section;
        const int width = min(mask.section, mask.replicas - first);
        work -= first * entries;
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
        const bool batch_has_blocks = mask.mask_heads > 1 || mask.mask_batches == 1;
        const int plane = (batch_has_blocks ? item.batch * params.kv_heads : 0) + item.kv_head;
        item.block = plane * params.tiles + (mask.mask_heads > 1 ? entry.y : index);
        return true;
    }

    FFA_DEVICE void load_keys(const Item& item) const {
        uint64* const full = &shared.kv_full[items % C::kKvStages];
        ptx::mbarrier_arrive_expect_bytes(full, C::kKeys * (C::kHeadDim + C::kVDim) * 2);
#pragma unroll
        for (int p = 0; p < max(C::kPanels, C::kVPanels); ++p) {
            const int column = p * kPanelColumns, key = item.key_begin;
            if (p < C::kPanels) {
                ptx::tma_load_4d(shared.k[items % C::kKvStages][p], params.k, full, column, key, item.kv_head, item.batch);
            }
            if (p < C::kVPanels) {
                ptx::tma_load_4d(shared.v[items % C::kKvStages][p], params.v, full, column, key, item.kv_head, item.batch);
            }
        }
    }

    // Walks a run from its end, so that the tiles of a causal mask visit the same rows at the same time.
    FFA_DEVICE void publish_run(const Item& item, int head, int2 run, bool partial) {
        const int first = run.x & ~(C::kRunAlign - 1);
#pragma unroll 1
        for (int row = first + (run.y - 1 - first) / C::kPositions * C::kPositions; row >= first; row -= C::kPositions) {
            ptx::mbarrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
            const bool whole = item.key_end - item.key_begin == C::kKeys && row >= run.x && row + C::kPositions <= run.y;
            const int plane = item.batch * params.kv_heads * params.parts * params.group + head;
            shared.step[ring.stage] = {(plane * params.padded_rows + row * C::kPack) / kRowGroup,
                                       partial || !whole ? (shared.last_mask ^= 1) : 0,
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
        for (;; ++items) {
            Item& item = shared.item[items % (2 * C::kKvStages)];
            const bool found = find_item(atomicAdd(params.work_counter, 1), item);
            if (!found) item.steps = -1;
            ptx::mbarrier_wait(&shared.kv_empty[items % C::kKvStages], ~(items / C::kKvStages) & 1);
            if (!found) break;
            load_keys(item);
#pragma unroll 1
            for (int h = 0; h < params.group; h += C::kPack) publish_head(item, item.first_head + h);
        }
        ptx::mbarrier_arrive(&shared.kv_full[items % C::kKvStages]);
        ptx::mbarrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
        shared.step[ring.stage].row_group = -1;
        ptx::mbarrier_arrive(&shared.step_full[ring.stage]);
    }
};

// Loads the tiles of Q and dO, and their rows' statistics.
template <class C> struct RowLoader {
    const BackwardParams& params;
    BackwardShared<C>& shared;

    template <int kColumns>
    FFA_DEVICE void load(const ptx::TensorMap& map, const float* statistics, uint16* tile, float* rows, uint64* full,
                         const Step& step) const {
        ptx::mbarrier_arrive_expect_bytes(full, C::kRows * kColumns * 2 + C::kRows * 4);
#pragma unroll
        for (int p = 0; p < kColumns / kPanelColumns; ++p) {
            ptx::tma_load_4d(tile + p * C::kRows * kPanelColumns, map, full, p * kPanelColumns, step.head, step.row,
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
            load<C::kHeadDim>(params.q, params.row_shift, shared.q[stage][0][0], shared.shift[stage],
                              &shared.q_full[stage], step);
            ptx::mbarrier_wait(&shared.d_out_empty[stage], ring.phase ^ 1);
            load<C::kVDim>(params.d_out, params.row_delta, shared.d_out[stage][0][0], shared.delta[stage],
                           &shared.d_out_full[stage], step);
        }
    }
};

// Turns the row intervals and bit tiles of masked steps into bits: mask[w][i] has the keys 32 w, 32 w + 1, ... of position
// i.
template <class C> struct Masker {
    const BackwardParams& params;
    BackwardShared<C>& shared;

    FFA_DEVICE void add_bit_tiles(BitRow keys, const Step& step, int row) const {
#pragma unroll 1
        for (int word = 0; word < C::kKeyWords; ++word) {
            const int left = step.key_end - step.key_begin - 32 * word;
            shared.mask[word][row] |= keys.next() & ptx::bit_mask(0, max(left, 0));
        }
    }

    static constexpr int kPasses = (C::kPositions + 31) / 32;

    static FFA_DEVICE bool is_inside(const Step& step, int query) {
        return query >= step.run_begin && query < step.run_end;
    }

    static FFA_DEVICE void add_interval(uint32 (&words)[C::kKeyWords], const Step& step, int begin, int end) {
        begin -= step.key_begin;
        end = min(end, step.key_end) - step.key_begin;
#pragma unroll
        for (int w = 0; w < C::kKeyWords; ++w) {
            const int first = max(begin - 32 * w, 0);
            words[w] |= ptx::bit_mask(first, max(end - 32 * w - first, 0));
        }
    }

    FFA_DEVICE void write_bits(const Step& step) const {
        const int mask_head = mask_head_of(params, step.batch, step.head);
        const uint32 plane = mask_head * params.mask.intervals * params.q_len;
        // What has to come from memory is asked for before the buffer is free.
        int begin[kPasses], end[kPasses];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int query = step.row + 32 * pass + ptx::lane_index();
            begin[pass] = end[pass] = 0;
            if (is_inside(step, query) && params.mask.intervals > 0) {
                begin[pass] = __ldg(params.mask.starts + (plane + query));
                end[pass] = __ldg(params.mask.ends + (plane + query));
            }
        }
        ptx::mbarrier_wait(&shared.mask_empty, ~step.masked & 1);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int row = 32 * pass + ptx::lane_index(), query = step.row + row;
            if (row >= C::kPositions) break;
            uint32 words[C::kKeyWords] = {};
            add_interval(words, step, begin[pass], end[pass]);
            const bool inside = is_inside(step, query);
            if (inside) {
                uint32 index = plane + query;
#pragma unroll 1
                for (int r = 1; r < params.mask.intervals; ++r) {
                    index += params.q_len;
                    add_interval(words, step, __ldg(params.mask.starts + index), __ldg(params.mask.ends + index));
                }
            }
#pragma unroll
            for (int w = 0; w < C::kKeyWords; ++w) shared.mask[w][row] = words[w];
            if constexpr (kBitTiles) {
                if (inside) add_bit_tiles(BitRow(params.bit_tiles, mask_head, query, step.key_begin), step, row);
            }
        }
    }

    FFA_DEVICE void run() const {
#pragma unroll 1
        for (Ring<C::kStages> ring;; ring.advance()) {
            const int stage = ring.stage;
            ptx::mbarrier_wait(&shared.step_full[stage], ring.phase);
            const Step& step = shared.step[stage];
            if (step.row_group < 0) return;
            if (step.masked) {
                write_bits(step);
                arrive_warp(&shared.mask_full);
            }
            arrive_warp(&shared.q_empty[stage]);  // done with step[stage]
        }
    }
};

// Adds the consumers' dQ to the buffer by TMA, which is faster than additions from registers (docs/ffa.md).
template <class C> struct Summer {
    const BackwardParams& params;
    BackwardShared<C>& shared;

    static constexpr int kGroupFloats = kRowGroup * kPanelColumns;

    // Adds kRows rows of one panel.
    template <int kRows> FFA_DEVICE void add(const float4* from, int panel, int row_group) const {
        if constexpr (kRows > 0) {
            const int64 group = static_cast<int64>(panel) * params.dq_groups + row_group;
            ptx::bulk_reduce_add_f32(params.dq_buffer + group * kGroupFloats, from, kRows * kPanelColumns * 4);
        }
    }

    FFA_DEVICE void run() const {
        const bool leader = ptx::lane_index() == 0;
#pragma unroll 1
        for (Ring<C::kStages> ring;; ring.advance()) {
            const int stage = ring.stage;
            ptx::mbarrier_wait(&shared.step_full[stage], ring.phase);
            const int row_group = shared.step[stage].row_group;
            if (row_group < 0) break;
            arrive_warp(&shared.q_empty[stage]);  // done with step[stage]
            // A warpgroup may write once its sums of the step before have been read.
            if (leader) ptx::bulk_wait_read<1>();
            __syncwarp();
            ptx::named_barrier_arrive(kDqEmptyBarrier, kSumThreads);
            if (leader) ptx::bulk_wait_read<0>();
            __syncwarp();
            ptx::named_barrier_arrive(kDqEmptyBarrier + 1, kSumThreads);
#pragma unroll 1
            for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
                ptx::named_barrier_sync(kDqFullBarrier + warpgroup, kSumThreads);
                if (leader) {
                    const float4* const from = shared.dq[warpgroup];
                    add<C::kWholeDqRows>(from, warpgroup * (C::kPanels - 1), row_group);
                    add<C::kHalfDqRows>(from + C::kWholeDqRows * kPanelColumns / 4, C::kPanels / 2,
                                        row_group + warpgroup * (C::kHalfDqRows / kRowGroup));
                    ptx::bulk_commit();
                }
            }
        }
        if (leader) ptx::bulk_wait<0>();
    }
};

}  // namespace ffa
