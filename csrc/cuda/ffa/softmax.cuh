// Online softmax (Milakov and Gimelshein 2018) over the rows of a score fragment.
#pragma once

#include "ptx.cuh"

// Statistics of the two rows of which a thread holds fragments.
struct OnlineSoftmax {
    // Scores may exceed the maximum that the sums refer to by this many powers of two before it is moved
    // (FlashAttention-4's lazy rescaling).
    static constexpr float kThreshold = 8.0f;

    float max[2];        // what the sums and the output refer to; unscaled
    float seen[2];       // this thread's true maximum; unscaled
    float sum[2];        // this thread's part
    float factor[2];     // by which the output must be multiplied where `moved`
    bool moved = false;  // the same in all lanes of a warp

    FFA_DEVICE void reset() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            max[h] = seen[h] = ptx::negative_infinity;
            sum[h] = 0.0f;
        }
    }

    // Replaces scores by exp2(scale * (score - max)).
    template <int kCount> FFA_DEVICE void update(float (&scores)[kCount], float scale) {
        float new_max[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float even = scores[2 * h], odd = scores[2 * h + 1];
#pragma unroll
            for (int i = 4; i < kCount; i += 4) {
                even = fmaxf(even, scores[i + 2 * h]);
                odd = fmaxf(odd, scores[i + 2 * h + 1]);
            }
            new_max[h] = fmaxf(even, odd);
            seen[h] = fmaxf(seen[h], new_max[h]);
        }
        const bool exceeds = new_max[0] * scale > max[0] * scale + kThreshold ||
                             new_max[1] * scale > max[1] * scale + kThreshold;
        moved = __any_sync(0xffffffffu, exceeds);
        if (moved) move_max(new_max, scale);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // -inf - -inf must not become a NaN.
            const float offset = max[h] == ptx::negative_infinity ? 0.0f : max[h] * scale;
            float even = 0.0f, odd = 0.0f;
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                float& first = scores[i + 2 * h];
                float& second = scores[i + 2 * h + 1];
                first = ptx::exp2_approx(fmaf(first, scale, -offset));
                second = ptx::exp2_approx(fmaf(second, scale, -offset));
                even += first;
                odd += second;
            }
            sum[h] += even + odd;
        }
    }

  private:
    FFA_DEVICE void move_max(const float (&new_max)[2], float scale) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float row = fmaxf(new_max[h], __shfl_xor_sync(0xffffffffu, new_max[h], 1));
            row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, 2));
            row = fmaxf(row, max[h]);
            factor[h] = row == ptx::negative_infinity ? 1.0f : ptx::exp2_approx((max[h] - row) * scale);
            max[h] = row;
            sum[h] *= factor[h];
        }
    }
};
