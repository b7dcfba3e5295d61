// The consumer warpgroups of the attention backward where each owns 64 of 128 keys: the products and everything between
// them.
#pragma once

#include "backward_fragment.cuh"

namespace ffa {

template <class C> struct Consumer : Fragment<C> {
    using D = typename Fragment<C>::D;
    template <int kN, bool kStridedA, bool kStridedB>
    using Mma = typename Fragment<C>::template Mma<kN, kStridedA, kStridedB>;
    using Fragment<C>::kScores, Fragment<C>::params, Fragment<C>::shared, Fragment<C>::warp, Fragment<C>::lane;
    static constexpr int kDq = C::kDqRows / 2;
    // Where dK and dV leave few registers, dP is issued after the exponentials, P is kept as it is rounded for dV, and
    // dQ is issued once dV is there.  A score mod needs the registers of dP as well.
    static constexpr bool kRounded = C::kHeadDim + C::kVDim > 256 && Score::kCount == 0;
    // Where its captures get gradients, S and dP are needed at once.
    static constexpr bool kCaptures = Score::kSums > 0;
    static constexpr bool kLate = kRounded || Score::kCount > 0;
    // dP is added to -delta: no reads and subtractions between dP and the exchange of dS, where the tensor cores have little
    // else to do.  (At head dim 64, with steps of 128 rows, slower.)
    static constexpr bool kFromDelta = C::kSumDq && !kLate && C::kHeadDim == 128;

    const int warpgroup = Fragment<C>::half;
    Ring<C::kStages> ring;
    int kv_stage = 0;

    // dq[64 columns x kN] = K^T dS^T, for one panel of columns and the rows first_row, ...
    template <int kN> FFA_DEVICE void issue_dq_panel(float (&dq)[kN / 2], int panel, int first_row) const {
        const uint64 a = D::contraction_is_strided(shared.k[kv_stage][panel], C::kKeyPanelBytes);
        const uint64 b = D::contraction_is_contiguous(shared.ds[ring.stage][0][first_row]);
#pragma unroll
        for (int step = 0; step < C::kKeys / 16; ++step) {
            Mma<kN, true, false>::ss(dq, D::advance(a, step * 16 * kPanelBytes),
                                     D::advance(b, step / 4 * C::kRowPanelBytes + step % 4 * 32), step > 0);
        }
    }

    // This warpgroup's part of dQ: first the panel of which it has all rows, see BackwardConfig.
    FFA_DEVICE void issue_dq(float (&dq)[kDq]) const {
        constexpr int kWhole = C::kWholeDqRows / 2, kHalf = C::kHalfDqRows / 2;
        if constexpr (kWhole > 0) {
            issue_dq_panel<C::kWholeDqRows>(reinterpret_cast<float(&)[kWhole]>(dq), warpgroup * (C::kPanels - 1), 0);
        }
        if constexpr (kHalf > 0) {
            issue_dq_panel<C::kHalfDqRows>(reinterpret_cast<float(&)[kHalf]>(dq[kWhole]), C::kPanels / 2,
                                           warpgroup * C::kHalfDqRows);
        }
        ptx::wgmma_commit();
    }

    // dS into shared memory, keys contiguous; other warps' products may still read that of the step before.
    FFA_DEVICE void store_ds(const uint32 (&ds)[kScores / 2]) const {
        const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        const uint32 address =
            ptx::smem_address(shared.ds[ring.stage][warpgroup]) + row * kPanelBytes + (chunk ^ lane % 8) * 16;
#pragma unroll
        for (int step = 0; step < C::kRows / 16; ++step) {
            ptx::stmatrix_x4_transposed(address + step * 16 * kPanelBytes, ds[4 * step], ds[4 * step + 1],
                                        ds[4 * step + 2], ds[4 * step + 3]);
        }
    }

    // dQ into shared memory in the order of the buffer, from where Summer adds it.
    FFA_DEVICE void hand_over_dq(const float (&dq)[kDq]) const {
        ptx::named_barrier_sync(kDqEmptyBarrier + warpgroup, kSumThreads);
        float4* to = shared.dq[warpgroup] + warp * 32 + lane;
#pragma unroll
        for (int j = 0; j < C::kDqRows / 8; ++j) to[j * 128] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
        ptx::fence_proxy_async();
        ptx::named_barrier_arrive(kDqFullBarrier + warpgroup, kSumThreads);
    }

    // What dP is added to.  While a product runs, the compiler awaits it before other instructions write this; so it stands
    // before S.
    FFA_DEVICE void start_d_weights(float (&d_weights)[kScores]) const {
        ptx::mbarrier_wait(&shared.d_out_full[ring.stage], ring.phase);
        this->negate_rows(d_weights, shared.delta[ring.stage]);
        ptx::fence_registers(d_weights);
    }

    FFA_DEVICE void issue_d_weights(float (&d_weights)[kScores]) const {
        if constexpr (!kFromDelta) ptx::mbarrier_wait(&shared.d_out_full[ring.stage], ring.phase);
        ptx::wgmma_fence();
        this->template issue_scores<C::kVDim, kFromDelta>(d_weights, shared.v[kv_stage], shared.d_out[ring.stage]);
    }

    // P in pairs, and dS in d_weights, from S and dP, which are being made.
    FFA_DEVICE void differentiate(float (&scores)[kScores], float (&d_weights)[kScores], uint32 (&pairs)[kScores / 2],
                                  int stage, CaptureSums<C, Score>& sums) const {
        const int masked = shared.step[stage].masked;
        ptx::wgmma_wait<0>();
        ptx::fence_registers(scores);
        ptx::fence_registers(d_weights);
        this->mark_masked(scores, masked);
        if (masked) arrive_warp(&shared.mask_empty);
        Fragment<C>::differentiate(scores, d_weights, stage, sums);
        this->pack(scores, pairs);
    }

    // One key tile: every step of the item, then dK and dV.
    FFA_DEVICE void run_item(int steps, const Item& item) {
        CaptureSums<C, Score> sums{params, item, warpgroup * 64 + warp * 16};
        float dk[C::kHeadDim / 2] = {}, dv[C::kVDim / 2] = {};
        for (int remaining = steps; remaining > 0; --remaining, ring.advance()) {
            const int stage = ring.stage;
            float scores[kScores], d_weights[kScores];
            uint32 pairs[kScores / 2], ds[kScores / 2];
            if constexpr (kFromDelta) start_d_weights(d_weights);
            ptx::mbarrier_wait(&shared.q_full[stage], ring.phase);
            ptx::wgmma_fence();
            this->template issue_scores<C::kHeadDim>(scores, shared.k[kv_stage], shared.q[stage]);
            if constexpr (kCaptures) {
                issue_d_weights(d_weights);
                differentiate(scores, d_weights, pairs, stage, sums);
            } else {
                typename Fragment<C>::RowPairs shift, delta;
                const int masked = shared.step[stage].masked;
                this->load_rows(shift, shared.shift[stage]);
                if constexpr (!kLate) issue_d_weights(d_weights);
                ptx::wgmma_wait<!kLate>();  // S
                ptx::fence_registers(scores);
                this->make_weights(scores, pairs, stage, masked, shift);
                if constexpr (kLate) issue_d_weights(d_weights);
                if constexpr (!kFromDelta) this->load_rows(delta, shared.delta[stage]);
                ptx::wgmma_wait<0>();  // dP
                ptx::fence_registers(d_weights);
                if constexpr (kRounded) this->unpack(pairs, scores);
                if constexpr (kFromDelta) {
                    this->score_gradients(scores, d_weights);
                } else {
                    this->score_gradients(scores, d_weights, delta);
                }
            }
            this->pack(d_weights, ds);
            if constexpr (C::kSumDq) store_ds(ds);
            ptx::wgmma_fence();
            this->template issue_gradient<C::kVDim>(dv, pairs, shared.d_out[stage]);
            float dq[kDq];
            if constexpr (C::kSumDq) {
                ptx::fence_proxy_async();
                ptx::named_barrier_sync(kDsBarrier, kConsumers);
                if constexpr (kRounded) ptx::wgmma_wait<0>();
                ptx::wgmma_fence();
                issue_dq(dq);
                ptx::wgmma_wait<1>();  // dV
                arrive_warp(&shared.d_out_empty[stage]);
            }
            this->template issue_gradient<C::kHeadDim>(dk, ds, shared.q[stage]);
            ptx::wgmma_wait<1>();  // dQ, or dV
            if constexpr (C::kSumDq) {
                ptx::fence_registers(dq);
                hand_over_dq(dq);
            } else {
                arrive_warp(&shared.d_out_empty[stage]);
            }
            ptx::wgmma_wait<0>();
            arrive_warp(&shared.q_empty[stage]);
        }
        ptx::fence_registers(dk);
        ptx::fence_registers(dv);
        sums.finish_item();
        const Item done = item;  // its slot may be written again once all warps have arrived
        arrive_warp(&shared.kv_empty[kv_stage]);
        this->finish_dk(dk, done);
        this->finish_dv(dv, done);
    }

    FFA_DEVICE void run() {
        for (int items = 0;; ++items) {
            kv_stage = items % C::kKvStages;
            ptx::mbarrier_wait(&shared.kv_full[kv_stage], items / C::kKvStages & 1);
            const Item& item = shared.item[items % (2 * C::kKvStages)];
            const int steps = item.steps;
            if (steps < 0) return;
            run_item(steps, item);
        }
    }
};

}  // namespace ffa
