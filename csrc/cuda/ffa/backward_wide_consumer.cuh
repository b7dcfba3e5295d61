// The consumer warpgroups of the attention backward for wide heads, whose dK and dV of 64 keys fill the registers of two
// warpgroups: the first one has S^T, P^T and dV, the second one dP^T, dS^T and dK.  P (float32, times the derivative of
// the score mod) goes from a thread of the first to the one of the second that holds the same elements, through shared
// memory; both gradients take P^T and dS^T from registers.  Where captures of the score mod get gradients, S goes over
// instead, and the second one makes P^T of it as well.
#pragma once

#include "backward_fragment.cuh"

namespace ffa {

template <class C> struct WideConsumer : Fragment<C> {
    using Fragment<C>::kScores, Fragment<C>::params, Fragment<C>::shared;

    static constexpr bool kCaptures = Score::kSums > 0;

    const int thread = threadIdx.x % 128;
    Ring<C::kStages> ring;
    Ring<2> exchange;

    // The next step's S; after the last step it is of stale rows and never read: a branch around the product would make
    // the compiler serialize all products.
    FFA_DEVICE void issue_next_scores(float (&scores)[kScores], bool wait) const {
        if (wait) ptx::mbarrier_wait(&shared.q_full[ring.stage], ring.phase);
        ptx::wgmma_fence();
        this->template issue_scores<C::kHeadDim>(scores, shared.k[0], shared.q[ring.stage]);
    }

    FFA_DEVICE void hand_on(const float (&weights)[kScores]) {
        ptx::mbarrier_wait(&shared.weights_empty[exchange.stage], exchange.phase ^ 1);
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            shared.weights[exchange.stage][j][thread] = {weights[4 * j], weights[4 * j + 1], weights[4 * j + 2],
                                                         weights[4 * j + 3]};
        }
        arrive_warp(&shared.weights_full[exchange.stage]);
        exchange.advance();
    }

    // First warpgroup.
    FFA_DEVICE void run_values(int steps, const Item& item) {
        float dv[C::kVDim / 2] = {}, scores[kScores];
        if (steps > 0) {
            issue_next_scores(scores, true);
            ptx::wgmma_wait<0>();
            ptx::fence_registers(scores);
        }
        for (int remaining = steps; remaining > 0; --remaining) {
            const int stage = ring.stage;
            uint32 pairs[kScores / 2];
            typename Fragment<C>::RowPairs shift;
            this->load_rows(shift, shared.shift[stage]);
            const int masked = shared.step[stage].masked;
            if constexpr (kCaptures) {
                this->mark_masked(scores, masked);
                hand_on(scores);
            }
            this->make_weights(scores, pairs, stage, masked, shift);
            if constexpr (!kCaptures) hand_on(scores);
            arrive_warp(&shared.q_empty[stage]);
            ptx::mbarrier_wait(&shared.d_out_full[stage], ring.phase);
            ptx::wgmma_fence();
            this->template issue_gradient<C::kVDim>(dv, pairs, shared.d_out[stage]);
            ring.advance();
            issue_next_scores(scores, remaining > 1);
            ptx::wgmma_wait<1>();  // dV
            arrive_warp(&shared.d_out_empty[stage]);
            ptx::wgmma_wait<0>();
            ptx::fence_registers(scores);
        }
        ptx::fence_registers(dv);
        const Item done = item;  // its slot may be written again once all warps have arrived
        arrive_warp(&shared.kv_empty[0]);
        this->finish_dv(dv, done);
    }

    // P becomes dS.
    FFA_DEVICE void take_weights(float (&d_weights)[kScores], int stage) {
        ptx::mbarrier_wait(&shared.weights_full[exchange.stage], exchange.phase);
        const float2* delta = reinterpret_cast<const float2*>(shared.delta[stage]) + thread % 4;
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            const float4 weights = shared.weights[exchange.stage][j][thread];
            const float2 row = delta[4 * j];
            d_weights[4 * j] = weights.x * (d_weights[4 * j] - row.x);
            d_weights[4 * j + 1] = weights.y * (d_weights[4 * j + 1] - row.y);
            d_weights[4 * j + 2] = weights.z * (d_weights[4 * j + 2] - row.x);
            d_weights[4 * j + 3] = weights.w * (d_weights[4 * j + 3] - row.y);
        }
        arrive_warp(&shared.weights_empty[exchange.stage]);
        exchange.advance();
    }

    // S as the first warpgroup had it.
    FFA_DEVICE void take_scores(float (&scores)[kScores]) {
        ptx::mbarrier_wait(&shared.weights_full[exchange.stage], exchange.phase);
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            reinterpret_cast<float4*>(scores)[j] = shared.weights[exchange.stage][j][thread];
        }
        arrive_warp(&shared.weights_empty[exchange.stage]);
        exchange.advance();
    }

    // Second warpgroup.
    FFA_DEVICE void run_keys(int steps, const Item& item) {
        CaptureSums<C, Score> sums{params, item, this->warp * 16};
        float dk[C::kHeadDim / 2] = {};
        uint32 pairs[kScores / 2];
        for (int remaining = steps; remaining > 0; --remaining) {
            const int stage = ring.stage;
            float d_weights[kScores];
            ptx::mbarrier_wait(&shared.d_out_full[stage], ring.phase);
            ptx::wgmma_fence();
            this->template issue_scores<C::kVDim>(d_weights, shared.v[0], shared.d_out[stage]);
            ptx::wgmma_wait<1>();  // dK of the step before
            if (remaining < steps) arrive_warp(&shared.q_empty[stage ^ 1]);
            ptx::wgmma_wait<0>();
            ptx::fence_registers(d_weights);
            if constexpr (kCaptures) {
                alignas(16) float scores[kScores];
                take_scores(scores);
                ptx::mbarrier_wait(&shared.q_full[stage], ring.phase);  // with it come the rows' shifts
                this->differentiate(scores, d_weights, stage, sums);
            } else {
                take_weights(d_weights, stage);
            }
            arrive_warp(&shared.d_out_empty[stage]);
            this->pack(d_weights, pairs);
            ptx::mbarrier_wait(&shared.q_full[stage], ring.phase);
            ptx::wgmma_fence();
            this->template issue_gradient<C::kHeadDim>(dk, pairs, shared.q[stage]);
            ring.advance();
        }
        ptx::wgmma_wait<0>();
        ptx::fence_registers(dk);
        if (steps > 0) arrive_warp(&shared.q_empty[ring.stage ^ 1]);
        sums.finish_item();
        const Item done = item;
        arrive_warp(&shared.kv_empty[0]);
        this->finish_dk(dk, done);
    }

    FFA_DEVICE void run(int warpgroup) {
        for (uint32 phase = 0;; phase ^= 1) {
            ptx::mbarrier_wait(shared.kv_full, phase);
            const int steps = shared.item[phase].steps;
            if (steps < 0) return;
            if (warpgroup == 0) {
                run_values(steps, shared.item[phase]);
            } else {
                run_keys(steps, shared.item[phase]);
            }
        }
    }
};

}  // namespace ffa
