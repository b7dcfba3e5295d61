// Vectors of float32 lanes, written with GCC/Clang vector extensions so that one source serves AVX2, AVX-512, NEON and
// plain SSE.  The lane count may be set from outside (MAGI_LANES) to test wide code on a narrow machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace magi {

#if defined(MAGI_LANES)
constexpr int kLanes = MAGI_LANES;
#elif defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.4426950408889634f;

template <class V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
inline VecF load(const float* p) { return load_as<VecF>(p); }
inline void store(float* p, VecF v) { std::memcpy(p, &v, sizeof(v)); }
inline VecF splat(float x) { return x - VecF{}; }

template <class To, class From>
inline To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &v, sizeof(to));
  return to;
}

// The larger lane; where one of the two is NaN, b.  (Exactly MAXPS, which compilers find in this form.)
inline VecF max_or_second(VecF a, VecF b) {
#if defined(__AVX512F__)
  if constexpr (kLanes == 16) return bits_as<VecF>(_mm512_max_ps(bits_as<__m512>(a), bits_as<__m512>(b)));
#endif
#if defined(__AVX2__)
  if constexpr (kLanes == 8) return bits_as<VecF>(_mm256_max_ps(bits_as<__m256>(a), bits_as<__m256>(b)));
#endif
  return a > b ? a : b;
}

inline bool all_equal(VecF a, VecF b) {
  const VecI same = a == b;
  int32_t all = -1;
  for (int i = 0; i < kLanes; ++i) all &= same[i];
  return all != 0;
}

inline float sum_of_lanes(VecF v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(v));
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// 2^(whole + rest): `shifted` is 1.5 * 2^23 + whole (so its low mantissa bits are the whole part, which goes into the
// exponent), the rest lies in [-0.5, 0.5] (minimax polynomial of degree 6).  Whole = -127 gives exactly 0.
inline VecF exp2_of_parts(VecF shifted, VecF rest) {
  VecF p = splat(1.5345811e-4f);
  p = p * rest + 1.3399931e-3f;
  p = p * rest + 9.6184891e-3f;
  p = p * rest + 5.5503286e-2f;
  p = p * rest + 2.4022646e-1f;
  p = p * rest + 6.9314718e-1f;
  p = p * rest + 1.0f;
  return p * bits_as<VecF>((bits_as<VecI>(shifted) << 23) + 0x3f800000);
}
constexpr float kRoundToWhole = 12582912.0f;  // 1.5 * 2^23

// Both functions: relative error below 1.5e-7, 0 where the exponent is below -126.5, NaN for NaN; the exponent must not
// exceed 127.  The rest comes from the arguments by one multiply-add, so that a large exponent's rounding does not count.

// 2^(factor * (s - max)), factor > 0; exactly 1 for s = max.
inline VecF exp2_below(VecF s, VecF max, float factor) {
  const VecF d = max_or_second(splat(-127.0f / factor), s - max);
  const VecF shifted = d * factor + kRoundToWhole;
  return exp2_of_parts(shifted, d * factor - (shifted - kRoundToWhole));
}

// 2^(s * factor - base).
inline VecF exp2_affine(VecF s, float factor, VecF base) {
  const VecF x = max_or_second(splat(-127.0f), s * factor - base);
  const VecF shifted = x + kRoundToWhole;
  const VecF rest = s * factor - (base + (shifted - kRoundToWhole));
  return exp2_of_parts(shifted, max_or_second(splat(-0.5f), rest));
}

// tanh(x), relative error below 4e-7: odd polynomial near 0, 1 - 2 / (e^2x + 1) elsewhere.
inline VecF tanh(VecF x) {
  const VecF magnitude = bits_as<VecF>(bits_as<VecI>(x) & 0x7fffffff);
  const VecF y = x * x;
  VecF small = splat(-5.6599886e-3f);
  small = small * y + 2.0590989e-2f;
  small = small * y - 5.3721067e-2f;
  small = small * y + 1.3331127e-1f;
  small = small * y - 3.3333260e-1f;
  small = small * y * x + x;
  const VecF capped = magnitude > 10.0f ? splat(10.0f) : magnitude;  // keeps NaN
  VecF large = 1.0f - 2.0f / (exp2_affine(capped, 2.0f * kLog2E, VecF{}) + 1.0f);
  large = bits_as<VecF>(bits_as<VecI>(large) | (bits_as<VecI>(x) & INT32_MIN));
  return magnitude < 0.625f ? small : large;
}

}  // namespace magi
