// Gradients of what a score mod captures: sums over all pairs, added to float32 tensors in memory.
//
// A generated mod has kSums of them.  Each pair brings a value and, where the element that it belongs to depends on the
// pair, a place.  How values are joined before they go to memory depends on what the place depends on (sum_kind):
//
//     head      (or nothing): in a register over all steps of a head, then over the warp
//     key       in registers over all steps of a head, then over the four lanes that share a key
//     row       over the warp's keys, each step
//     distance  row - key: over the diagonals of the warp's 16 keys x kRows rows, each step; torch takes the sums by
//               distance to where they belong
//     pair      anything else: in a register for as long as a thread's pairs follow each other at one place
//
// Which lane holds what: see backward_fragment.cuh.
#pragma once

#include "backward_shared.cuh"

namespace ffa {

// What lasts over the steps of an item.
template <class C, class Mod, int kSums = Mod::kSums> struct CaptureSums {
    using Place = typename Mod::Place;
    static_assert(C::kPack == 1 && C::kRows % 32 == 0, "steps are of one head, and of whole groups of blocks");

    const BackwardParams& params;
    const Item& item;
    const int key_offset;  // of the warp's keys in the tile
    const int lane = ptx::lane_index();
    int head = -1;             // of the step
    float total[kSums][2] = {};  // head, pair: one; key: of key lane / 4 and of the one eight further
    Place place[kSums] = {};     // pair

    FFA_DEVICE void add_to_memory(int sum, Place at, float value, bool wanted = true) const {
        wanted = wanted && at >= 0 && value != 0.0f;
        ptx::reduce_add_global(Mod::sum(params.score_params, sum) + at, value, wanted);
    }

    FFA_DEVICE int first_key() const { return item.key_begin + key_offset; }  // of the warp
    FFA_DEVICE typename Mod::Head head_of_sums() const { return Mod::of_head(params.score_params, item.batch, head); }

    // Of each x the sum over the lanes with the same lane % 4; the lane gets that of x[lane / 4].
    FFA_DEVICE float sum_over_keys(float (&x)[8]) const {
#pragma unroll
        for (int half = 4; half > 0; half /= 2) {
            const bool upper = lane & 4 * half;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
                x[i] = kept + __shfl_xor_sync(0xffffffffu, given, 4 * half);
            }
        }
        return x[0];
    }

    FFA_DEVICE void finish_head() {
        if (head < 0) return;
        const typename Mod::Head of_head = head_of_sums();
#pragma unroll
        for (int n = 0; n < kSums; ++n) {
            if (Mod::sum_kind(n) == SumKind::head) {
                float sum = total[n][0];
#pragma unroll
                for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                if (lane == 0) add_to_memory(n, Mod::place(params.score_params, of_head, {}, {}, n), sum);
                total[n][0] = 0.0f;
            }
            if (Mod::sum_kind(n) == SumKind::key) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float sum = total[n][h];
#pragma unroll
                    for (int lanes = 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                    const typename Mod::Key key =
                        Mod::of_key(params.score_params, of_head, first_key() + lane / 4, 8 * h, item.key_end - 1);
                    if (lane % 4 == 0) add_to_memory(n, Mod::place(params.score_params, of_head, {}, key, n), sum);
                    total[n][h] = 0.0f;
                }
            }
        }
    }

    FFA_DEVICE void begin_step(const Step& step) {
        if (step.head == head) return;
        finish_head();
        head = step.head;
    }

    FFA_DEVICE void finish_item() {
        finish_head();
#pragma unroll
        for (int n = 0; n < kSums; ++n) {
            if (Mod::sum_kind(n) == SumKind::pair) add_to_memory(n, place[n], total[n][0]);
        }
    }
};

template <class C, class Mod> struct CaptureSums<C, Mod, 0> {
    const BackwardParams& params;
    const Item& item;
    const int key_offset;
    FFA_DEVICE void finish_item() const {}
};

// The sums of one step, whose pairs come in the order of the fragment: for each eight rows, j, four of a thread.
template <class C, class Mod> struct StepSums {
    static constexpr int kSums = Mod::kSums, kBlocks = C::kRows / 8;
    using Place = typename Mod::Place;

    CaptureSums<C, Mod>& sums;
    const Step& step;
    const int lane = ptx::lane_index();
    // Eight sums, of four blocks and the two parities, before they are joined over the warp.
    float group[kSums][8];
    // Distances: what the block before has of the lane's first key, and what lanes have got of its
    // diagonals.
    float first_keys[kSums][2] = {}, diagonal[kSums][2] = {};

    // Row sums of the blocks up to j.
    FFA_DEVICE void finish_rows(int n, int j) {
        const float sum = sums.sum_over_keys(group[n]);
        const int offset = (j / 4 * 4 + lane / 8) * 8 + lane % 4 * 2 + lane / 4 % 2;
        const auto& args = sums.params.score_params;
        const typename Mod::Head head = sums.head_of_sums();
        const typename Mod::Row row = Mod::of_row(args, head, step.row, offset, sums.params.q_len - 1);
        sums.add_to_memory(n, Mod::place(args, head, row, {}, n), sum);
    }

    // The values of one block of eight rows along its diagonals.  A lane has row - key = 8 block + 2 (lane % 4) (+ 1) -
    // lane / 4; it gets, from the lane that has it, row - key = 8 block' + 2 (lane % 4) (+ 1), where block' may be the
    // block before: whether it is depends on the lane alone.
    FFA_DEVICE void add_block(int n, int block, float even, float odd) {
        const bool odd_key = lane / 4 % 2;
        const float given[2] = {odd_key ? odd : even, odd_key ? even : odd};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = lane % 4 + (lane / 4 + c) / 2;
            const float got = __shfl_sync(0xffffffffu, given[c], lane / 4 * 4 + column % 4);
            add_diagonal(n, block - 1, c, column >= 4 ? got : diagonal[n][c]);
            diagonal[n][c] = got;
        }
        finish_diagonals(n, block - 1);
    }
    FFA_DEVICE void add_diagonal(int n, int block, int c, float value) { group[n][(block + 2) % 4 * 2 + c] = value; }
    FFA_DEVICE void finish_diagonals(int n, int block) {
        const int number = block + 2;  // of the block's sums
        if (number % 4 != 3 && block != kBlocks - 1) return;
#pragma unroll
        for (int i = number % 4 * 2 + 2; i < 8; ++i) group[n][i] = 0.0f;
        const float sum = sums.sum_over_keys(group[n]);
        const int last = (number / 4 * 4 + lane / 8 - 2) * 8 + lane % 4 * 2 + lane / 4 % 2;
        const int distance = step.row - sums.first_key() + last;
        const Place zero = Mod::place(sums.params.score_params, sums.head_of_sums(), {}, {}, n);
        sums.add_to_memory(n, zero + distance, sum);
    }

    FFA_DEVICE void add_pair(int n, Place at, float value) {
        float& total = sums.total[n][0];
        const bool moves = at != sums.place[n];
        sums.add_to_memory(n, sums.place[n], total, moves);
        total = moves ? value : total + value;
        sums.place[n] = at;
    }

    // `values` and `places` of the pairs 4 j, ... of the fragment.
    FFA_DEVICE void add(int j, const float (&values)[4][kSums], const Place (&places)[4][kSums]) {
#pragma unroll
        for (int n = 0; n < kSums; ++n) {
            const float low[2] = {values[0][n], values[1][n]}, high[2] = {values[2][n], values[3][n]};
            switch (Mod::sum_kind(n)) {
                case SumKind::head:
                    sums.total[n][0] += low[0] + low[1] + (high[0] + high[1]);
                    break;
                case SumKind::key:
                    sums.total[n][0] += low[0] + low[1];
                    sums.total[n][1] += high[0] + high[1];
                    break;
                case SumKind::row:
                    group[n][j % 4 * 2] = low[0] + high[0];
                    group[n][j % 4 * 2 + 1] = low[1] + high[1];
                    if (j % 4 == 3) finish_rows(n, j);
                    break;
                case SumKind::distance:
                    // Eight keys on: the same distances as the block before.
                    add_block(n, j - 1, first_keys[n][0] + high[0], first_keys[n][1] + high[1]);
                    first_keys[n][0] = low[0];
                    first_keys[n][1] = low[1];
                    if (j == kBlocks - 1) {
                        add_block(n, j, low[0], low[1]);
                        for (int c = 0; c < 2; ++c) {
                            add_diagonal(n, j, c, lane % 4 + (lane / 4 + c) / 2 >= 4 ? 0.0f : diagonal[n][c]);
                        }
                        finish_diagonals(n, j);
                    }
                    break;
                case SumKind::pair:
#pragma unroll
                    for (int i = 0; i < 4; ++i) add_pair(n, places[i][n], values[i][n]);
                    break;
            }
        }
    }
};

}  // namespace ffa
