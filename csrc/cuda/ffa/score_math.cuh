// Elementwise functions with torch's meaning, for score mods that are generated as code
// (magi_flex/kernels/cuda_emit.py).
//
// Types: bool, int8 to int64, uint8, float, double.  16-bit floats are held as floats that were rounded.  Whole numbers
// wrap around, as torch's do.  A division of whole numbers by zero gives 0, which only pairs that are masked may do.
// Exponentials, quotients, roots, tanh and sigmoid of floats are as exact as those of Triton's code for a mod (a few units
// in the last place, an exponential's more where its argument is large), without branches.
#pragma once

#include "ptx.cuh"

namespace score_math {

constexpr float kInfinity = -ptx::negative_infinity;
FFA_DEVICE float not_a_number() { return __uint_as_float(0x7fc00000u); }

template <class T> constexpr bool kIsFloat = false;
template <> inline constexpr bool kIsFloat<float> = true;
template <> inline constexpr bool kIsFloat<double> = true;

// ---- functions of floats ----------------------------------------------------------------------------------------

#define FFA_FLOAT_FUNCTION(name)                                 \
    FFA_DEVICE float name(float x) { return ::name##f(x); }      \
    FFA_DEVICE double name(double x) { return ::name(x); }
FFA_FLOAT_FUNCTION(expm1)
FFA_FLOAT_FUNCTION(log)
FFA_FLOAT_FUNCTION(log2)
FFA_FLOAT_FUNCTION(log10)
FFA_FLOAT_FUNCTION(log1p)
FFA_FLOAT_FUNCTION(sin)
FFA_FLOAT_FUNCTION(cos)
FFA_FLOAT_FUNCTION(tan)
FFA_FLOAT_FUNCTION(asin)
FFA_FLOAT_FUNCTION(acos)
FFA_FLOAT_FUNCTION(atan)
FFA_FLOAT_FUNCTION(sinh)
FFA_FLOAT_FUNCTION(cosh)
FFA_FLOAT_FUNCTION(erf)
FFA_FLOAT_FUNCTION(erfc)
FFA_FLOAT_FUNCTION(floor)
FFA_FLOAT_FUNCTION(ceil)
FFA_FLOAT_FUNCTION(trunc)
FFA_FLOAT_FUNCTION(rint)
#undef FFA_FLOAT_FUNCTION
#define FFA_FLOAT_FUNCTION(name)                                              \
    FFA_DEVICE float name(float x, float y) { return ::name##f(x, y); }       \
    FFA_DEVICE double name(double x, double y) { return ::name(x, y); }
FFA_FLOAT_FUNCTION(fmod)
FFA_FLOAT_FUNCTION(pow)
FFA_FLOAT_FUNCTION(atan2)
#undef FFA_FLOAT_FUNCTION

constexpr float kLog2E = 1.44269504f;
FFA_DEVICE float exp(float x) { return ptx::exp2_approx(x * kLog2E); }
FFA_DEVICE double exp(double x) { return ::exp(x); }
FFA_DEVICE float exp2(float x) { return ptx::exp2_approx(x); }
FFA_DEVICE double exp2(double x) { return ::exp2(x); }
FFA_DEVICE float sqrt(float x) { return ptx::sqrt_approx(x); }
FFA_DEVICE double sqrt(double x) { return ::sqrt(x); }
FFA_DEVICE float rsqrt(float x) { return ptx::rsqrt_approx(x); }
FFA_DEVICE double rsqrt(double x) { return 1 / ::sqrt(x); }
FFA_DEVICE float sigmoid(float x) { return ptx::reciprocal_approx(1 + exp(-x)); }
FFA_DEVICE double sigmoid(double x) { return 1 / (1 + ::exp(-x)); }
FFA_DEVICE float tanh(float x) {
    // 1 - 2 / (exp(2 |x|) + 1), and near 0, where that cancels, x + x^3 P(x^2) with P fitted to the least relative error.
    const float far = fmaf(-2.0f, ptx::reciprocal_approx(1 + ptx::exp2_approx(2 * kLog2E * fabsf(x))), 1.0f);
    const float square = x * x;
    float near = fmaf(0x1.0d5034p-6f, square, -0x1.af7cccp-5f);
    near = fmaf(near, square, 0x1.10cef6p-3f);
    near = fmaf(near, square, -0x1.555452p-2f);
    near = fmaf(near * square, x, x);
    return fabsf(x) < 0.55f ? near : copysignf(far, x);
}
FFA_DEVICE double tanh(double x) { return ::tanh(x); }

template <class T> FFA_DEVICE T softplus(T x, T beta, T threshold) {
    return x * beta > threshold ? x : log1p(exp(x * beta)) / beta;
}

// ---- conversions and memory ----------------------------------------------------------------------------------------

template <class To, class From> FFA_DEVICE To convert(From x) {
    if constexpr (kIsFloat<From> && !kIsFloat<To>) {
        return static_cast<To>(static_cast<int64>(x));
    } else {
        return static_cast<To>(x);
    }
}
template <DType kType> FFA_DEVICE float round_to(float x) {
    float rounded, unused;
    ptx::unpack_pair<kType>(ptx::pack_pair<kType>(x, 0.0f), rounded, unused);
    return rounded;
}

// Of an index, which counts from the end where it is negative; negative where there is no such position.
template <class Offset, class Index> FFA_DEVICE Offset position(Index index, Offset size) {
    const auto wrapped = index < 0 ? index + size : index + Offset(0);
    return wrapped >= 0 && wrapped < size ? static_cast<Offset>(wrapped) : Offset(-1);
}
template <class T> FFA_DEVICE const void* advance(const void* table, int64 offset) {
    return static_cast<const T*>(table) + offset;
}
template <class T> FFA_DEVICE T load(const void* table, int64 offset) {
    return __ldg(static_cast<const T*>(table) + offset);
}
template <DType kType> FFA_DEVICE float load(const void* table, int64 offset) {
    float value, unused;
    ptx::unpack_pair<kType>(load<uint16>(table, offset), value, unused);
    return value;
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

template <class T> FFA_DEVICE T add(T a, T b) {
    if constexpr (kIsFloat<T>) {
        return a + b;
    } else {
        return static_cast<T>(static_cast<uint64>(a) + static_cast<uint64>(b));
    }
}
template <class T> FFA_DEVICE T subtract(T a, T b) {
    if constexpr (kIsFloat<T>) {
        return a - b;
    } else {
        return static_cast<T>(static_cast<uint64>(a) - static_cast<uint64>(b));
    }
}
template <class T> FFA_DEVICE T multiply(T a, T b) {
    if constexpr (kIsFloat<T>) {
        return a * b;
    } else {
        return static_cast<T>(static_cast<uint64>(a) * static_cast<uint64>(b));
    }
}
template <class T> FFA_DEVICE T negate(T x) {
    if constexpr (kIsFloat<T>) {
        return -x;
    } else {
        return subtract(T(0), x);
    }
}
template <class T> FFA_DEVICE T absolute(T x) {
    if constexpr (kIsFloat<T>) {
        return ::fabs(x);
    } else {
        return x < 0 ? negate(x) : x;
    }
}
FFA_DEVICE float divide(float a, float b) { return ptx::divide_approx(a, b); }
FFA_DEVICE double divide(double a, double b) { return a / b; }
// a / b, rounded exactly, for a that was a whole number and a constant b with its inverse: one Newton step.  What a mod
// makes of a position, a block's number for one, may hang on the last bit.
FFA_DEVICE float divide_by(float a, float b, float inverse) {
    const float quotient = a * inverse;
    return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

template <class T> FFA_DEVICE T truncating_divide(T a, T b) {
    if constexpr (kIsFloat<T>) {
        return trunc(a / b);
    } else {
        return b == 0 ? T(0) : b == T(-1) ? negate(a) : static_cast<T>(a / b);
    }
}
template <class T> FFA_DEVICE T fmod_of(T a, T b) {
    if constexpr (kIsFloat<T>) {
        return fmod(a, b);
    } else {
        return subtract(a, multiply(truncating_divide(a, b), b));
    }
}
// a - floor(a / b) b, with the sign of b.
template <class T> FFA_DEVICE T remainder_of(T a, T b) {
    const T rest = fmod_of(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? add(rest, b) : rest;
}
template <class T> FFA_DEVICE T floor_divide(T a, T b) {
    if constexpr (kIsFloat<T>) {
        if (b == 0) return a / b;
        // The multiple of b that the remainder leaves is exact, so that the quotient is whole but for its rounding.
        const T quotient = (a - remainder_of(a, b)) / b;
        const T whole = floor(quotient);
        return quotient - whole > T(0.5) ? whole + 1 : whole;
    } else {
        const T quotient = truncating_divide(a, b), rest = fmod_of(a, b);
        return rest != 0 && (rest < 0) != (b < 0) ? subtract(quotient, T(1)) : quotient;
    }
}
template <class T> FFA_DEVICE T power(T base, T exponent) {
    if constexpr (kIsFloat<T>) {
        return pow(base, exponent);
    } else {
        if (exponent < 0) return base == 1 ? T(1) : base == T(-1) ? (exponent % 2 ? T(-1) : T(1)) : T(0);
        T result = 1;
        for (; exponent > 0; exponent /= 2, base = multiply(base, base)) {
            if (exponent % 2) result = multiply(result, base);
        }
        return result;
    }
}
// NaN if one of them is.
template <class T> FFA_DEVICE T larger(T a, T b) { return a > b || a != a ? a : b; }
template <class T> FFA_DEVICE T smaller(T a, T b) { return a < b || a != a ? a : b; }
template <> FFA_DEVICE float larger(float a, float b) { return ptx::max_nan(a, b); }
template <> FFA_DEVICE float smaller(float a, float b) { return ptx::min_nan(a, b); }
template <class T> FFA_DEVICE T sign_of(T x) { return static_cast<T>((x > 0) - (x < 0)); }
template <class T> FFA_DEVICE T shift_left(T x, T by) {
    return by < 0 || by >= static_cast<T>(8 * sizeof(T)) ? T(0) : static_cast<T>(static_cast<uint64>(x) << by);
}
template <class T> FFA_DEVICE T shift_right(T x, T by) {
    const T last = static_cast<T>(8 * sizeof(T) - 1);
    return static_cast<T>(x >> (by < 0 || by > last ? last : by));
}

}  // namespace score_math
