// The consumer warpgroups of the attention backward: the products and everything between them.
#pragma once

#include "backward_shared.cuh"

namespace ffa {

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

    // scores[64 keys x kRows] = keys queries^T, for K Q^T and V dO^T.
    FFA_DEVICE void issue_scores(float (&scores)[kScores], const void* keys, const void* queries) const {
        const uint64 a = D::advance(D::contraction_is_contiguous(keys), warpgroup * 64 * kPanelBytes);
        const uint64 b = D::contraction_is_contiguous(queries);
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
            store_gradient(dk, params.scale, done, params.head_dim, params.dk, params.dk_batch, params.dk_head,
                           params.dk_row);
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

}  // namespace ffa
