// What both kinds of consumers of the attention backward have in common: how a warpgroup makes S^T and dP^T of 64 keys x
// kRows query rows, what it does with these fragments, and how it writes dK and dV.
//
// Of a fragment a thread holds the keys lane / 4 (+ 8) of its warp's 16 and the rows 8 j + 2 (lane % 4) (+ 1): element
// 4 j + 2 h + c is key + 8 h, row + c.
#pragma once

#include "capture_sums.cuh"
#include "row_output.cuh"

namespace ffa {

template <class C> struct Fragment {
    using D = ptx::Descriptor<128>;
    template <int kN, bool kStridedA, bool kStridedB> using Mma = ptx::Wgmma<C::kType, kN, kStridedA, kStridedB>;
    static constexpr int kScores = C::kRows / 2;  // registers of S^T and dP^T

    const BackwardParams& params;
    BackwardShared<C>& shared;
    const int half;  // of the key tile: keys 64 half, ...
    const int warp = ptx::warp_uniform((threadIdx.x / 32) & 3);
    const int lane = ptx::lane_index();

    // scores[64 keys x kRows] = keys queries^T, for K Q^T and V dO^T; or added to what scores hold.
    template <int kColumns, bool kAdd = false>
    FFA_DEVICE void issue_scores(float (&scores)[kScores], const void* keys, const void* queries) const {
        const uint64 a = D::advance(D::contraction_is_contiguous(keys), half * 64 * kPanelBytes);
        const uint64 b = D::contraction_is_contiguous(queries);
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step) {
            const int panel = step / 4, column_bytes = step % 4 * 32;
            Mma<C::kRows, false, false>::ss(scores, D::advance(a, panel * C::kKeyPanelBytes + column_bytes),
                                            D::advance(b, panel * C::kRowPanelBytes + column_bytes), kAdd || step > 0);
        }
        ptx::wgmma_commit();
    }

    // gradient[64 keys x kColumns] += weights^T rows, for P^T dO and dS^T Q with P or dS in registers.
    template <int kColumns>
    FFA_DEVICE void issue_gradient(float (&gradient)[kColumns / 2], const uint32 (&weights)[kScores / 2],
                                   const void* rows) const {
        const uint64 b = D::contraction_is_strided(rows, C::kRowPanelBytes);
#pragma unroll
        for (int step = 0; step < C::kRows / 16; ++step) {
            Mma<kColumns, false, true>::rs(gradient, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
                                           weights[4 * step + 3], D::advance(b, step * 16 * kPanelBytes), 1);
        }
        ptx::wgmma_commit();
    }

    // A statistic of this thread's rows.  It is read before the products that it is used with are awaited: shared memory
    // is busy while products run, and reads take long.
    using RowPairs = float2[C::kRows / 8];
    FFA_DEVICE void load_rows(RowPairs& rows, const float* statistic) const {
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) rows[j] = reinterpret_cast<const float2*>(statistic)[4 * j + lane % 4];
    }

    // -statistic of this thread's rows, for each key.
    FFA_DEVICE void negate_rows(float (&scores)[kScores], const float* statistic) const {
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            const float2 row = reinterpret_cast<const float2*>(statistic)[4 * j + lane % 4];
            scores[4 * j] = scores[4 * j + 2] = -row.x;
            scores[4 * j + 1] = scores[4 * j + 3] = -row.y;
        }
    }

    FFA_DEVICE void exponentiate(float (&scores)[kScores], const RowPairs& shift) const {
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            scores[4 * j] = ptx::exp2_approx(fmaf(scores[4 * j], params.scale_log2, -shift[j].x));
            scores[4 * j + 1] = ptx::exp2_approx(fmaf(scores[4 * j + 1], params.scale_log2, -shift[j].y));
            scores[4 * j + 2] = ptx::exp2_approx(fmaf(scores[4 * j + 2], params.scale_log2, -shift[j].x));
            scores[4 * j + 3] = ptx::exp2_approx(fmaf(scores[4 * j + 3], params.scale_log2, -shift[j].y));
        }
    }

    // Mask bits of the rows 8 j + 2 (lane % 4) (+ 1).
    FFA_DEVICE uint2 mask_words(int j) const {
        const uint32* words = shared.mask[2 * half + warp / 2];
        const int row = 8 * j + lane % 4 * 2;
        if constexpr (C::kPack == 1) return *reinterpret_cast<const uint2*>(words + row);
        const uint32 word = words[row / C::kPack];
        return {word, word};
    }

    // `masked` in the place of what is masked.
    FFA_DEVICE void apply_mask(float (&weights)[kScores], float masked) const {
        const uint32 low = 1u << (warp % 2 * 16 + lane / 4), high = low << 8;
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            const uint2 word = mask_words(j);
            if (!(word.x & low)) weights[4 * j] = masked;
            if (!(word.y & low)) weights[4 * j + 1] = masked;
            if (!(word.x & high)) weights[4 * j + 2] = masked;
            if (!(word.y & high)) weights[4 * j + 3] = masked;
        }
    }

    // dP - delta becomes dS.
    static FFA_DEVICE void score_gradients(const float (&weights)[kScores], float (&d_weights)[kScores]) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) d_weights[i] *= weights[i];
    }

    // dP becomes dS.
    static FFA_DEVICE void score_gradients(const float (&weights)[kScores], float (&d_weights)[kScores],
                                           const RowPairs& delta) {
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            d_weights[4 * j] = weights[4 * j] * (d_weights[4 * j] - delta[j].x);
            d_weights[4 * j + 1] = weights[4 * j + 1] * (d_weights[4 * j + 1] - delta[j].y);
            d_weights[4 * j + 2] = weights[4 * j + 2] * (d_weights[4 * j + 2] - delta[j].x);
            d_weights[4 * j + 3] = weights[4 * j + 3] * (d_weights[4 * j + 3] - delta[j].y);
        }
    }

    static FFA_DEVICE void pack(const float (&values)[kScores], uint32 (&pairs)[kScores / 2]) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) pairs[i] = ptx::pack_pair<C::kType>(values[2 * i], values[2 * i + 1]);
    }

    static FFA_DEVICE void unpack(const uint32 (&pairs)[kScores / 2], float (&values)[kScores]) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) ptx::unpack_pair<C::kType>(pairs[i], values[2 * i], values[2 * i + 1]);
    }

    // S becomes P times the derivative of the score mod; pairs are P.
    FFA_DEVICE void modify(float (&scores)[kScores], uint32 (&pairs)[kScores / 2], int stage) const {
        const Step& step = shared.step[stage];
        const bool masked = step.masked;
        const float2* shift = reinterpret_cast<const float2*>(shared.shift[stage]) + lane % 4;
        const uint32 low = 1u << (warp % 2 * 16 + lane / 4), high = low << 8;
        const int key = step.key_begin + half * 64 + warp * 16 + lane / 4, row = lane % 4 * 2;
        const int last_key = step.key_end - 1, last_row = params.q_len - 1;
        // Of a thread's rows the even ones are of one head, the odd ones of one (which may be the same one).
        const typename Score::Head heads[2] = {
            Score::of_head(params.score_params, step.batch, step.head + row % C::kPack),
            Score::of_head(params.score_params, step.batch, step.head + (row + 1) % C::kPack)};
        const typename Score::Key keys[2][2] = {{Score::of_key(params.score_params, heads[0], key, 0, last_key),
                                                 Score::of_key(params.score_params, heads[1], key, 0, last_key)},
                                                {Score::of_key(params.score_params, heads[0], key, 8, last_key),
                                                 Score::of_key(params.score_params, heads[1], key, 8, last_key)}};
        const int odd = C::kPack == 1;  // positions from an even row to the next one
        const int first_row = step.row + row / C::kPack;
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            const float2 row_shift = shift[4 * j];
            const uint2 word = masked ? mask_words(j) : uint2{0xffffffffu, 0xffffffffu};
            float weight[4];
            const int offset = 8 * j / C::kPack;
            const typename Score::Row rows[2] = {
                Score::of_row(params.score_params, heads[0], first_row, offset, last_row),
                Score::of_row(params.score_params, heads[1], first_row, offset + odd, last_row)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& score = scores[4 * j + i];
                float slope = 1.0f;
                score = Score::apply(score * params.score_scale, params.score_params, heads[i % 2], rows[i % 2],
                                     keys[i / 2][i % 2], slope);
                const bool attended = (i % 2 ? word.y : word.x) & (i / 2 ? high : low);
                const float exponent = fmaf(score, params.scale_log2, i % 2 ? -row_shift.y : -row_shift.x);
                weight[i] = attended ? ptx::exp2_approx(exponent) : 0.0f;
                score = Score::kSlopes ? (attended ? weight[i] * slope : 0.0f) : weight[i];
            }
            pairs[2 * j] = ptx::pack_pair<C::kType>(weight[0], weight[1]);
            pairs[2 * j + 1] = ptx::pack_pair<C::kType>(weight[2], weight[3]);
        }
    }

    // Where captures of the score mod get gradients: S of masked pairs becomes a number that products never give.
    static constexpr uint32 kMasked = 0xffffffffu;
    FFA_DEVICE void mark_masked(float (&scores)[kScores], int masked) const {
        if (!masked) return;
        ptx::mbarrier_wait(&shared.mask_full, masked & 1);
        apply_mask(scores, __uint_as_float(kMasked));
    }

    // S, with masked pairs marked, becomes P, dP becomes dS, and the gradients of captures are added up.
    template <class Mod = Score>
    FFA_DEVICE void differentiate(float (&scores)[kScores], float (&d_weights)[kScores], int stage,
                                  CaptureSums<C, Mod>& sums) const {
        const Step& step = shared.step[stage];
        const float2* shift = reinterpret_cast<const float2*>(shared.shift[stage]) + lane % 4;
        const float2* delta = reinterpret_cast<const float2*>(shared.delta[stage]) + lane % 4;
        const int last_key = step.key_end - 1, last_row = params.q_len - 1;
        const auto& args = params.score_params;
        const typename Mod::Head head = Mod::of_head(args, step.batch, step.head);
        const int first_key = step.key_begin + half * 64 + warp * 16 + lane / 4;
        const typename Mod::Key keys[2] = {Mod::of_key(args, head, first_key, 0, last_key),
                                           Mod::of_key(args, head, first_key, 8, last_key)};
        sums.begin_step(step);
        StepSums<C, Mod> step_sums{sums, step};
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            const float row_shift[2] = {shift[4 * j].x, shift[4 * j].y}, row_delta[2] = {delta[4 * j].x, delta[4 * j].y};
            const int row = step.row + lane % 4 * 2;
            const typename Mod::Row rows[2] = {Mod::of_row(args, head, row, 8 * j, last_row),
                                               Mod::of_row(args, head, row, 8 * j + 1, last_row)};
            float values[4][Mod::kSums];
            typename Mod::Place places[4][Mod::kSums];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& score = scores[4 * j + i];
                float& d_weight = d_weights[4 * j + i];
                // Rows without keys, and those behind the last one, have an infinite shift.
                const bool attended = __float_as_uint(score) != kMasked && row_shift[i % 2] < -ptx::negative_infinity;
                float weight;
                const auto gradient = [&](float modified) {
                    const float exponent = fmaf(modified, params.scale_log2, -row_shift[i % 2]);
                    weight = attended ? ptx::exp2_approx(exponent) : 0.0f;
                    return weight * (d_weight - row_delta[i % 2]);
                };
                const float d_score = Mod::differentiate(score * params.score_scale, args, head, rows[i % 2],
                                                         keys[i / 2], gradient, values[i], places[i]);
                score = weight;
                d_weight = attended ? d_score : 0.0f;
#pragma unroll
                for (int n = 0; n < Mod::kSums; ++n) {
                    if (!attended) values[i][n] = 0.0f;
                }
            }
            step_sums.add(j, values, places);
        }
    }

    // S becomes P (times the derivative of the score mod, if there is one), masked; pairs are P.
    FFA_DEVICE void make_weights(float (&scores)[kScores], uint32 (&pairs)[kScores / 2], int stage, int masked,
                                 const RowPairs& shift) const {
        if constexpr (Score::kCount == 0) {
            exponentiate(scores, shift);
            if (masked) {
                ptx::mbarrier_wait(&shared.mask_full, masked & 1);
                apply_mask(scores, 0.0f);
                arrive_warp(&shared.mask_empty);
            }
            pack(scores, pairs);
        } else {
            if (masked) ptx::mbarrier_wait(&shared.mask_full, masked & 1);
            modify(scores, pairs, stage);
            if (masked) arrive_warp(&shared.mask_empty);
        }
    }

    // A gradient of 64 keys x kColumns: [columns / 8][thread] float4 of `block`, see backward_convert.cuh.
    template <int kColumns> FFA_DEVICE void add_gradient(const float (&gradient)[kColumns / 2], float* block) const {
        float* out = block + half * 64 * kColumns + (warp * 32 + lane) * 4;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            ptx::reduce_add_global_v4(out + j * 512, gradient[4 * j], gradient[4 * j + 1], gradient[4 * j + 2],
                                      gradient[4 * j + 3]);
        }
    }

    template <int kColumns>
    FFA_DEVICE void store_gradient(float (&gradient)[kColumns / 2], float factor, const Item& item, int columns,
                                   void* out, int64 batch_stride, int64 head_stride, int64 row_stride) const {
        using Element = typename C::GradientType;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) gradient[i] *= factor;
        uint32 thread[1] = {threadIdx.x % 128};
        ptx::fence_registers(thread);  // what follows from it is computed here, and takes no register over all steps
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int key = item.key_begin + half * 64 + thread[0] / 32 * 16 + thread[0] % 32 / 4 + 8 * h;
            Element* row = static_cast<Element*>(out) + item.batch * batch_stride + item.kv_head * head_stride +
                           key * row_stride;
            store_row<C::kType, kColumns>(row, key < item.key_end, gradient, h, columns);
        }
    }

    FFA_DEVICE float* block_of(const Item& item) const {
        return params.dkv_buffer + static_cast<int64>(item.block) * (C::kKeys * (C::kHeadDim + C::kVDim));
    }
    FFA_DEVICE void finish_dk(float (&dk)[C::kHeadDim / 2], const Item& item) const {
        if (params.dkv_buffer) {
            add_gradient<C::kHeadDim>(dk, block_of(item));
        } else {
            store_gradient<C::kHeadDim>(dk, params.scale, item, params.head_dim, params.dk, params.dk_batch,
                                        params.dk_head, params.dk_row);
        }
    }
    FFA_DEVICE void finish_dv(float (&dv)[C::kVDim / 2], const Item& item) const {
        if (params.dkv_buffer) {
            add_gradient<C::kVDim>(dv, block_of(item) + C::kKeys * C::kHeadDim);
        } else {
            store_gradient<C::kVDim>(dv, 1.0f, item, params.v_dim, params.dv, params.dv_batch, params.dv_head,
                                     params.dv_row);
        }
    }
};

}  // namespace ffa
