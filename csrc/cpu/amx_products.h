// The forward's two products in bfloat16 on AMX tiles.
//
// Keys (as rows) and values (transposed, in groups of 32 keys) are packed once a call, so key tiles begin at multiples
// of 32.  Probabilities are rounded to bfloat16 for the second product only; their sum is not.
#pragma once

#include "amx.h"
#include "attention.h"

#if defined(MAGI_HAS_AMX)

namespace magi {

static_assert(kLanes == kTileRows, "a vector of float32 is one row of a tile");

inline uint16_t to_bfloat16(float x) {
  BFloat16 y;
  from_float(x, &y);
  return y.bits;
}

// Two float32 vectors, rounded to bfloat16 (ties away from zero) and put side by side: even in the low halves.
inline VecU pair_up(VecF even, VecF odd) {
  return (bits_as<VecU>(even) + 0x8000u) >> 16 | ((bits_as<VecU>(odd) + 0x8000u) & 0xffff0000u);
}

class PackedBuffer {  // zeroed, aligned
 public:
  bool allocate(size_t count) {
    const size_t bytes = (count * sizeof(uint16_t) + 63) / 64 * 64 + 64;
    data_.reset(static_cast<uint16_t*>(std::aligned_alloc(64, bytes)));
    if (data_) std::memset(data_.get(), 0, bytes);
    return bool(data_);
  }
  uint16_t* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(uint16_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint16_t[], Free> data_;
};

// Rows of a [batch, head] slice to queries-as-lanes pairs: to[d / 2][lane] = (x[lane][d], x[lane][d + 1]).
inline void pack_lane_pairs(const float* rows, int row, int count, int dim, int dim_padded, float factor, uint16_t* to) {
  std::memset(to, 0, size_t(dim_padded) * kPanel * sizeof(uint16_t));
  for (int lane = 0; lane < count; ++lane, rows += row) {
    for (int d = 0; d < dim; ++d) to[(d / 2 * kPanel + lane) * 2 + d % 2] = to_bfloat16(rows[d] * factor);
  }
}

class AmxProducts {
 public:
  static constexpr int kTileAlign = kTileDepth;

  AmxProducts(const Attention& a, float query_factor)
      : a_(a), factor_(query_factor), dim_(round_up(a.head_dim, kTileDepth)), v_dim_(out_rows(int(a.v_head_dim))),
        keys_(round_up(a.kv_len, kTileDepth)) {}

  static int out_rows(int v_dim) { return round_up(v_dim, kTileRows); }

  bool prepare() {
    const int64_t units = a_.batch * a_.kv_heads, groups = keys_ / kTileDepth;
    if (!k_.allocate(size_t(units * keys_ * dim_)) || !v_.allocate(size_t(units * keys_ * v_dim_))) return false;
    return parallel_items(a_.threads, units * groups, [&](int64_t item) { pack(item / groups, item % groups); });
  }

  class Worker {
   public:
    explicit Worker(const AmxProducts& shared) : shared_(shared) {
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
      std::fill(scores_ + begin * kPanel, scores_ + lo * kPanel, 0.0f);
      std::fill(scores_ + hi * kPanel, scores_ + end * kPanel, 0.0f);
      for (int key = begin; key < end; key += 2) {
        for (int j = 0; j < vecs; ++j) {
          const float* at = scores_ + key * kPanel + j * kLanes;
          store(pairs_ + key / 2 * kPanel + j * kLanes, bits_as<VecF>(pair_up(load(at), load(at + kPanel))));
        }
      }
      const ptrdiff_t group = ptrdiff_t{kTileDepth} * shared_.v_dim_;
      amx_multiply<true>(shared_.v_dim_ / kTileRows, vecs, (end - begin) / kTileDepth,
                         {v_ + begin * ptrdiff_t{shared_.v_dim_}, kTileDepth, kTileRows * kTileDepth, group},
                         {reinterpret_cast<uint16_t*>(pairs_ + begin / 2 * kPanel), 2 * kPanel, kTileDepth * kPanel},
                         out, kPanel);
    }

   private:
    const AmxProducts& shared_;
    TileScope tiles_;
    float *rows_, *scores_, *pairs_;
    uint16_t* queries_;
    const uint16_t *k_ = nullptr, *v_ = nullptr;
  };

 private:
  void pack(int64_t unit, int64_t group) {
    const int64_t batch = unit / a_.kv_heads, head = unit % a_.kv_heads;
    const int64_t first = group * kTileDepth, last = std::min(first + kTileDepth, a_.kv_len);
    const auto element = [](const Tensor4& t, int64_t row, int64_t d) {
      return static_cast<const uint16_t*>(t.data)[row + d * t.stride[3]];
    };
    for (int64_t key = first; key < last; ++key) {
      const int64_t k_row = offset(a_.k, batch, head) + key * a_.k.stride[2];
      const int64_t v_row = offset(a_.v, batch, head) + key * a_.v.stride[2];
      uint16_t* k = k_.get() + (unit * keys_ + key) * dim_;
      uint16_t* v = v_.get() + (unit * keys_ + first) * v_dim_ + (key - first);
      for (int64_t d = 0; d < a_.head_dim; ++d) k[d] = element(a_.k, k_row, d);
      for (int64_t e = 0; e < a_.v_head_dim; ++e) v[e * kTileDepth] = element(a_.v, v_row, e);
    }
  }

  const Attention& a_;
  const float factor_;
  const int dim_, v_dim_;  // padded to tiles
  const int64_t keys_;
  PackedBuffer k_;  // [unit, keys, dim]
  PackedBuffer v_;  // [unit, group of 32 keys, v_dim, 32]
};

}  // namespace magi

#endif  // MAGI_HAS_AMX
