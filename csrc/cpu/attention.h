// The C interface, and what forward and backward share.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>

#include "mask.h"
#include "microkernel.h"
#include "parallel.h"
#include "score.h"
#include "tensor.h"

namespace magi {

// One call.  B batch, H query heads, G key/value heads, Q queries, K keys, D query/key head dim, E value head dim.
struct Attention {
  int64_t batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim;
  float scale;
  int32_t threads;
  Tensor4 q, k, v;   // [B, H, Q, D], [B, G, K, D], [B, G, K, E]
  Tensor4 out;       // [B, H, Q, E]
  float* lse;        // [B, H, Q], log2 domain
  float* max_score;  // [B, H, Q], log2 domain; forward only
  Mask mask;
  ScoreProgram score;
  Tensor4 d_out, dq, dk, dv;  // backward only, as is the next
  const float* d_lse;         // [B, H, Q] or null
};

enum Status : int32_t { kOk = 0, kOutOfMemory = 1, kBiasOutOfRange = 2 };

inline int round_up(int64_t x, int step) { return int((x + step - 1) / step * step); }

struct Rows {  // float32 rows, elements side by side
  const float* data;
  ptrdiff_t row;
};

// Rows [begin, end) where they lie if they are float32, else widened into `scratch`.
inline Rows rows_in_float(const Tensor4& t, int64_t batch, int64_t head, const KeyTile& tile, int dim, float* scratch) {
  if (t.type == Type::kFloat32 && t.stride[3] == 1) {
    return {static_cast<const float*>(t.data) + offset(t, batch, head) + tile.begin * t.stride[2], t.stride[2]};
  }
  load_rows(t, batch, head, tile.begin, tile.end, dim, scratch, dim);
  return {scratch, dim};
}

// Panels of a row tile; the last one may be narrower.
inline int panel_count(int64_t rows) { return int((rows + kPanel - 1) / kPanel); }
inline PanelPlace panel_place(int64_t batch, int64_t head, int64_t first_row, int64_t rows, int panel) {
  const int64_t left = std::min<int64_t>(kPanel, rows - panel * kPanel);
  return {batch, head, first_row + panel * kPanel, left, int((left + kLanes - 1) / kLanes)};
}

// Scores in the log2 domain are `score` * (`query` * q k^T, then the score program).  The scale is applied in the same
// instruction that subtracts the maximum, so it rounds nothing more; only its sign, which turns the order of scores,
// goes into the queries.
struct Factors {
  float query, score;
};
inline Factors factors(const Attention& a, const ScoreSteps& steps) {
  if (!steps.identity()) return {1.0f, kLog2E};
  if (a.scale == 0.0f) return {0.0f, kLog2E};
  return {std::copysign(1.0f, a.scale), std::abs(a.scale) * kLog2E};
}

}  // namespace magi
