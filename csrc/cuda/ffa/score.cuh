// Score mods, applied to a fragment of scores: a sequence of simple steps (magi_flex/kernels/request.py), or code that was
// generated from the mod's graph (FFA_GENERATED_SCORE; magi_flex/kernels/ffa_generated_score.py).
//
// A mod works in four parts, so that a kernel does each as seldom as its fragment allows: what depends on batch entry and
// head alone (Head), on them and the row (Row), on them and the key (Key), and `apply` for each score.  Rows and keys are
// given as the first one of a thread and an offset that is known when the code is compiled.  They may lie behind the last
// one: such pairs are masked, but what is read for them must be readable (and may be NaN).
#pragma once

#include "ptx.cuh"

// What the place depends on where a gradient of something that a mod captures is summed, see capture_sums.cuh.
enum class SumKind { head, row, key, distance, pair };

enum class ScoreStep { none, multiply, softcap, distance, absolute_distance, bias_f32, bias_bf16, bias_fp16 };

// What a step reads.  The index of a table's element is the sum of strides times batch entry, head, row and key.
struct ScoreStepParams {
    float value;    // multiply, bias: the factor; softcap: the cap
    float inverse;  // softcap: 1 / cap
    const void* table;
    int64 stride_batch, stride_head, stride_row, stride_key;
};

struct ScoreIndex {
    int batch, head, row, key;
};

template <ScoreStep kStep>
FFA_DEVICE float apply_score_step(float score, const ScoreStepParams& step, const ScoreIndex& at) {
    if constexpr (kStep == ScoreStep::none) {
        return score;
    } else if constexpr (kStep == ScoreStep::multiply) {
        return score * step.value;
    } else if constexpr (kStep == ScoreStep::softcap) {
        return step.value * ptx::tanh_approx(score * step.inverse);
    } else if constexpr (kStep == ScoreStep::distance || kStep == ScoreStep::absolute_distance) {
        const float slope = __ldg(static_cast<const float*>(step.table) + at.head * step.stride_head);
        const int distance = at.key - at.row;
        return fmaf(slope, kStep == ScoreStep::distance ? distance : abs(distance), score);
    } else {
        const int64 index = at.batch * step.stride_batch + at.head * step.stride_head + at.row * step.stride_row +
                            at.key * step.stride_key;
        float bias;
        if constexpr (kStep == ScoreStep::bias_f32) {
            bias = __ldg(static_cast<const float*>(step.table) + index);
        } else {
            float unused;
            const uint32 bits = __ldg(static_cast<const uint16*>(step.table) + index);
            ptx::unpack_pair<kStep == ScoreStep::bias_bf16 ? DType::bf16 : DType::fp16>(bits, bias, unused);
        }
        return fmaf(step.value, bias, score);
    }
}

// The same, and `slope` times the step's derivative, but for constant factors (multiply): these are the host's.
template <ScoreStep kStep>
FFA_DEVICE float apply_score_step(float score, const ScoreStepParams& step, const ScoreIndex& at, float& slope) {
    if constexpr (kStep == ScoreStep::softcap) {
        const float t = ptx::tanh_approx(score * step.inverse);
        slope *= fmaf(-t, t, 1.0f);
        return step.value * t;
    } else {
        return apply_score_step<kStep>(score, step, at);
    }
}

template <ScoreStep... kSteps> struct ScoreSteps {
    static constexpr int kCount = ((kSteps != ScoreStep::none) + ...);
    static constexpr bool kSlopes = ((kSteps == ScoreStep::softcap) || ...);  // the derivative depends on the score
    static constexpr int kSums = 0;  // gradients of captures
    struct Params {
        ScoreStepParams steps[sizeof...(kSteps)];
    };
    struct Head {
        int batch, head;
    };
    struct Row {
        int row;
    };
    struct Key {
        int key;
    };

    FFA_DEVICE static Head of_head(const Params&, int batch, int head) { return {batch, head}; }
    FFA_DEVICE static Row of_row(const Params&, const Head&, int first, int offset, int last) {
        return {min(first + offset, last)};
    }
    FFA_DEVICE static Key of_key(const Params&, const Head&, int first, int offset, int last) {
        return {min(first + offset, last)};
    }
    FFA_DEVICE static float apply(float score, const Params& params, const Head& head, const Row& row, const Key& key) {
        const ScoreStepParams* step = params.steps;
        const ScoreIndex at{head.batch, head.head, row.row, key.key};
        ((score = apply_score_step<kSteps>(score, *step++, at)), ...);
        return score;
    }
    FFA_DEVICE static float apply(float score, const Params& params, const Head& head, const Row& row, const Key& key,
                                  float& slope) {
        const ScoreStepParams* step = params.steps;
        const ScoreIndex at{head.batch, head.head, row.row, key.key};
        ((score = apply_score_step<kSteps>(score, *step++, at, slope)), ...);
        return score;
    }
};
#if FFA_GENERATED_SCORE
#include "score_math.cuh"
// The struct score_math::GeneratedScore, which has what ScoreSteps has.
#include "generated.cuh"
using Score = score_math::GeneratedScore;
#else
using Score = ScoreSteps<FFA_SCORE_STEPS>;
#endif
