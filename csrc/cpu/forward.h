// Forward: online softmax over key tiles.
//
// Queries are lanes.  Scores of a panel of queries are computed a row a key (S^T = K Q^T), so that the softmax needs no
// sums across lanes, and the output is kept transposed (O^T += V^T P^T) until the end; the panel's scores stay in the
// first-level cache between the two products.
#pragma once

#include <atomic>
#include <cmath>

#include "attention.h"

namespace magi {

class Forward {
 public:
  explicit Forward(const Attention& a)
      : a_(a), steps_(a.score), factors_(factors(a, steps_)), dim_(int(a.head_dim)), v_dim_(int(a.v_head_dim)),
        row_tiles_((a.q_len + kQueryTile - 1) / kQueryTile) {}

  Status run() {
    const int64_t items = a_.batch * a_.q_heads * row_tiles_;
    const bool ok = parallel_items(a_.threads, items, [&](int64_t item) {
      // Late rows first: under a causal mask they have the most keys.
      const int64_t head = item / row_tiles_, tile = row_tiles_ - 1 - item % row_tiles_;
      row_tile(head / a_.q_heads, head % a_.q_heads, tile * kQueryTile);
    });
    return !ok ? kOutOfMemory : bias_ok_ ? kOk : kBiasOutOfRange;
  }

 private:
  struct Buffers {
    float *q_panels, *out_panels, *scores, *k, *v, *rows, *max, *sum;
  };

  Buffers buffers() const {
    static thread_local Scratch scratch;
    const size_t q = size_t(kQueryTile) * dim_, out = size_t(kQueryTile) * v_dim_;
    const size_t scores = size_t(kKeyTile) * kPanel, k = size_t(kKeyTile) * dim_, v = size_t(kKeyTile) * v_dim_;
    const size_t rows = size_t(kQueryTile) * std::max(dim_, v_dim_);
    scratch.reserve({q, out, scores, k, v, rows, kQueryTile, kQueryTile});
    Buffers b;
    b.q_panels = scratch.take(q);
    b.out_panels = scratch.take(out);
    b.scores = scratch.take(scores);
    b.k = scratch.take(k);
    b.v = scratch.take(v);
    b.rows = scratch.take(rows);
    b.max = scratch.take(kQueryTile);
    b.sum = scratch.take(kQueryTile);
    return b;
  }

  void row_tile(int64_t batch, int64_t head, int64_t first) {
    static thread_local RowTileMask mask;
    const int64_t last = std::min(first + kQueryTile, a_.q_len);
    const int rows = int(last - first);
    const Buffers b = buffers();
    const int64_t kv_head = head / (a_.q_heads / a_.kv_heads);
    mask.reset(a_.mask, batch, head, first, last, a_.q_len, a_.kv_len);
    std::fill_n(b.max, kQueryTile, -kInfinity);
    std::fill_n(b.sum, kQueryTile, 0.0f);
    std::fill_n(b.out_panels, kQueryTile * v_dim_, 0.0f);
    if (!mask.tiles().empty()) {
      load_rows(a_.q, batch, head, first, last, dim_, b.rows, dim_);
      for (int p = 0; p < panel_count(rows); ++p) {
        rows_to_panel(b.rows + p * kPanel * dim_, dim_, std::min(kPanel, rows - p * kPanel), kPanel, dim_,
                      factors_.query, b.q_panels + p * kPanel * dim_);
      }
    }
    for (const KeyTile& tile : mask.tiles()) {
      const Rows k = rows_in_float(a_.k, batch, kv_head, tile, dim_, b.k);
      const Rows v = rows_in_float(a_.v, batch, kv_head, tile, v_dim_, b.v);
      for (int p = 0; p < panel_count(rows); ++p) {
        const PanelPlace place = panel_place(batch, head, first, rows, p);
        PanelMask panel_mask;
        mask.panel(p, place.vecs, tile, &panel_mask);
        if (panel_mask.lo < panel_mask.hi) panel(place, p, tile, panel_mask, k, v, b);
      }
    }
    finish(batch, head, first, rows, b);
  }

  void panel(const PanelPlace& place, int p, const KeyTile& tile, const PanelMask& mask, Rows k, Rows v,
             const Buffers& b) {
    const int keys = mask.hi - mask.lo;
    multiply_in_parts(keys, place.vecs, dim_, {k.data + mask.lo * k.row, k.row, 1}, b.q_panels + p * kPanel * dim_, kPanel,
                    b.scores, kPanel);
    if (!steps_.identity() && !steps_.apply(a_.scale, place, tile.begin, mask, b.scores, nullptr, kPanel)) {
      bias_ok_ = false;
    }
    if (!mask.full) apply_mask(mask, place.vecs, b.scores, kPanel);
    float* out = b.out_panels + p * kPanel * v_dim_;
    for (int j = 0; j < place.vecs; ++j) {
      softmax(keys, b.scores + j * kLanes, b.max + p * kPanel + j * kLanes, b.sum + p * kPanel + j * kLanes,
              out + j * kLanes);
    }
    multiply<true>(v_dim_, place.vecs, keys, {v.data + mask.lo * v.row, 1, v.row}, b.scores, kPanel, out, kPanel);
  }

  // One column of lanes: scores become exp2(factor * (score - max)); sum and out are brought to the new maximum.
  void softmax(int keys, float* scores, float* max, float* sum, float* out) const {
    const VecF old_max = load(max);
    VecF high[2] = {old_max, old_max};  // two chains: a maximum takes several cycles
    int key = 0;
    for (; key + 2 <= keys; key += 2) {
      high[0] = max_or_second(high[0], load(scores + key * kPanel));
      high[1] = max_or_second(high[1], load(scores + (key + 1) * kPanel));
    }
    if (key < keys) high[0] = max_or_second(high[0], load(scores + key * kPanel));
    const VecF new_max = max_or_second(high[0], high[1]);
    // A lane without any key yet subtracts 0, not minus infinity.
    const VecF base = new_max == -kInfinity ? VecF{} : new_max;
    VecF total{};
    for (key = 0; key < keys; ++key) {
      const VecF p = exp2_below(load(scores + key * kPanel), base, factors_.score);
      total += p;
      store(scores + key * kPanel, p);
    }
    if (all_equal(old_max, new_max)) {
      store(sum, load(sum) + total);
      return;
    }
    const VecF shrink = exp2_below(old_max, base, factors_.score);
    store(sum, load(sum) * shrink + total);
    store(max, new_max);
    for (int e = 0; e < v_dim_; ++e) store(out + e * kPanel, load(out + e * kPanel) * shrink);
  }

  void finish(int64_t batch, int64_t head, int64_t first, int rows, const Buffers& b) const {
    const int64_t at = (batch * a_.q_heads + head) * a_.q_len + first;
    for (int i = 0; i < rows; ++i) {
      const float sum = b.sum[i], max = b.max[i] * factors_.score;
      a_.lse[at + i] = sum == 0.0f ? -kInfinity : max + std::log2(sum);
      a_.max_score[at + i] = max;
    }
    for (int p = 0; p < panel_count(rows); ++p) {
      float* out = b.out_panels + p * kPanel * v_dim_;
      float inverse[kPanel];
      for (int lane = 0; lane < kPanel; ++lane) {
        const float sum = b.sum[p * kPanel + lane];
        inverse[lane] = sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
      }
      for (int e = 0; e < v_dim_; ++e) {
        for (int lane = 0; lane < kPanel; ++lane) out[e * kPanel + lane] *= inverse[lane];
      }
      panel_to_rows(out, std::min(kPanel, rows - p * kPanel), kPanel, v_dim_, b.rows + p * kPanel * v_dim_, v_dim_);
    }
    store_rows(a_.out, batch, head, first, first + rows, v_dim_, b.rows, v_dim_, 1.0f);
  }

  const Attention& a_;
  const ScoreSteps steps_;
  const Factors factors_;
  const int dim_, v_dim_;
  const int64_t row_tiles_;
  std::atomic<bool> bias_ok_{true};
};

}  // namespace magi
