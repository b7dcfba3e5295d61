// The backward's five products in bfloat16 on AMX tiles; P and dS are rounded to bfloat16, the sums are float32.
#pragma once

#include "amx_pack.h"
#include "attention.h"

#if defined(MAGI_HAS_AMX)

namespace magi {

class AmxBackward {
 public:
  static constexpr int kTileAlign = kTileDepth;

  AmxBackward(const Attention& a, float query_factor)
      : a_(a), factor_(query_factor), dim_(round_up(a.head_dim, kTileDepth)),
        v_dim_(round_up(a.v_head_dim, kTileDepth)), dq_rows_(dq_rows(int(a.head_dim))),
        keys_(round_up(a.kv_len, kTileDepth)) {}

  static int dq_rows(int dim) { return round_up(dim, kTileRows); }

  bool prepare() {
    const int64_t units = a_.batch * a_.kv_heads, groups = keys_ / kTileDepth;
    if (!k_.allocate(size_t(units * keys_ * dim_)) || !k_columns_.allocate(size_t(units * keys_ * dq_rows_)) ||
        !v_.allocate(size_t(units * keys_ * v_dim_))) {
      return false;
    }
    return parallel_items(a_.threads, units * groups, [&](int64_t item) {
      const int64_t unit = item / groups, first = item % groups * kTileDepth, at = unit * keys_ + first;
      const int dim = int(a_.head_dim);
      pack_key_rows(a_.k, unit, a_.kv_heads, first, a_.kv_len, dim, k_.get() + at * dim_, dim_);
      pack_key_columns(a_.k, unit, a_.kv_heads, first, a_.kv_len, dim, k_columns_.get() + at * dq_rows_);
      pack_key_rows(a_.v, unit, a_.kv_heads, first, a_.kv_len, int(a_.v_head_dim), v_.get() + at * v_dim_, v_dim_);
    });
  }

  class Worker {
   public:
    explicit Worker(const AmxBackward& shared)
        : shared_(shared), dim_lanes_(round_up(shared.a_.head_dim, kLanes)),
          v_dim_lanes_(round_up(shared.a_.v_head_dim, kLanes)) {
      static thread_local Scratch scratch;  // sizes in floats: two bfloat16 each
      const size_t q = size_t(kQueryTile) * shared.dim_ / 2, d_out = size_t(kQueryTile) * shared.v_dim_ / 2;
      const size_t pairs = size_t(kKeyTile) * kPanel / 2, rows = size_t(kKeyTile) * kQueryTile / 2;
      scratch.reserve({q, d_out, q, d_out, pairs, rows});
      q_lanes_ = reinterpret_cast<uint16_t*>(scratch.take(q));
      d_out_lanes_ = reinterpret_cast<uint16_t*>(scratch.take(d_out));
      q_pairs_ = reinterpret_cast<uint16_t*>(scratch.take(q));
      d_out_pairs_ = reinterpret_cast<uint16_t*>(scratch.take(d_out));
      pairs_ = scratch.take(pairs);
      halves_ = reinterpret_cast<uint16_t*>(scratch.take(rows));
    }

    void load_queries(const float* q, const float* d_out, int rows) {
      rows_ = rows;
      for (int p = 0; p < panel_count(rows); ++p) {
        const int count = std::min(kPanel, rows - p * kPanel);
        pack_lane_pairs(q + p * kPanel * dim_lanes_, dim_lanes_, count, dim_lanes_, shared_.dim_, shared_.factor_,
                        q_lanes_ + p * kPanel * shared_.dim_);
        pack_lane_pairs(d_out + p * kPanel * v_dim_lanes_, v_dim_lanes_, count, v_dim_lanes_, shared_.v_dim_, 1.0f,
                        d_out_lanes_ + p * kPanel * shared_.v_dim_);
      }
      pack_row_pairs(q, dim_lanes_, rows, kQueryTile, dim_lanes_, q_pairs_);
      pack_row_pairs(d_out, v_dim_lanes_, rows, kQueryTile, v_dim_lanes_, d_out_pairs_);
    }

    void load_keys(int64_t batch, int64_t kv_head, const KeyTile& tile) {
      const int64_t row = (batch * shared_.a_.kv_heads + kv_head) * shared_.keys_ + tile.begin;
      k_ = shared_.k_.get() + row * shared_.dim_;
      k_columns_ = shared_.k_columns_.get() + row * shared_.dq_rows_;
      v_ = shared_.v_.get() + row * shared_.v_dim_;
    }

    void scores(int p, int vecs, int lo, int hi, float* to) {
      keys_by_queries(k_, shared_.dim_, q_lanes_ + ptrdiff_t{p} * kPanel * shared_.dim_, p, vecs, lo, hi, to);
    }
    void d_probabilities(int p, int vecs, int lo, int hi, float* to) {
      keys_by_queries(v_, shared_.v_dim_, d_out_lanes_ + ptrdiff_t{p} * kPanel * shared_.v_dim_, p, vecs, lo, hi, to);
    }

    void add_dq(int p, int vecs, int lo, int hi, const float* ds, float* dq_panel) {
      const int begin = lo / kTileDepth * kTileDepth, end = round_up(hi, kTileDepth);
      pair_rows(ds + p * kPanel, kQueryTile, vecs, lo, hi, begin, end, pairs_);
      const ptrdiff_t group = ptrdiff_t{kTileDepth} * shared_.dq_rows_;
      amx_multiply<true>(shared_.dq_rows_ / kTileRows, vecs, (end - begin) / kTileDepth,
                         {k_columns_ + begin * ptrdiff_t{shared_.dq_rows_}, kTileDepth, kTileRows * kTileDepth, group},
                         {reinterpret_cast<uint16_t*>(pairs_ + begin / 2 * kPanel), 2 * kPanel, kTileDepth * kPanel},
                         dq_panel, kPanel);
    }

    void add_keys(const PanelMask* masks, int length, const float* probability, const float* ds, float* dk, float* dv) {
      add_rows(masks, length, probability, d_out_pairs_, v_dim_lanes_, dv);
      add_rows(masks, length, ds, q_pairs_, dim_lanes_, dk);
    }

   private:
    static void keys_by_queries(const uint16_t* keys, int dim, const uint16_t* queries, int p, int vecs, int lo, int hi,
                                float* to) {
      const int begin = lo / kTileRows * kTileRows;
      amx_multiply<false>((hi - begin + kTileRows - 1) / kTileRows, vecs, dim / kTileDepth,
                          {keys + ptrdiff_t{begin} * dim, dim, ptrdiff_t{kTileRows} * dim, kTileDepth},
                          {queries, 2 * kPanel, ptrdiff_t{kTileDepth} * kPanel},
                          to + begin * kQueryTile + p * kPanel, kQueryTile);
    }

    // sums[key] += sum over the row tile's queries of x[key, query] * query row; x is read where the masks say.
    void add_rows(const PanelMask* masks, int length, const float* x, const uint16_t* query_pairs, int width,
                  float* sums) {
      const int keys = round_up(length, kTileRows);
      for (int key = 0; key < keys; ++key) {
        for (int column = 0; column < kQueryTile / kLanes; ++column) {
          const int p = column / kPanelVecs, first = column * kLanes;
          const bool live = first < rows_ && key >= masks[p].lo && key < masks[p].hi;
          const VecF values = live ? load(x + key * kQueryTile + first) : VecF{};
          uint16_t* to = halves_ + key * kQueryTile + first;
          const VecU rounded = (bits_as<VecU>(values) + 0x8000u) >> 16;
          for (int i = 0; i < kLanes; ++i) to[i] = uint16_t(rounded[i]);
        }
      }
      amx_multiply<true>(keys / kTileRows, width / kTileRows, (rows_ + kTileDepth - 1) / kTileDepth,
                         {halves_, kQueryTile, kTileRows * kQueryTile, kTileDepth},
                         {query_pairs, 2 * width, ptrdiff_t{kTileDepth} * width}, sums, width);
    }

    const AmxBackward& shared_;
    TileScope tiles_;
    const int dim_lanes_, v_dim_lanes_;
    int rows_ = 0;
    uint16_t *q_lanes_, *d_out_lanes_, *q_pairs_, *d_out_pairs_, *halves_;
    float* pairs_;
    const uint16_t *k_ = nullptr, *k_columns_ = nullptr, *v_ = nullptr;
  };

 private:
  const Attention& a_;
  const float factor_;
  const int dim_, v_dim_, dq_rows_;  // padded to tiles
  const int64_t keys_;
  PackedBuffer k_, v_;      // [unit, keys, dim]
  PackedBuffer k_columns_;  // [unit, group of 32 keys, dq_rows, 32]
};

}  // namespace magi

#endif  // MAGI_HAS_AMX
