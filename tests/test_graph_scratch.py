"""Derived values in a graph's own memory: made once, read back as they were, never taken for another mask's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import graph_scratch
from magi_flex.kernels.graph_scratch import scratch_bytes, shared
from magi_flex.kernels.plan_cache import derived, nothing_kept
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import build_tile_plan


class Pair(NamedTuple):
    count: int
    rows: Tensor


@dataclass(frozen=True)
class Nested:
    pair: Pair
    flags: Tensor
    name: str


def make() -> Nested:
    return Nested(Pair(3, torch.arange(7).view(7, 1).expand(7, 2)), torch.tensor([True, False]), "x")


def test_values_come_back() -> None:
    scratch = torch.zeros(4096, dtype=torch.uint8)
    version = scratch._version
    built = []

    def build() -> Nested:
        built.append(make())
        return built[-1]

    first, second = shared(scratch, "what", build), shared(scratch, "what", build)
    assert first is built[0] and len(built) == 1
    assert second.pair.count == 3 and second.name == "x" and isinstance(second.pair, Pair)
    assert torch.equal(second.pair.rows, first.pair.rows) and torch.equal(second.flags, first.flags)
    assert second.pair.rows.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()
    assert scratch._version == version  # autograd, which saves it, sees no change
    other = shared(scratch, "other", lambda: Pair(1, torch.full((5,), 9)))
    assert torch.equal(shared(scratch, "other", pytest.fail).rows, other.rows)
    assert torch.equal(shared(scratch, "what", pytest.fail).pair.rows, first.pair.rows)


def test_other_memory_other_captures_and_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def build() -> Pair:
        built.append(1)
        return Pair(1, torch.arange(600))

    small = torch.zeros(4096, dtype=torch.uint8)
    for scratch in (small, small, torch.zeros(1 << 13, dtype=torch.uint8)):
        shared(scratch, "what", build)
    assert len(built) == 3  # 4800 bytes do not fit
    scratch = torch.zeros(1 << 13, dtype=torch.uint8)
    shared(scratch, "what", build)
    monkeypatch.setattr(graph_scratch, "_capture_of", lambda scratch: 7)
    shared(scratch, "what", build)
    shared(scratch, "what", build)
    assert len(built) == 5
    kept = len(graph_scratch._contents)
    del scratch
    shared(torch.zeros(1 << 13, dtype=torch.uint8), "what", build)
    assert len(graph_scratch._contents) <= kept


def test_plans_in_scratch() -> None:
    size = 500
    row = torch.arange(size)
    plan = MaskPlan(RowIntervals.build((row - row % 77).view(1, 1, 1, -1), (row + 1).view(1, 1, 1, -1), size))
    other = MaskPlan(RowIntervals.full(size, size, "cpu"))
    scratch = torch.zeros(scratch_bytes(tuple(plan.starts.shape), size), dtype=torch.uint8)
    built: list[int] = []

    def tiles_of(mask: MaskPlan) -> Any:
        def build() -> Any:
            built.append(1)
            return build_tile_plan(mask, 24, 80, ragged=True)

        return derived(mask, "tiles", build)

    with nothing_kept(plan, scratch):
        first, second = tiles_of(plan), tiles_of(plan)
        for name in ("tile_begin", "full_runs", "partial_runs", "head_ptr"):
            assert torch.equal(getattr(first, name), getattr(second, name))
        assert len(built) == 1
        tiles_of(other), tiles_of(other)
        assert len(built) == 3  # not this memory's mask, and nothing is kept
    with nothing_kept(plan, None):
        tiles_of(plan), tiles_of(plan)
    assert len(built) == 5
