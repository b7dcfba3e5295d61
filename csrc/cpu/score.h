// Native steps of a score_mod, on a panel of scores (a row a key, a lane a query), with the derivative that the backward
// needs.
#pragma once

#include <cstdint>

#include "mask.h"
#include "simd.h"
#include "tensor.h"

namespace magi {

enum class StepKind : int32_t { kMultiply = 0, kSoftcap = 1, kDistance = 2, kBias = 3 };

// Part of the C interface.
struct ScoreStep {
  StepKind kind;
  float value;           // factor, or the cap
  const void* table;     // Distance: float32 slopes; Bias: the table
  Type type;             // of the table
  int32_t absolute;      // Distance: |k - q|
  int64_t stride[4];     // of b, h, q, k in the table, in elements (Distance: only h)
  int64_t offset, size;  // Bias: first element, elements in all
};

struct ScoreProgram {
  const ScoreStep* steps;
  int64_t count;
  int64_t batch_offset, head_offset;
  const int32_t* q_index;  // what local rows and keys are called; null: themselves
  const int32_t* k_index;
};

// A panel of queries of one head.
struct PanelPlace {
  int64_t batch, head;
  int64_t first_row, rows;
  int vecs;
};

class ScoreSteps {
 public:
  explicit ScoreSteps(const ScoreProgram& program) : program_(program) {
    for (int64_t i = 0; i < program.count; ++i) {
      has_derivative_ |= program.steps[i].kind == StepKind::kSoftcap || program.steps[i].kind == StepKind::kMultiply;
    }
  }

  bool identity() const { return program_.count == 0; }
  bool has_derivative() const { return has_derivative_; }  // other than 1 everywhere

  // Keys key_begin + [mask.lo, mask.hi).  derivative: null, or as large as the scores; becomes d score / d (scale q k^T).
  // Scores come in as q k^T.  False: a pair that attends has a bias outside of its table.
  bool apply(float scale, const PanelPlace& at, int64_t key_begin, const PanelMask& mask, float* scores,
             float* derivative, int row) const {
    const int keys = mask.hi - mask.lo;
    bool in_range = true;
    each(keys, at.vecs, row, [&](int, int, int i) {
      store(scores + i, load(scores + i) * scale);
      if (derivative != nullptr) store(derivative + i, splat(1.0f));
    });
    for (int64_t s = 0; s < program_.count; ++s) {
      const ScoreStep& step = program_.steps[s];
      switch (step.kind) {
        case StepKind::kMultiply:
          each(keys, at.vecs, row, [&](int, int, int i) {
            store(scores + i, load(scores + i) * step.value);
            if (derivative != nullptr) store(derivative + i, load(derivative + i) * step.value);
          });
          break;
        case StepKind::kSoftcap:
          each(keys, at.vecs, row, [&](int, int, int i) {
            const VecF t = tanh(load(scores + i) * (1.0f / step.value));
            store(scores + i, t * step.value);
            if (derivative != nullptr) store(derivative + i, load(derivative + i) * (1.0f - t * t));
          });
          break;
        case StepKind::kDistance: add_distance(step, at, key_begin + mask.lo, keys, scores, row); break;
        case StepKind::kBias: in_range &= add_bias(step, at, key_begin, mask, scores, row); break;
      }
    }
    return in_range;
  }

 private:
  template <class F>
  static void each(int keys, int vecs, int row, F f) {
    for (int key = 0; key < keys; ++key) {
      for (int j = 0; j < vecs; ++j) f(key, j, key * row + j * kLanes);
    }
  }

  int32_t query_name(const PanelPlace& at, int lane) const {
    const int64_t query = at.first_row + std::min<int64_t>(lane, at.rows - 1);
    return program_.q_index == nullptr ? int32_t(query) : program_.q_index[query];
  }
  int32_t key_name(int64_t key) const { return program_.k_index == nullptr ? int32_t(key) : program_.k_index[key]; }

  void add_distance(const ScoreStep& step, const PanelPlace& at, int64_t first_key, int keys, float* scores,
                    int row) const {
    const float slope =
        static_cast<const float*>(step.table)[(at.head + program_.head_offset) * step.stride[1]];
    int32_t names[kPanel];
    for (int lane = 0; lane < kPanel; ++lane) names[lane] = query_name(at, lane);
    each(keys, at.vecs, row, [&](int key, int j, int i) {
      VecI distance = key_name(first_key + key) - load_as<VecI>(reinterpret_cast<const float*>(names) + j * kLanes);
      if (step.absolute) distance = distance < 0 ? -distance : distance;
      store(scores + i, load(scores + i) + slope * __builtin_convertvector(distance, VecF));
    });
  }

  bool add_bias(const ScoreStep& step, const PanelPlace& at, int64_t key_begin, const PanelMask& mask, float* scores,
                int row) const {
    return with_type(step.type, [&](auto zero) {
      const auto* table = static_cast<const decltype(zero)*>(step.table);
      bool in_range = true;
      for (int lane = 0; lane < at.rows; ++lane) {
        const int64_t base = step.offset + (at.batch + program_.batch_offset) * step.stride[0] +
                             (at.head + program_.head_offset) * step.stride[1] + query_name(at, lane) * step.stride[2];
        float* score = scores + lane;
        for (int key = mask.lo; key < mask.hi; ++key, score += row) {
          const int64_t index = base + key_name(key_begin + key) * step.stride[3];
          if (uint64_t(index) < uint64_t(step.size)) {
            *score += step.value * to_float(table[index]);
          } else {  // harmless where the pair is masked
            in_range &= !(mask.full || (mask.words[key / 32][lane / kLanes][lane % kLanes] >> key % 32 & 1u));
          }
        }
      }
      return in_range;
    });
  }

  ScoreProgram program_;
  bool has_derivative_ = false;
};

}  // namespace magi
