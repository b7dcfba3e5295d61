// The forward's two products in bfloat16 on AMX tiles.
//
// Keys (as rows) and values (transposed, in groups of 32 keys) are packed once a call, so key tiles begin at multiples
// of 32.  Probabilities are rounded to bfloat16 for the second product only; their sum is not.
#pragma once

#include "amx_pack.h"
#include "attention.h"

#if defined(MAGI_HAS_AMX)

namespace magi {

class AmxForward {
 public:
  static constexpr int kTileAlign = kTileDepth;

  AmxForward(const Attention& a, float query_factor)
      : a_(a), factor_(query_factor), dim_(round_up(a.head_dim, kTileDepth)), v_dim_(out_rows(int(a.v_head_dim))),
        keys_(round_up(a.kv_len, kTileDepth)) {}

  static int out_rows(int v_dim) { return round_up(v_dim, kTileRows); }

  bool prepare() {
    const int64_t units = a_.batch * a_.kv_heads, groups = keys_ / kTileDepth;
    if (!k_.allocate(size_t(units * keys_ * dim_)) || !v_.allocate(size_t(units * keys_ * v_dim_))) return false;
    return parallel_items(a_.threads, units * groups, [&](int64_t item) {
      const int64_t unit = item / groups, first = item % groups * kTileDepth, at = unit * keys_ + first;
      pack_key_rows(a_.k, unit, a_.kv_heads, first, a_.kv_len, int(a_.head_dim), k_.get() + at * dim_, dim_);
      pack_key_columns(a_.v, unit, a_.kv_heads, first, a_.kv_len, int(a_.v_head_dim), v_.get() + at * v_dim_);
    });
  }

  class Worker {
   public:
    explicit Worker(const AmxForward& shared) : shared_(shared) {
      static thread_local Scratch scratch;
      const size_t rows = size_t(kQueryTile) * shared.a_.head_dim, scores = size_t(kKeyTile) * kPanel;
      const size_t q = size_t(kQueryTile) * shared.dim_ / 2, p = scores / 2;
      scratch.reserve({rows, scores, q, p});
      rows_ = scratch.take(rows);
      scores_ = scratch.take(scores);
      queries_ = reinterpret_cast<uint16_t*>(scratch.take(q));
      pairs_ = scratch.take(p);
    }

    void load_queries(int64_t batch, int64_t head, int64_t first, int rows) {
      const int dim = int(shared_.a_.head_dim);
      load_rows(shared_.a_.q, batch, head, first, first + rows, dim, rows_, dim);
      for (int p = 0; p < panel_count(rows); ++p) {
        pack_lane_pairs(rows_ + p * kPanel * dim, dim, std::min(kPanel, rows - p * kPanel), dim, shared_.dim_,
                        shared_.factor_, queries_ + p * kPanel * shared_.dim_);
      }
    }

    void load_keys(int64_t batch, int64_t kv_head, const KeyTile& tile) {
      const int64_t row = (batch * shared_.a_.kv_heads + kv_head) * shared_.keys_ + tile.begin;
      k_ = shared_.k_.get() + row * shared_.dim_;
      v_ = shared_.v_.get() + row * shared_.v_dim_;
    }

    float* scores(int p, int vecs, int lo, int hi) {
      const int begin = lo / kTileRows * kTileRows, dim = shared_.dim_;
      amx_multiply<false>((hi - begin + kTileRows - 1) / kTileRows, vecs, dim / kTileDepth,
                          {k_ + ptrdiff_t{begin} * dim, dim, ptrdiff_t{kTileRows} * dim, kTileDepth},
                          {queries_ + ptrdiff_t{p} * kPanel * dim, 2 * kPanel, ptrdiff_t{kTileDepth} * kPanel},
                          scores_ + begin * kPanel, kPanel);
      return scores_ + lo * kPanel;
    }

    void add_values(int vecs, int lo, int hi, float* out) {
      const int begin = lo / kTileDepth * kTileDepth, end = round_up(hi, kTileDepth);
      pair_rows(scores_, kPanel, vecs, lo, hi, begin, end, pairs_);
      const ptrdiff_t group = ptrdiff_t{kTileDepth} * shared_.v_dim_;
      amx_multiply<true>(shared_.v_dim_ / kTileRows, vecs, (end - begin) / kTileDepth,
                         {v_ + begin * ptrdiff_t{shared_.v_dim_}, kTileDepth, kTileRows * kTileDepth, group},
                         {reinterpret_cast<uint16_t*>(pairs_ + begin / 2 * kPanel), 2 * kPanel, kTileDepth * kPanel},
                         out, kPanel);
    }

   private:
    const AmxForward& shared_;
    TileScope tiles_;
    float *rows_, *scores_, *pairs_;
    uint16_t* queries_;
    const uint16_t *k_ = nullptr, *v_ = nullptr;
  };

 private:
  const Attention& a_;
  const float factor_;
  const int dim_, v_dim_;  // padded to tiles
  const int64_t keys_;
  PackedBuffer k_;  // [unit, keys, dim]
  PackedBuffer v_;  // [unit, group of 32 keys, v_dim, 32]
};

}  // namespace magi

#endif  // MAGI_HAS_AMX
