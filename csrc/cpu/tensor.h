// Strided tensors of any of the three element types, and moving rows of them into and out of float32 tiles.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace magi {

enum class Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Four dimensions, strides in elements (64 bit: row times stride may pass 2^31).  Part of the C interface.
struct Tensor4 {
  void* data;
  int64_t stride[4];
  Type type;
};

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline float to_float(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  uint32_t bits = rest << 13;
  float f;
  if (rest >= 0x7c00u) {  // infinity, NaN
    bits |= 0x7f800000u;
    std::memcpy(&f, &bits, 4);
  } else {  // 2^112 moves the exponent's bias and normalises subnormals
    std::memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    std::memcpy(&bits, &f, 4);
  }
  bits |= sign;
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}

inline void from_float(float x, float* p) { *p = x; }
inline void from_float(float x, BFloat16* p) {  // round to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  p->bits = x != x ? uint16_t{0x7fc0} : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void from_float(float x, Float16* p) {
#if defined(__F16C__)
  p->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u;
  } else if (bits >= 0x477ff000u) {  // rounds to 2^16 or more
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {  // subnormal: adding 0.5 rounds to multiples of 2^-24
    float f;
    std::memcpy(&f, &bits, 4);
    f += 0.5f;
    std::memcpy(&half, &f, 4);
    half -= 0x3f000000u;
  } else {
    half = (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13;
  }
  p->bits = uint16_t(sign | half);
#endif
}

// One row, side by side, to float32.
inline void widen(const float* from, int count, float* to) { std::memcpy(to, from, size_t(count) * 4); }
inline void widen(const BFloat16* from, int count, float* to) {
  for (int i = 0; i < count; ++i) {  // compilers make vectors of this
    const uint32_t bits = uint32_t{from[i].bits} << 16;
    std::memcpy(to + i, &bits, 4);
  }
}
inline void widen(const Float16* from, int count, float* to) {
  int i = 0;
#if defined(__F16C__) && defined(__AVX2__)
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

template <class F>
auto with_type(Type type, F f) {
  switch (type) {
    case Type::kBFloat16: return f(BFloat16{});
    case Type::kFloat16: return f(Float16{});
    default: return f(float{});
  }
}

inline int64_t offset(const Tensor4& t, int64_t i, int64_t j) { return i * t.stride[0] + j * t.stride[1]; }

// Rows [begin, end) of t[batch, head] as float32, `dim` wide, in `to` at `to_row` floats a row; columns up to to_row
// become 0.
inline void load_rows(const Tensor4& t, int64_t batch, int64_t head, int64_t begin, int64_t end, int dim, float* to,
                      int to_row) {
  with_type(t.type, [&](auto zero) {
    using Element = decltype(zero);
    const Element* row = static_cast<const Element*>(t.data) + offset(t, batch, head) + begin * t.stride[2];
    for (int64_t i = begin; i < end; ++i, row += t.stride[2], to += to_row) {
      if (t.stride[3] == 1) {
        widen(row, dim, to);
      } else {
        for (int d = 0; d < dim; ++d) to[d] = to_float(row[d * t.stride[3]]);
      }
      for (int d = dim; d < to_row; ++d) to[d] = 0.0f;
    }
  });
}

// The reverse, with a factor.
inline void store_rows(const Tensor4& t, int64_t batch, int64_t head, int64_t begin, int64_t end, int dim,
                       const float* from, int from_row, float factor) {
  with_type(t.type, [&](auto zero) {
    using Element = decltype(zero);
    Element* row = static_cast<Element*>(t.data) + offset(t, batch, head) + begin * t.stride[2];
    for (int64_t i = begin; i < end; ++i, row += t.stride[2], from += from_row) {
      if (t.stride[3] == 1) {
        for (int d = 0; d < dim; ++d) from_float(from[d] * factor, row + d);
      } else {
        for (int d = 0; d < dim; ++d) from_float(from[d] * factor, row + d * t.stride[3]);
      }
    }
  });
}

// Rows of float32 (queries) to panels: to[d * kPanel + lane], and back.  `rows` counts the panel's rows; lanes beyond
// them become 0.
inline void rows_to_panel(const float* from, int from_row, int rows, int panel, int dim, float factor, float* to) {
  for (int lane = 0; lane < panel; ++lane) {
    for (int d = 0; d < dim; ++d) to[d * panel + lane] = lane < rows ? from[d] * factor : 0.0f;
    if (lane < rows) from += from_row;
  }
}
inline void panel_to_rows(const float* from, int rows, int panel, int dim, float* to, int to_row) {
  for (int lane = 0; lane < rows; ++lane, to += to_row) {
    for (int d = 0; d < dim; ++d) to[d] = from[d * panel + lane];
  }
}

}  // namespace magi
