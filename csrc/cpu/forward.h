// Forward: online softmax over key tiles.
//
// Queries are lanes.  Scores of a panel of queries are computed a row a key (S^T = K Q^T), so that the softmax needs no
// sums across lanes, and the output is kept transposed (O^T += V^T P^T) until the end; the panel's scores stay in the
// first-level cache between the two products.
//
// With few queries there is one row tile a head, perhaps fewer than threads: then the keys are cut into parts as well,
// always in the same places, and the parts' results are added up in order.
#pragma once

#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "attention.h"

namespace magi {

constexpr int64_t kPartKeys = 4096;  // least keys of a part
constexpr int64_t kMostParts = 16;

// Products: how the two matrix products are computed (FloatForward, AmxForward).
template <class Products>
class Forward {
 public:
  explicit Forward(const Attention& a)
      : a_(a), steps_(a.score), factors_(factors(a, steps_)), products_(a, factors_.query), v_dim_(int(a.v_head_dim)),
        out_rows_(Products::out_rows(v_dim_)), row_tiles_((a.q_len + kQueryTile - 1) / kQueryTile) {
    if (row_tiles_ != 1) return;
    part_keys_ = std::max(kPartKeys, round_up_to_tile((a.kv_len + kMostParts - 1) / kMostParts));
    parts_ = std::max<int64_t>(1, (a.kv_len + part_keys_ - 1) / part_keys_);
  }

  Status run() {
    const int64_t heads = a_.batch * a_.q_heads;
    if (!products_.prepare() || !reserve_parts(heads)) return kOutOfMemory;
    bool ok = true;
    if (parts_ == 1) {
      ok = parallel_items(a_.threads, heads * row_tiles_, [&](int64_t item) {
        // Late rows first: under a causal mask they have the most keys.
        const int64_t head = item / row_tiles_, tile = row_tiles_ - 1 - item % row_tiles_;
        row_tile(head, tile * kQueryTile, 0, a_.kv_len, nullptr);
      });
    } else {
      ok = parallel_items(a_.threads, heads * parts_, [&](int64_t item) {
        const int64_t begin = item % parts_ * part_keys_;
        row_tile(item / parts_, 0, begin, begin + part_keys_, part(item));
      });
      ok = ok && parallel_items(a_.threads, heads, [&](int64_t head) { add_parts(head); });
    }
    return !ok ? kOutOfMemory : bias_ok_ ? kOk : kBiasOutOfRange;
  }

 private:
  using Worker = typename Products::Worker;
  struct Buffers {
    float *out_panels, *rows, *max, *sum;
  };

  Buffers buffers() const {
    static thread_local Scratch scratch;
    const size_t out = size_t(kQueryTile) * out_rows_, rows = size_t(kQueryTile) * v_dim_;
    scratch.reserve({out, rows, kQueryTile, kQueryTile});
    Buffers b;
    b.out_panels = scratch.take(out);
    b.rows = scratch.take(rows);
    b.max = scratch.take(kQueryTile);
    b.sum = scratch.take(kQueryTile);
    return b;
  }

  static int64_t round_up_to_tile(int64_t keys) { return (keys + kKeyTile - 1) / kKeyTile * kKeyTile; }

  // A part's result: for each row the maximum, the sum and the output before it is divided by the sum.
  int64_t part_size() const { return a_.q_len * (2 + v_dim_); }
  float* part(int64_t item) const { return partial_.get() + item * part_size(); }
  bool reserve_parts(int64_t heads) {
    if (parts_ > 1) partial_.reset(new (std::nothrow) float[heads * parts_ * part_size()]);
    return parts_ == 1 || partial_ != nullptr;
  }

  // Rows from `first` on of one head (numbered over the batch), and the key tiles that begin in [begin, end).
  void row_tile(int64_t batch_head, int64_t first, int64_t begin, int64_t end, float* partial) {
    const int64_t batch = batch_head / a_.q_heads, head = batch_head % a_.q_heads;
    static thread_local RowTileMask mask;
    const int rows = int(std::min<int64_t>(kQueryTile, a_.q_len - first));
    const Buffers b = buffers();
    const int64_t kv_head = head / (a_.q_heads / a_.kv_heads);
    mask.reset(a_.mask, batch, head, first, first + rows, a_.q_len, a_.kv_len, Products::kTileAlign);
    std::fill_n(b.max, kQueryTile, -kInfinity);
    std::fill_n(b.sum, kQueryTile, 0.0f);
    std::fill_n(b.out_panels, kQueryTile * out_rows_, 0.0f);
    if (!mask.tiles().empty()) {
      Worker worker(products_);
      worker.load_queries(batch, head, first, rows);
      for (const KeyTile& tile : mask.tiles()) {
        if (tile.begin < begin || tile.begin >= end) continue;
        worker.load_keys(batch, kv_head, tile);
        for (int p = 0; p < panel_count(rows); ++p) {
          const PanelPlace place = panel_place(batch, head, first, rows, p);
          PanelMask panel_mask;
          mask.panel(p, place.vecs, tile, &panel_mask);
          if (panel_mask.lo < panel_mask.hi) panel(place, p, tile, panel_mask, worker, b);
        }
      }
    }
    if (partial == nullptr) {
      finish(batch, head, first, rows, b);
    } else {
      std::copy_n(b.max, rows, partial);
      std::copy_n(b.sum, rows, partial + rows);
      for (int p = 0; p < panel_count(rows); ++p) {
        panel_to_rows(b.out_panels + p * kPanel * out_rows_, std::min(kPanel, rows - p * kPanel), kPanel, v_dim_,
                      partial + 2 * rows + p * kPanel * v_dim_, v_dim_);
      }
    }
  }

  void add_parts(int64_t batch_head) const {
    static thread_local Scratch scratch;
    scratch.reserve({size_t(v_dim_)});
    float* out = scratch.take(size_t(v_dim_));
    const int64_t rows = a_.q_len;
    const float* parts = part(batch_head * parts_);
    for (int64_t i = 0; i < rows; ++i) {
      float max = -kInfinity, sum = 0.0f;
      for (int64_t n = 0; n < parts_; ++n) max = std::max(max, parts[n * part_size() + i]);
      std::fill_n(out, v_dim_, 0.0f);
      for (int64_t n = 0; n < parts_; ++n) {
        const float* from = parts + n * part_size();
        // A part without any key has sum and output 0; NaN stays NaN.
        const float weight = from[i] == -kInfinity ? 1.0f : std::exp2((from[i] - max) * factors_.score);
        sum += from[rows + i] * weight;
        for (int e = 0; e < v_dim_; ++e) out[e] += from[2 * rows + i * v_dim_ + e] * weight;
      }
      const int64_t at = batch_head * rows + i;
      a_.lse[at] = sum == 0.0f ? -kInfinity : max * factors_.score + std::log2(sum);
      a_.max_score[at] = max * factors_.score;
      store_rows(a_.out, batch_head / a_.q_heads, batch_head % a_.q_heads, i, i + 1, v_dim_, out, v_dim_,
                 sum == 0.0f ? 0.0f : 1.0f / sum);
    }
  }

  void panel(const PanelPlace& place, int p, const KeyTile& tile, const PanelMask& mask, Worker& worker,
             const Buffers& b) {
    float* scores = worker.scores(p, place.vecs, mask.lo, mask.hi);
    if (!steps_.identity() && !steps_.apply(a_.scale, place, tile.begin, mask, scores, nullptr, kPanel)) {
      bias_ok_ = false;
    }
    if (!mask.full) apply_mask(mask, place.vecs, scores, kPanel);
    float* out = b.out_panels + p * kPanel * out_rows_;
    for (int j = 0; j < place.vecs; ++j) {
      softmax(mask.hi - mask.lo, scores + j * kLanes, b.max + p * kPanel + j * kLanes, b.sum + p * kPanel + j * kLanes,
              out + j * kLanes);
    }
    worker.add_values(place.vecs, mask.lo, mask.hi, out);
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
      float* out = b.out_panels + p * kPanel * out_rows_;
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
  Products products_;
  const int v_dim_, out_rows_;
  const int64_t row_tiles_;
  int64_t parts_ = 1, part_keys_ = 0;
  std::unique_ptr<float[]> partial_;
  std::atomic<bool> bias_ok_{true};
};

}  // namespace magi
