// The one matrix product of the CPU kernels, in float32 registers:
//
//     C[m, :] = (or +=) sum over k of A[m, k] * B[k, :]
//
// Rows of B and C are vectors; elements of A are broadcast from where they lie, at any strides.  So keys and values
// are read in place: only what plays the part of B (a tile of queries, of scores) needs its lanes side by side.
#pragma once

#include <algorithm>
#include <cstddef>

#include "simd.h"

namespace magi {

// Registers: rows * vecs accumulators, vecs of B, one of A.  Three vectors a row of C load the least per product.
#if defined(__AVX512F__) || defined(__aarch64__) || defined(MAGI_LANES)
constexpr int kBlockRows = 8;
#else
constexpr int kBlockRows = 4;
#endif
constexpr int kPanelVecs = 3;
constexpr int kPanel = kPanelVecs * kLanes;  // queries side by side in one panel

struct Broadcast {  // A[m, k] = data[m * row + k * col]
  const float* data;
  ptrdiff_t row;
  ptrdiff_t col;
};

// Compilers like to load a vector of B again for every row of A; that would make loads the bottleneck.
inline void keep_in_register(VecF& v) {
#if defined(__AVX512F__) && !defined(MAGI_LANES)
  asm("" : "+v"(v));
#elif defined(__x86_64__) && !defined(MAGI_LANES)
  asm("" : "+x"(v));
#elif defined(__aarch64__) && !defined(MAGI_LANES)
  asm("" : "+w"(v));
#else
  (void)v;
#endif
}

template <int kRows, int kVecs, bool kAccumulate>
inline void multiply_block(int depth, const float* a, ptrdiff_t a_row, ptrdiff_t a_col, const float* b, ptrdiff_t b_row,
                           float* c, ptrdiff_t c_row) {
  VecF sum[kRows][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) sum[i][j] = VecF{};
  }
  for (int k = 0; k < depth; ++k) {
    VecF right[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      right[j] = load(b + j * kLanes);
      keep_in_register(right[j]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const VecF left = splat(a[i * a_row]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sum[i][j] += left * right[j];
    }
    a += a_col;
    b += b_row;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      float* to = c + i * c_row + j * kLanes;
      // C comes last: sums of sums round less than one long sum.
      store(to, kAccumulate ? load(to) + sum[i][j] : sum[i][j]);
    }
  }
}

template <int kVecs, bool kAccumulate>
inline void multiply_rows(int rows, int depth, Broadcast a, const float* b, ptrdiff_t b_row, float* c,
                          ptrdiff_t c_row) {
  // Fewer vectors leave registers for more rows; enough sums must be under way to hide the latency of a product.
  constexpr int kMost = kVecs == 3 ? kBlockRows : kBlockRows * 3 / 2;
  int i = 0;
  const auto step = [&]<int kRows>() {
    for (; i + kRows <= rows; i += kRows) {
      multiply_block<kRows, kVecs, kAccumulate>(depth, a.data + i * a.row, a.row, a.col, b, b_row, c + i * c_row, c_row);
    }
  };
  step.template operator()<kMost>();
  step.template operator()<4>();
  step.template operator()<2>();
  step.template operator()<1>();
}

// vecs: width of C in vectors.
template <bool kAccumulate>
inline void multiply(int rows, int vecs, int depth, Broadcast a, const float* b, ptrdiff_t b_row, float* c,
                     ptrdiff_t c_row) {
  while (vecs > 0) {
    const int width = vecs == 4 ? 2 : std::min(vecs, 3);
    if (width == 3) {
      multiply_rows<3, kAccumulate>(rows, depth, a, b, b_row, c, c_row);
    } else if (width == 2) {
      multiply_rows<2, kAccumulate>(rows, depth, a, b, b_row, c, c_row);
    } else {
      multiply_rows<1, kAccumulate>(rows, depth, a, b, b_row, c, c_row);
    }
    vecs -= width;
    b += width * kLanes;
    c += width * kLanes;
  }
}

constexpr int kSumPart = 64;

// C = A B with the sums over k in parts: float32 rounds a long sum more than a sum of short ones.
inline void multiply_in_parts(int rows, int vecs, int depth, Broadcast a, const float* b, ptrdiff_t b_row, float* c,
                              ptrdiff_t c_row) {
  multiply<false>(rows, vecs, std::min(depth, kSumPart), a, b, b_row, c, c_row);
  for (int k = kSumPart; k < depth; k += kSumPart) {
    multiply<true>(rows, vecs, std::min(depth - k, kSumPart), {a.data + k * a.col, a.row, a.col}, b + k * b_row, b_row, c,
                   c_row);
  }
}

}  // namespace magi
