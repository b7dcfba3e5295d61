// Packing float32 and bfloat16 rows into the operands of AMX tiles.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "amx.h"
#include "microkernel.h"
#include "tensor.h"

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

// Keys [first, first + 32) of a unit (batch, key head), zeros beyond kv_len: a row a key.
inline void pack_key_rows(const Tensor4& t, int64_t unit, int64_t kv_heads, int64_t first, int64_t kv_len, int dim,
                          uint16_t* to, int to_row) {
  const auto* data = static_cast<const uint16_t*>(t.data) + offset(t, unit / kv_heads, unit % kv_heads);
  for (int64_t key = first; key < std::min(first + kTileDepth, kv_len); ++key, to += to_row) {
    for (int d = 0; d < dim; ++d) to[d] = data[key * t.stride[2] + d * t.stride[3]];
  }
}

// The same, transposed: a row of 32 keys for each of the dims.
inline void pack_key_columns(const Tensor4& t, int64_t unit, int64_t kv_heads, int64_t first, int64_t kv_len, int dim,
                             uint16_t* to) {
  const auto* data = static_cast<const uint16_t*>(t.data) + offset(t, unit / kv_heads, unit % kv_heads);
  for (int64_t key = first; key < std::min(first + kTileDepth, kv_len); ++key, ++to) {
    for (int d = 0; d < dim; ++d) to[d * kTileDepth] = data[key * t.stride[2] + d * t.stride[3]];
  }
}

// Pairs of rows: to[i / 2][d] = (x[i][d], x[i + 1][d]), `padded` columns, zeros beyond `count` rows up to `rows`.
inline void pack_row_pairs(const float* from, int row, int count, int rows, int padded, uint16_t* to) {
  std::memset(to, 0, size_t(rows) * padded * sizeof(uint16_t));
  for (int i = 0; i < count; ++i, from += row) {
    for (int d = 0; d < padded; ++d) to[(i / 2 * padded + d) * 2 + i % 2] = to_bfloat16(from[d]);
  }
}

// Rows [lo, hi) of a panel of float32 (`row` floats apart) to pairs of rows, zeros in the rest of [begin, end).
inline void pair_rows(const float* from, int row, int vecs, int lo, int hi, int begin, int end, float* to) {
  const auto at = [&](int key, int j) { return key < lo || key >= hi ? VecF{} : load(from + key * row + j * kLanes); };
  for (int key = begin; key < end; key += 2) {
    for (int j = 0; j < vecs; ++j) {
      store(to + key / 2 * kPanel + j * kLanes, bits_as<VecF>(pair_up(at(key, j), at(key + 1, j))));
    }
  }
}

}  // namespace magi

#endif  // MAGI_HAS_AMX
