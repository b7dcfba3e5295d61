"""What the host is told of masks whose intervals are on a device, against the dense mask; what kernels make of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magi_flex.distributed.attention_plan import AttentionPlan
from magi_flex.distributed.dispatch import dtensor_row_counts, solve_dispatch
from magi_flex.distributed.exchange_plan import build_exchange_plan
from magi_flex.distributed.key_ranges import needed_ranges
from magi_flex.distributed.workloads import document_mask
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.ffa_backward_schedule import choose_heads, known_steps, tile_steps
from magi_flex.kernels.ffa_plans import has_few_keys
from magi_flex.mask_outline import BLOCK, Outline
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import build_tile_plan
from tests.cases.masks import make_mask
from tests.test_intervals import intervals

ROWS, KEYS = 80, 128


def check(outline: Outline, dense_BHQK: Tensor) -> None:
    missing = -dense_BHQK.shape[3] % BLOCK
    blocks = torch.nn.functional.pad(dense_BHQK, (0, missing)).unflatten(3, (-1, BLOCK))
    assert torch.equal(outline.rows_BHN, blocks.any(4).sum(2))
    assert torch.equal(outline.area_BH, dense_BHQK.sum((2, 3)))
    assert outline.area == int(dense_BHQK.sum())


def spread_out(mask: RowIntervals, key: int) -> RowIntervals:
    """``mask`` with an unused slot, empty at ``key``, before each of its intervals."""
    starts, ends = (torch.stack((torch.full_like(x, key), x), 3).flatten(2, 3) for x in (mask.starts, mask.ends))
    return RowIntervals(starts, ends, mask.kv_len)


@settings(max_examples=60)
@given(st.data())
def test_outlines_are_exact(data: st.DataObject) -> None:
    mask = data.draw(intervals(kv_len=data.draw(st.sampled_from((1, 127, 128, 129, 300)))))
    check(Outline.of(mask), mask.to_dense())
    heads = mask.starts.shape[1]
    part = slice(data.draw(st.integers(0, heads - 1)), heads)
    check(Outline.of(mask).of_heads(part), mask.to_dense()[:, part])
    check(Outline.of(spread_out(mask, data.draw(st.integers(0, mask.kv_len)))), mask.to_dense())


def test_plans_with_outlines() -> None:
    intervals = MaskPlan.from_dense(make_mask("document_causal", 300).dense())
    plan = intervals.with_outline()
    assert plan.outline is not None and plan.with_outline() is plan
    check(plan.outline, plan.to_dense())
    bits = MaskPlan.from_dense(torch.rand(1, 1, 200, 200) < 0.5)
    assert bits.bit_tiles is not None and bits.with_outline() is bits


def test_outlines_of_nothing() -> None:
    assert Outline.of(RowIntervals.empty(7, 300)).rows_BHN.tolist() == [[[0, 0, 0]]]
    for q_len, kv_len in ((0, 5), (5, 0)):
        assert Outline.of(RowIntervals.full(q_len, kv_len)).area == 0


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("name", ["document_scattered", "per_head_mix", "sliding_window", "lower_right_causal"])
def test_plans_of_ranks_have_true_outlines(name: str, joined: bool) -> None:
    """The claim is about the rank's own rows and keys, renumbered, and about each group of heads."""
    mask, ranks = RowIntervals.from_dense(make_mask(name, 300).dense()), 3
    dispatch = solve_dispatch([mask], dtensor_row_counts(300, ranks))
    needed = needed_ranges(mask, dispatch)
    for rank in range(ranks):
        exchange = build_exchange_plan(mask, dispatch, dispatch, rank, needed, 1 if joined else 2, joined=joined)
        plan = AttentionPlan.from_exchange(exchange, "cpu", mask.starts.shape[1] if joined else 1)
        parts = [(x.mask, x.empty) for x in plan.sets]
        parts += [] if plan.joined is None else [(x, plan.joined.empty) for x in plan.joined.masks]
        assert len(parts) == (mask.starts.shape[1] if joined else 3)
        for part, empty in parts:
            assert part.outline is not None
            check(part.outline, part.to_dense())
            assert not empty or part.outline.area == 0


def test_heads_of_an_item_follow_from_an_outline() -> None:
    """As if the steps had been read from the tile plan, on every rank of a sequence that ranks share."""
    lengths = [2500, 700, 60, 4100, 900]
    for mask in (document_mask(lengths), document_mask([sum(lengths)]), RowIntervals.full(6000, 6000)):
        dispatch = solve_dispatch([mask], dtensor_row_counts(mask.q_len, 2))
        for rank in range(2):
            rows = dispatch.rows(rank)
            local = mask.take_rows(rows)
            plan = MaskPlan(local, outline=Outline.of(local))
            tiles = build_tile_plan(plan, ROWS, KEYS, transposed=True, run_align=8)
            known, exact = known_steps(plan, ROWS, KEYS), tile_steps(tiles)
            assert known is not None and (known - exact).abs().max() <= 4  # every run of a tile ends with a short step
            assert choose_heads(known, 64, 8, 132) == choose_heads(exact, 64, 8, 132)
            mean = plan.area() / plan.q_len
            for limit in (int(mean) + 1, int(mean)):
                assert has_few_keys(plan, limit) == has_few_keys(MaskPlan(local), limit)
    assert known_steps(MaskPlan(local), ROWS, KEYS) is None
