"""What flash-attn-4's kernels call while they are traced: masks from interval bounds, and score mods, in CuTe DSL.

Straight-line code on CuTe's values, so that plain Python functions do.  Imports the package: only what has made sure
that it is there may import this.

Shape legend: B mask batch, H mask heads, R intervals of a row, Q rows (of queries, or of keys where bounds are by key).
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import utils

from magi_flex.kernels.fa4_interval_mask import ANY_NUMBER, install_interval_mask
from magi_flex.kernels.fa4_score import KernelScore
from magi_flex.kernels.fa4_walk import COMPARE, Lane

# Each interval of an unrolled mask_mod is code for each score or line, which takes long to compile.
MOST_UNROLLED = 8
_ALL = 0xFFFFFFFF
_WORD = 32
_TYPES = {
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
    torch.bool: cutlass.Boolean,
}
_LOG2_E = math.log2(math.e)


# ---- masks ----------------------------------------------------------------------------------------------------------


@functools.cache
def interval_mask(slots: int, by_key: bool, packed: bool, by_line: bool) -> Callable[..., Any]:
    """A mask_mod over the first two tables: starts and ends ``[B, H, R, Q]``.

    Args:
        slots: R; more than MOST_UNROLLED are looked at in a loop, by one mask_mod for any number.
        by_key: the bounds are those of queries for each key.
        packed: asked for 32 keys at a time, it gives a word of bits (forward kernels of compute capability 10 and up).
        by_line: kernels may read the bounds themselves, once for a thread's line of scores.
    """
    if slots > MOST_UNROLLED:
        return interval_mask(ANY_NUMBER, by_key, packed, by_line)
    mod: Any
    if packed:
        mod = _packed_mask(slots)
        mod.__vec_size__ = _WORD
    else:
        mod = _scalar_mask(slots, by_key)
        if by_line:
            mod.interval_slots, mod.by_key = slots, by_key
            install_interval_mask()
    mod.__cute_hash__ = kernel_key(f"mask {slots} {by_key} {packed} {by_line}")
    return mod


def _scalar_mask(slots: int, by_key: bool) -> Callable[..., Any]:
    def mask(batch, head, q_idx, kv_idx, seqlen_info, tables):  # type: ignore[no-untyped-def]
        place, inside = (kv_idx, q_idx) if by_key else (q_idx, kv_idx)
        if slots == ANY_NUMBER:
            starts, ends = (table[batch[0], head[0], None, place[0]] for table in tables[:2])
            return utils.scalar_to_ssa(_is_in_any(starts, ends, inside[0]), cutlass.Boolean)
        found = None
        for slot in range(slots):
            starts, ends = (
                utils.scalar_to_ssa(table[batch[0], head[0], slot, place[0]], cutlass.Int32) for table in tables[:2]
            )
            here = (inside >= starts) & (inside < ends)
            found = here if found is None else found | here
        return found

    return mask


@cute.jit
def _is_in_any(starts: cute.Tensor, ends: cute.Tensor, index: cutlass.Int32) -> cutlass.Boolean:
    found = cutlass.Boolean(False)
    for slot in cutlass.range(cute.size(starts.shape), unroll=1):
        found = found | ((index >= starts[slot]) & (index < ends[slot]))
    return found


def _packed_mask(slots: int) -> Callable[..., Any]:
    def mask(batch, head, q_idx, kv_idx, seqlen_info, tables):  # type: ignore[no-untyped-def]
        word = cute.make_rmem_tensor(1, dtype=cutlass.Uint32)
        if slots == ANY_NUMBER:
            starts, ends = (table[batch[0], head[0], None, q_idx[0]] for table in tables[:2])
            word[0] = _bits_of_all(starts, ends, kv_idx[0])
        else:
            bounds = [
                [table[batch[0], head[0], slot, q_idx[0]] - kv_idx[0] for table in tables[:2]] for slot in range(slots)
            ]
            word[0] = functools.reduce(operator.or_, (_bits(begin, end) for begin, end in bounds))
        return word.load()

    return mask


def _bits(begin: Any, end: Any) -> Any:
    """Of a word, those from ``begin`` up to ``end``."""
    above = utils.shl_u32(cutlass.Uint32(_ALL), cutlass.Uint32(cutlass.max(begin, cutlass.Int32(0))))
    below = utils.shr_u32(cutlass.Uint32(_ALL), cutlass.Uint32(cutlass.max(_WORD - end, cutlass.Int32(0))))
    return above & below


@cute.jit
def _bits_of_all(starts: cute.Tensor, ends: cute.Tensor, first_key: cutlass.Int32) -> cutlass.Uint32:
    bits = cutlass.Uint32(0)
    for slot in cutlass.range(cute.size(starts.shape), unroll=1):
        bits = bits | _bits(starts[slot] - first_key, ends[slot] - first_key)
    return bits


# ---- score mods -----------------------------------------------------------------------------------------------------


def score_mod(score: KernelScore, first_table: int) -> Callable[..., Any]:
    """The score mod whose tables begin at ``first_table`` of the kernel's."""

    def modified(x, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return score.forward(LANES, x, (batch, head, q_idx, kv_idx), aux_tensors[first_table:])

    modified.__cute_hash__ = kernel_key(f"score {score.key} {first_table}")  # type: ignore[attr-defined]
    return modified


def score_gradient(score: KernelScore, first_table: int) -> Callable[..., Any]:
    """The derivative of :func:`score_mod`, times a gradient."""
    assert score.backward is not None
    backward = score.backward

    def gradient(grad, x, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return backward(LANES, grad, x, (batch, head, q_idx, kv_idx), aux_tensors[first_table:])

    gradient.__cute_hash__ = kernel_key(f"gradient {score.key} {first_table}")  # type: ignore[attr-defined]
    return gradient


class CuteLanes:
    """magi_flex.kernels.fa4_walk.Lanes on CuTe's vectors of values.

    Tables are read by one score at a time, which is how the package calls mods that have any.
    """

    _OPERATORS = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "div": operator.truediv,
        "floordiv": operator.floordiv,
        "and": operator.and_,
        "or": operator.or_,
        "xor": operator.xor,
    } | {name: getattr(operator, name) for name in COMPARE}

    def unary(self, name: str, x: Lane) -> Lane:
        if name == "neg":
            return self._number(0, x) - x
        if name == "abs":
            return (
                cute.math.abs(x) if x.dtype.is_float else cute.where(x < self._number(0, x), self._number(0, x) - x, x)
            )
        if name == "not":
            return self._number(True if x.dtype is cutlass.Boolean else -1, x) ^ x
        if name == "exp":
            return cute.math.exp2(x * self._number(_LOG2_E, x))
        if name == "tanh":  # two units of the last place of 1, where the approximate instruction has 11 bits
            decay = cute.math.exp2(x * self._number(2 * _LOG2_E, x))
            return self._number(1.0, x) - self._number(2.0, x) / (decay + self._number(1.0, x))
        return getattr(cute.math, name)(x)

    def binary(self, name: str, x: Lane, y: Lane) -> Lane:
        if name in ("max", "min"):
            first = (x > y) if name == "max" else (x < y)
            return cute.where(first | (x != x) if x.dtype.is_float else first, x, y)
        if name == "mod":
            return x - (x // y) * y
        if name == "pow":
            return cute.math.pow(x, y)
        return self._OPERATORS[name](x, y)

    def where(self, condition: Lane, x: Lane, y: Lane) -> Lane:
        return cute.where(condition, x, y)

    def cast(self, x: Lane, dtype: torch.dtype) -> Lane:
        if x.dtype is _TYPES[dtype]:
            return x
        if dtype == torch.bool:
            return x != self._number(0, x)
        if x.dtype is cutlass.Boolean:
            return cute.where(x, self.constant(1, dtype, x), self.constant(0, dtype, x))
        return x.to(_TYPES[dtype])

    def constant(self, value: float | int | bool, dtype: torch.dtype, like: Lane) -> Lane:
        return cute.full_like(like, value, _TYPES[dtype])

    def _number(self, value: float | int | bool, like: Lane) -> Lane:
        return cute.full_like(like, value, like.dtype)

    def load(self, table: Any, indices: Sequence[Lane], dtype: torch.dtype) -> Lane:
        within = []
        for dim, index in enumerate(indices):
            place, size = index[0], index.dtype(table.shape[dim])
            place = place + size * index.dtype(place < 0)
            within.append(cutlass.max(cutlass.min(place, size - 1), index.dtype(0)))
        value = cute.make_rmem_tensor(1, _TYPES[dtype])
        value[0] = table[tuple(within)].to(_TYPES[dtype])
        return value.load()


LANES = CuteLanes()


@functools.cache
def _sources() -> str:
    """Of all that decides the code of mods, and of kernels that call ours."""
    names = ("device", "hopper_forward", "interval_mask", "score", "trace", "walk")
    sources = (Path(__file__).with_name(f"fa4_{name}.py").read_bytes() for name in names)
    return hashlib.sha256(b"".join(sources)).hexdigest()


def kernel_key(what: str) -> str:
    """Equal for equal code alone."""
    return hashlib.sha256(f"magi_flex {_sources()} {what}".encode()).hexdigest()
