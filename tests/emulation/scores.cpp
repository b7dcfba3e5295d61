// Generated score mods, run over all places on the CPU.
#include "ptx.cuh"

#define FFA_SCORE_STEPS ScoreStep::none
#include "score.cuh"
#include "score_math.cuh"

// Adds up the gradients of what a mod captures, where those of its results are given (NaN: the pair does not attend);
// each head in a copy of its own.
template <class Mod>
void add_up([[maybe_unused]] const void* params, [[maybe_unused]] const float* scores,
            [[maybe_unused]] const float* gradients, [[maybe_unused]] const int* sizes) {
    if constexpr (Mod::kSums > 0) {
        const auto& given = *static_cast<const typename Mod::Params*>(params);
        for (int b = 0; b < sizes[0]; ++b) {
            for (int h = 0; h < sizes[1]; ++h) {
                ++blockIdx.x;
                const auto head = Mod::of_head(given, b, h);
                for (int q = 0; q < sizes[2]; ++q) {
                    const auto row = Mod::of_row(given, head, q - 3, 3, sizes[2] - 1);
                    for (int k = 0; k < sizes[3]; ++k, ++scores, ++gradients) {
                        if (*gradients != *gradients) continue;
                        const auto key = Mod::of_key(given, head, k - 8, 8, sizes[3] - 1);
                        float values[Mod::kSums];
                        typename Mod::Place places[Mod::kSums];
                        const auto gradient = [&](float) { return *gradients; };
                        Mod::differentiate(*scores, given, head, row, key, gradient, values, places);
                        for (int n = 0; n < Mod::kSums; ++n) {
                            const auto kind = Mod::sum_kind(n);
                            auto at = kind == SumKind::pair ? places[n] : Mod::place(given, head, row, key, n);
                            if (kind == SumKind::distance) at += q - k;
                            if (at >= 0) Mod::sum(given, n)[at] += values[n];
                        }
                    }
                }
            }
        }
    }
}

template <class Mod>
void run(const void* params, const float* scores, const int* sizes, float* results, float* slopes) {
    const auto& given = *static_cast<const typename Mod::Params*>(params);
    for (int b = 0; b < sizes[0]; ++b) {
        for (int h = 0; h < sizes[1]; ++h) {
            const auto head = Mod::of_head(given, b, h);
            for (int q = 0; q < sizes[2]; ++q) {
                const auto row = Mod::of_row(given, head, q - 3, 3, sizes[2] - 1);
                for (int k = 0; k < sizes[3]; ++k, ++scores, ++results, ++slopes) {
                    const auto key = Mod::of_key(given, head, k - 8, 8, sizes[3] - 1);
                    *slopes = 1.0f;
                    *results = Mod::apply(*scores, given, head, row, key, *slopes);
                    const float alone = Mod::apply(*scores, given, head, row, key);
                    if (std::memcmp(results, &alone, 4)) *results = 1e30f;
                }
            }
        }
    }
}

MODS
