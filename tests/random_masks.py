"""Random mask_mods: compositions of the terms that people's masks are made of, drawn by hypothesis.

Shape legend: B batch, H query heads, Q query rows, K keys, S positions (the longer of Q and K), T blocks of positions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.cases.masks import MaskCase

Term = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Choice = TypeVar("Choice")
BLOCK = 8
COMPARISONS = (operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne)


@dataclass(frozen=True)
class Tables:
    """Captured tensors for one draw of lengths."""

    documents_S: Tensor  # sorted labels
    labels_S: Tensor  # labels in no order, -1 among them
    position_S: Tensor  # sawtooth
    bytes_S: Tensor  # int8, so that arithmetic may overflow
    per_batch_BS: Tensor  # int32
    length_B: Tensor
    window_H: Tensor
    flags_S: Tensor  # bool
    reals_S: Tensor  # float32 with NaN and infinities
    selected_BHTT: Tensor  # bool

    @staticmethod
    def random(batch: int, heads: int, size: int, seed: int) -> Tables:
        generator = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        reals_S = torch.randn(size, generator=generator)
        reals_S[integers(0, 10, size) == 0] = float("nan")
        reals_S[integers(0, 10, size) == 0] = float("-inf")
        blocks = -(-size // BLOCK)
        return Tables(
            integers(0, 5, size).sort().values,
            integers(-1, 4, size),
            torch.arange(size) % 13,
            integers(-128, 128, size).to(torch.int8),
            integers(-5, size + 5, batch, size).to(torch.int32),
            integers(0, size + 1, batch),
            integers(-3, size, heads),
            integers(0, 5, size) == 0,
            reals_S,
            integers(0, 3, batch, heads, blocks, blocks) == 0,
        )


class Composer:
    """Draws terms; ``depth`` bounds how deep they nest."""

    def __init__(self, draw: st.DrawFn, tables: Tables) -> None:
        self.draw = draw
        self.tables = tables

    def choose(self, *options: Choice) -> Choice:
        return options[self.draw(st.integers(0, len(options) - 1))]

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def integer(self, depth: int) -> Term:
        if depth == 0 or self.number(0, 2) == 0:
            return self._integer_leaf()
        x = self.integer(depth - 1)
        if self.number(0, 1):
            return self._unary(x, self.number(1, 20))
        y = self.integer(depth - 1)
        if self.number(0, 4) == 0:
            condition = self.condition(0)
            return lambda *i: torch.where(condition(*i), x(*i), y(*i))
        op = self.choose(operator.add, operator.sub, operator.sub, torch.minimum, torch.maximum)
        return lambda *i: op(x(*i), y(*i))

    def _integer_leaf(self) -> Term:
        t, n = self.tables, self.number(-9, 50)
        table_S = self.choose(t.documents_S, t.labels_S, t.position_S, t.bytes_S)
        return self.choose(
            lambda b, h, q, k: q,
            lambda b, h, q, k: k,
            lambda b, h, q, k: table_S[q],
            lambda b, h, q, k: table_S[k],
            lambda b, h, q, k: t.length_B[b],
            lambda b, h, q, k: t.window_H[h],
            lambda b, h, q, k: t.per_batch_BS[b, q],
            lambda b, h, q, k: t.per_batch_BS[b, k],
            lambda b, h, q, k: torch.full_like(q, n),
        )

    def _unary(self, x: Term, n: int) -> Term:
        return self.choose(
            lambda *i: x(*i).abs(),
            lambda *i: -x(*i),
            lambda *i: x(*i) // n,
            lambda *i: torch.div(x(*i), n, rounding_mode="trunc"),
            lambda *i: x(*i) % n,
            lambda *i: torch.fmod(x(*i), n),
            lambda *i: x(*i) * (n - 8),
            lambda *i: x(*i).clamp(n - 5, 2 * n),
            lambda *i: x(*i).long(),
        )

    def comparison(self) -> Term:
        t, op = self.tables, self.choose(*COMPARISONS)
        kind = self.number(0, 9)
        if kind == 0:
            return lambda b, h, q, k: op(t.reals_S[q], t.reals_S[k])
        if kind == 1:
            return lambda b, h, q, k: op(q - k, t.reals_S[k] * 9)
        x = self.integer(2)
        if kind == 2:
            real = self.choose(2.5, 3.0, -1.0, float("nan"), float("inf"), float("-inf"))
            return lambda *i: op(x(*i), real)
        y = self.integer(2)
        return lambda *i: op(x(*i), y(*i))

    def condition(self, depth: int) -> Term:
        if depth == 0 or self.number(0, 3) == 0:
            t = self.tables
            return self.choose(
                self.comparison(),
                self.comparison(),
                lambda b, h, q, k: t.flags_S[q],
                lambda b, h, q, k: t.flags_S[k],
                lambda b, h, q, k: t.selected_BHTT[b, h, q // BLOCK, k // BLOCK],
                lambda b, h, q, k: (q * 7 + k * 3) ** 2 % 5 < 2,
            )
        x, y = self.condition(depth - 1), self.condition(depth - 1)
        if self.number(0, 5) == 0:
            condition = self.comparison()
            return lambda *i: torch.where(condition(*i), x(*i), ~y(*i))
        op = self.choose(operator.and_, operator.or_, operator.and_, operator.xor, operator.eq)
        return lambda *i: op(x(*i), y(*i))


@st.composite
def mask_cases(draw: st.DrawFn) -> MaskCase:
    """A random mask_mod with random lengths, batch and heads."""
    q_len, kv_len = draw(st.sampled_from([1, 5, 40, 129, 200])), draw(st.sampled_from([1, 7, 60, 128, 150]))
    batch, heads = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 3]))
    tables = Tables.random(batch, heads, max(q_len, kv_len), draw(st.integers(0, 1 << 16)))
    mask_mod = Composer(draw, tables).condition(depth=3)
    return MaskCase("random", mask_mod, batch, heads, q_len, kv_len, None)
