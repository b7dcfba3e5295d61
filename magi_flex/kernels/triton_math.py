"""Elementwise functions with torch's meaning, for the score mods that are generated as Triton code.

Built from Triton's own operations, without libdevice, so that the interpreter runs what a GPU runs.  The polynomial of
``tanh`` is that of the Cephes library (single precision).
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
LOG10_2 = tl.constexpr(0.3010299956639812)


@triton.jit
def exp(x):
    if x.dtype == tl.float64:
        result = tl.exp(x)
    else:
        # 2^(x log2 e), and the rounding error of the product in the exponent, which grows with x.
        power = x * LOG2_E
        error = tl.fma(x, LOG2_E + tl.zeros_like(x), -power) + x * 1.925963033500411e-08
        result = tl.exp2(power) * tl.where(tl.abs(power) < 1e30, 1.0 + error * LN2, 1.0)
    return result


@triton.jit
def expm1(x):
    grown = exp(x)
    less = grown - 1.0
    # Kahan's correction: the logarithm of the rounded exponential tells how wrong it is.
    corrected = tl.div_rn(less * x, tl.where((grown > 0.0) & (grown != 1.0), tl.log(grown), 1.0))
    plain = (grown == 1.0) | (less == -1.0) | (grown > 1e30)
    return tl.where(grown == 1.0, x, tl.where(plain, less, corrected))


@triton.jit
def log1p(x):
    more = x + 1.0
    corrected = tl.div_rn(tl.log(more) * x, tl.where(more == 1.0, 1.0, more - 1.0))
    return tl.where(more == 1.0, x, tl.where(more > 1e30, tl.log(more), corrected))


@triton.jit
def log10(x):
    return tl.log2(x) * LOG10_2


@triton.jit
def tanh(x):
    size = tl.abs(x)
    square = x * x
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    near = series * square * x + x
    far = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * tl.where(size < 40.0, size, 40.0)) + 1.0)
    far = tl.where(x < 0.0, -far, far)
    return tl.where(x == x, tl.where(size < 0.625, near, far), x)


@triton.jit
def sigmoid(x):
    small = exp(-tl.abs(x))
    return tl.div_rn(tl.where(x < 0.0, small, tl.where(x == x, 1.0, x)), 1.0 + small)


@triton.jit
def softplus(x, beta, threshold):
    scaled = x * beta
    return tl.where(scaled > threshold, x, tl.div_rn(log1p(exp(tl.where(scaled > threshold, threshold, scaled))), beta))


@triton.jit
def trunc(x):
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    low = tl.floor(x)
    rest = x - low
    odd = low - 2.0 * tl.floor(low * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), low + 1.0, low)


@triton.jit
def sign(x):
    return (x > 0).to(tl.int32) - (x < 0).to(tl.int32)


@triton.jit
def floor_divide_int(a, b):
    quotient = a // b
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def remainder_int(a, b):
    rest = a - a // b * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_divide_float(a, b):
    """As torch: exact where the rounded quotient is just above or below a whole number."""
    quotient = tl.floor(tl.div_rn(a, b))
    quotient = tl.where(tl.fma(-quotient, b + tl.zeros_like(quotient), a + tl.zeros_like(quotient)) * b < 0.0,
                        quotient - 1.0, quotient)  # fmt: skip
    return quotient


@triton.jit
def remainder_float(a, b):
    quotient = floor_divide_float(a, b)
    return tl.fma(-quotient, b + tl.zeros_like(quotient), a + tl.zeros_like(quotient))


@triton.jit
def power(a, b):
    """a ** b of floats, in float64: an error of the logarithm is multiplied by the result's exponent."""
    wide_a, wide_b = a.to(tl.float64), b.to(tl.float64)
    size = tl.exp2(wide_b * tl.log2(tl.where(wide_a == 0.0, 1.0, tl.abs(wide_a))))
    whole = tl.floor(wide_b) == wide_b
    odd = whole & (tl.floor(wide_b * 0.5) * 2.0 != wide_b)
    signed = tl.where(wide_a < 0.0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    of_zero = tl.where(wide_b > 0.0, 0.0, float("inf"))
    result = tl.where(wide_a == 0.0, of_zero, signed)
    return tl.where(wide_b == 0.0, 1.0, result)


@triton.jit
def wrap(index, size):
    """Indices count from the end where they are negative."""
    return tl.where(index < 0, index + size, index)
