// The forward's two products in float32: keys and values are read where they lie.
#pragma once

#include "attention.h"

namespace magi {

class FloatForward {
 public:
  static constexpr int kTileAlign = 1;  // key tiles may begin anywhere

  FloatForward(const Attention& a, float query_factor) : a_(a), factor_(query_factor) {}

  bool prepare() { return true; }

  static int out_rows(int v_dim) { return v_dim; }  // of a panel of O^T

  class Worker {
   public:
    explicit Worker(const FloatForward& shared)
        : a_(shared.a_), factor_(shared.factor_), dim_(int(a_.head_dim)), v_dim_(int(a_.v_head_dim)) {
      static thread_local Scratch scratch;
      const size_t q = size_t(kQueryTile) * dim_, scores = size_t(kKeyTile) * kPanel;
      const size_t k = size_t(kKeyTile) * dim_, v = size_t(kKeyTile) * v_dim_;
      scratch.reserve({q, q, scores, k, v});
      rows_ = scratch.take(q);
      panels_ = scratch.take(q);
      scores_ = scratch.take(scores);
      k_scratch_ = scratch.take(k);
      v_scratch_ = scratch.take(v);
    }

    void load_queries(int64_t batch, int64_t head, int64_t first, int rows) {
      load_rows(a_.q, batch, head, first, first + rows, dim_, rows_, dim_);
      for (int p = 0; p < panel_count(rows); ++p) {
        rows_to_panel(rows_ + p * kPanel * dim_, dim_, std::min(kPanel, rows - p * kPanel), kPanel, dim_, factor_,
                      panels_ + p * kPanel * dim_);
      }
    }

    void load_keys(int64_t batch, int64_t kv_head, const KeyTile& tile) {
      k_ = rows_in_float(a_.k, batch, kv_head, tile, dim_, k_scratch_);
      v_ = rows_in_float(a_.v, batch, kv_head, tile, v_dim_, v_scratch_);
    }

    // q k^T of panel p and keys [lo, hi) of the tile, a row of kPanel a key; valid until the next call.
    float* scores(int p, int vecs, int lo, int hi) {
      multiply_in_parts(hi - lo, vecs, dim_, {k_.data + lo * k_.row, k_.row, 1}, panels_ + p * kPanel * dim_, kPanel,
                        scores_, kPanel);
      return scores_;
    }

    // Adds V^T P^T to O^T; the probabilities stand where the scores stood.
    void add_values(int vecs, int lo, int hi, float* out) {
      multiply<true>(v_dim_, vecs, hi - lo, {v_.data + lo * v_.row, 1, v_.row}, scores_, kPanel, out, kPanel);
    }

   private:
    const Attention& a_;
    const float factor_;
    const int dim_, v_dim_;
    float *rows_, *panels_, *scores_, *k_scratch_, *v_scratch_;
    Rows k_{}, v_{};
  };

 private:
  const Attention& a_;
  const float factor_;
};

}  // namespace magi
