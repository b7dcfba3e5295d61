// The forward's two products in float32: keys and values are read where they lie.
//
// Few queries (decoding) would leave most lanes empty, so then the lanes are elements of keys and values instead.
#pragma once

#include "attention.h"

namespace magi {

constexpr int kFewRows = 4;  // queries up to which lanes are elements

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
      few_ = rows <= kFewRows ? rows : 0;
      if (few_ != 0) {
        for (int i = 0; i < rows * dim_; ++i) rows_[i] *= factor_;
        return;
      }
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
      if (few_ != 0) {
        std::fill_n(scores_, (hi - lo) * kPanel, 0.0f);
        with_few([&]<int kRows>() { multiply_keys<kRows>(lo, hi); });
        return scores_;
      }
      multiply_in_parts(hi - lo, vecs, dim_, {k_.data + lo * k_.row, k_.row, 1}, panels_ + p * kPanel * dim_, kPanel,
                        scores_, kPanel);
      return scores_;
    }

    // Adds V^T P^T to O^T; the probabilities stand where the scores stood.
    void add_values(int vecs, int lo, int hi, float* out) {
      if (few_ != 0) {
        with_few([&]<int kRows>() { multiply_values<kRows>(lo, hi, out); });
        return;
      }
      multiply<true>(v_dim_, vecs, hi - lo, {v_.data + lo * v_.row, 1, v_.row}, scores_, kPanel, out, kPanel);
    }

   private:
    template <class Call>
    void with_few(Call call) {
      if (few_ == 1) call.template operator()<1>();
      if (few_ == 2) call.template operator()<2>();
      if (few_ == 3) call.template operator()<3>();
      if (few_ == 4) call.template operator()<4>();
    }

    // Rows of q k^T, lanes along the head dim, a few keys at a time so that enough sums are under way.
    template <int kRows>
    void multiply_keys(int lo, int hi) {
      constexpr int kKeys = kRows == 1 ? 4 : 2;
      int key = lo;
      for (; key + kKeys <= hi; key += kKeys) multiply_key_block<kRows, kKeys>(key, scores_ + (key - lo) * kPanel);
      for (; key < hi; ++key) multiply_key_block<kRows, 1>(key, scores_ + (key - lo) * kPanel);
    }

    template <int kRows, int kKeys>
    void multiply_key_block(int key, float* scores) {
      const float* keys = k_.data + key * k_.row;
      VecF sum[kKeys][kRows] = {};
      int d = 0;
      for (; d + kLanes <= dim_; d += kLanes) {
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) {
          const VecF elements = load(keys + i * k_.row + d);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) sum[i][r] += elements * load(rows_ + r * dim_ + d);
        }
      }
      for (int i = 0; i < kKeys; ++i) {
        for (int r = 0; r < kRows; ++r) {
          float total = sum_of_lanes(sum[i][r]);
          for (int rest = d; rest < dim_; ++rest) total += keys[i * k_.row + rest] * rows_[r * dim_ + rest];
          scores[i * kPanel + r] = total;
        }
      }
    }

    // Adds p v to O^T, lanes along the value head dim.
    template <int kRows>
    void multiply_values(int lo, int hi, float* out) {
      constexpr int kVecs = kRows == 1 ? 8 : kRows == 2 ? 4 : 2;
      int e = 0;
      for (; e + kVecs * kLanes <= v_dim_; e += kVecs * kLanes) multiply_value_block<kRows, kVecs>(lo, hi, e, out);
      for (; e + kLanes <= v_dim_; e += kLanes) multiply_value_block<kRows, 1>(lo, hi, e, out);
      for (; e < v_dim_; ++e) {
        for (int r = 0; r < kRows; ++r) {
          float total = 0.0f;
          for (int key = lo; key < hi; ++key) total += scores_[(key - lo) * kPanel + r] * v_.data[key * v_.row + e];
          out[e * kPanel + r] += total;
        }
      }
    }

    template <int kRows, int kVecs>
    void multiply_value_block(int lo, int hi, int e, float* out) {
      VecF sum[kRows][kVecs] = {};
      const float* values = v_.data + lo * v_.row + e;
      const float* p = scores_;
      for (int key = lo; key < hi; ++key, values += v_.row, p += kPanel) {
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) {
          const VecF elements = load(values + j * kLanes);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) sum[r][j] += p[r] * elements;
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kVecs * kLanes; ++i) out[(e + i) * kPanel + r] += sum[r][i / kLanes][i % kLanes];
      }
    }

    const Attention& a_;
    const float factor_;
    const int dim_, v_dim_;
    int few_ = 0;  // rows, if there are few
    float *rows_, *panels_, *scores_, *k_scratch_, *v_scratch_;
    Rows k_{}, v_{};
  };

 private:
  const Attention& a_;
  const float factor_;
};

}  // namespace magi
