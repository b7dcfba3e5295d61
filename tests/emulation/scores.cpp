// Generated score mods, run over all places on the CPU.
#include "ptx.cuh"

#define FFA_SCORE_STEPS ScoreStep::none
#include "score.cuh"
#include "score_math.cuh"

template <class Mod>
void run(const void* params, const float* scores, const int* sizes, float* results, float* slopes) {
    const auto& given = *static_cast<const typename Mod::Params*>(params);
    for (int b = 0; b < sizes[0]; ++b) {
        for (int h = 0; h < sizes[1]; ++h) {
            for (int q = 0; q < sizes[2]; ++q) {
                for (int k = 0; k < sizes[3]; ++k, ++scores, ++results, ++slopes) {
                    const ScoreIndex at{b, h, q, k};
                    *slopes = 1.0f;
                    *results = Mod::apply(*scores, given, at, *slopes);
                    const float alone = Mod::apply(*scores, given, at);
                    if (std::memcmp(results, &alone, 4)) *results = 1e30f;
                }
            }
        }
    }
}

MODS
