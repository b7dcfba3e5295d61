// The backward's five products in float32.
#pragma once

#include "attention.h"

namespace magi {

class FloatBackward {
 public:
  static constexpr int kTileAlign = 1;  // key tiles may begin anywhere

  FloatBackward(const Attention& a, float query_factor) : a_(a), factor_(query_factor) {}

  bool prepare() { return true; }

  static int dq_rows(int dim) { return dim; }  // of a panel of dQ^T

  class Worker {
   public:
    explicit Worker(const FloatBackward& shared)
        : a_(shared.a_), factor_(shared.factor_), dim_(int(a_.head_dim)), v_dim_(int(a_.v_head_dim)),
          dim_lanes_(round_up(dim_, kLanes)), v_dim_lanes_(round_up(v_dim_, kLanes)) {
      static thread_local Scratch scratch;
      const size_t q = size_t(kQueryTile) * dim_, d_out = size_t(kQueryTile) * v_dim_;
      const size_t k = size_t(kKeyTile) * dim_, v = size_t(kKeyTile) * v_dim_;
      scratch.reserve({q, d_out, k, v});
      q_panels_ = scratch.take(q);
      d_out_panels_ = scratch.take(d_out);
      k_scratch_ = scratch.take(k);
      v_scratch_ = scratch.take(v);
    }

    // Rows in float32, padded to whole vectors; they must outlive the row tile.
    void load_queries(const float* q, const float* d_out, int rows) {
      q_ = q;
      d_out_ = d_out;
      rows_ = rows;
      for (int p = 0; p < panel_count(rows); ++p) {
        const int count = std::min(kPanel, rows - p * kPanel);
        rows_to_panel(q + p * kPanel * dim_lanes_, dim_lanes_, count, kPanel, dim_, factor_,
                      q_panels_ + p * kPanel * dim_);
        rows_to_panel(d_out + p * kPanel * v_dim_lanes_, v_dim_lanes_, count, kPanel, v_dim_, 1.0f,
                      d_out_panels_ + p * kPanel * v_dim_);
      }
    }

    void load_keys(int64_t batch, int64_t kv_head, const KeyTile& tile) {
      k_ = rows_in_float(a_.k, batch, kv_head, tile, dim_, k_scratch_);
      v_ = rows_in_float(a_.v, batch, kv_head, tile, v_dim_, v_scratch_);
    }

    // Below: [kKeyTile, kQueryTile] matrices of one key tile, of which panel p and keys [lo, hi) are written or read.
    void scores(int p, int vecs, int lo, int hi, float* to) {
      multiply_in_parts(hi - lo, vecs, dim_, {k_.data + lo * k_.row, k_.row, 1}, q_panels_ + p * kPanel * dim_, kPanel,
                        to + lo * kQueryTile + p * kPanel, kQueryTile);
    }
    void d_probabilities(int p, int vecs, int lo, int hi, float* to) {
      multiply_in_parts(hi - lo, vecs, v_dim_, {v_.data + lo * v_.row, v_.row, 1}, d_out_panels_ + p * kPanel * v_dim_,
                        kPanel, to + lo * kQueryTile + p * kPanel, kQueryTile);
    }
    void add_dq(int p, int vecs, int lo, int hi, const float* ds, float* dq_panel) {
      multiply<true>(dim_, vecs, hi - lo, {k_.data + lo * k_.row, 1, k_.row}, ds + lo * kQueryTile + p * kPanel,
                     kQueryTile, dq_panel, kPanel);
    }

    // Adds dS^T Q and P^T dO to the sums of the tile's keys.  masks: of every panel.
    void add_keys(const PanelMask* masks, int length, const float* probability, const float* ds, float* dk, float* dv) {
      const auto add = [&](int lo, int hi, int row, int count) {
        const ptrdiff_t at = ptrdiff_t{lo} * kQueryTile + row;
        multiply<true>(hi - lo, v_dim_lanes_ / kLanes, count, {probability + at, kQueryTile, 1},
                       d_out_ + row * v_dim_lanes_, v_dim_lanes_, dv + lo * v_dim_lanes_, v_dim_lanes_);
        multiply<true>(hi - lo, dim_lanes_ / kLanes, count, {ds + at, kQueryTile, 1}, q_ + row * dim_lanes_, dim_lanes_,
                       dk + lo * dim_lanes_, dim_lanes_);
      };
      const int panels = panel_count(rows_);
      if (std::all_of(masks, masks + panels, [&](const PanelMask& m) { return m.lo == 0 && m.hi == length; })) {
        add(0, length, 0, rows_);
        return;
      }
      for (int p = 0; p < panels; ++p) {
        if (masks[p].lo < masks[p].hi) {
          add(masks[p].lo, masks[p].hi, p * kPanel, std::min(kPanel, rows_ - p * kPanel));
        }
      }
    }

   private:
    const Attention& a_;
    const float factor_;
    const int dim_, v_dim_, dim_lanes_, v_dim_lanes_;
    float *q_panels_, *d_out_panels_, *k_scratch_, *v_scratch_;
    const float *q_ = nullptr, *d_out_ = nullptr;
    int rows_ = 0;
    Rows k_{}, v_{};
  };

 private:
  const Attention& a_;
  const float factor_;
};

}  // namespace magi
