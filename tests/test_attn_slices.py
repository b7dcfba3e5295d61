"""AttnSlice lists against their definition, pair by pair, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import magi_flex
from magi_flex.attn_slices import (
    SLICE_TYPES,
    AttnSlices,
    intervals_from_attn_slices,
    plan_from_attn_slices,
    to_attn_slices,
)
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS, dense_mask, make_mask

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "data" / "attn_slices.json").read_text())["cases"]
}


def lists(case: dict[str, Any]) -> AttnSlices:
    q_ranges = [(a, b) for a, b, _, _ in case["slices"]]
    k_ranges = [(c, d) for _, _, c, d in case["slices"]]
    return AttnSlices(q_ranges, k_ranges, [SLICE_TYPES[int(digit)] for digit in case["types"]])


def keys_of_row(slices: AttnSlices, q: int, kv_len: int) -> Tensor:
    """bool ``[kv_len]``, from the definition."""
    out = torch.zeros(kv_len, dtype=torch.bool)
    k = torch.arange(kv_len)
    for (q0, q1), (k0, k1), kind in zip(slices.q_ranges, slices.k_ranges, slices.types, strict=True):
        if q0 <= q < q1:
            inside = (k >= k0) & (k < k1)
            if kind in ("causal", "bi_causal"):
                inside &= k < k1 - (q1 - 1 - q)
            if kind in ("inv_causal", "bi_causal"):
                inside &= k >= k0 + (q - q0)
            out |= inside
    return out


def rows_of(intervals: RowIntervals, rows: Tensor) -> Tensor:
    return intervals.take_rows(rows).to_dense()[0, 0]


@pytest.mark.parametrize("name", CASES)
def test_lists(name: str) -> None:
    case = CASES[name]
    slices, q_len, kv_len = lists(case), case["q_len"], case["kv_len"]
    plan = plan_from_attn_slices(slices.q_ranges, slices.k_ranges, slices.types, q_len, kv_len)
    intervals = intervals_from_attn_slices(slices.q_ranges, slices.k_ranges, slices.types, q_len, kv_len)
    # Rows at which something begins or ends, and others between them.
    edges = torch.tensor([x for q in slices.q_ranges for x in q]).unique()
    between = torch.randint(0, q_len, (30,), generator=torch.Generator().manual_seed(0))
    rows = torch.cat((edges, edges - 1, between)).unique()
    rows = rows[(rows >= 0) & (rows < q_len)]
    rows = rows[:: 1 + len(rows) // 100]
    expected = torch.stack([keys_of_row(slices, q, kv_len) for q in rows.tolist()])
    assert torch.equal(rows_of(intervals, rows), expected)
    assert plan.area() == intervals.area()
    if q_len <= 2500:
        assert torch.equal(plan.to_dense(), intervals.to_dense())
    back = to_attn_slices(intervals)
    again = intervals_from_attn_slices(back.q_ranges, back.k_ranges, back.types, q_len, kv_len)
    assert torch.equal(again.starts, intervals.starts) and torch.equal(again.ends, intervals.ends)
    assert len(back.types) <= max(len(slices.types), 12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["q_len"] <= 2500])
def test_block_masks_of_lists(name: str) -> None:
    case = CASES[name]
    slices, q_len, kv_len = lists(case), case["q_len"], case["kv_len"]
    block_mask = magi_flex.from_attn_slices(slices.q_ranges, slices.k_ranges, slices.types, q_len, kv_len, device="cpu")
    expected = intervals_from_attn_slices(slices.q_ranges, slices.k_ranges, slices.types, q_len, kv_len).to_dense()
    assert torch.equal(dense_mask(block_mask.mask_mod, 1, 1, q_len, kv_len), expected)
    assert torch.equal(magi_flex.plan(block_mask).to_dense(), expected)


def test_areas_that_are_known() -> None:
    def area(name: str) -> int:
        case = CASES[name]
        slices = lists(case)
        q_len, kv_len = case["q_len"], case["kv_len"]
        return plan_from_attn_slices(slices.q_ranges, slices.k_ranges, slices.types, q_len, kv_len).area()

    assert area("full_4k") == 4096**2
    assert area("full_in_pieces_8k") == 8192**2
    assert area("two_thin_causal") == 10 + 1
    lengths = [256, 256, 512, 256, 256, 256, 256, 2048]
    assert area("varlen_full_4k") == sum(n * n for n in lengths)


@st.composite
def slice_lists(draw: st.DrawFn) -> tuple[AttnSlices, int, int]:
    q_len, kv_len = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    out = AttnSlices([], [], [])
    for _ in range(draw(st.integers(0, 6))):
        for ranges, length in ((out.q_ranges, q_len), (out.k_ranges, kv_len)):
            begin, end = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
            ranges.append((begin, end))
        out.types.append(draw(st.sampled_from(SLICE_TYPES)))
    return out, q_len, kv_len


@settings(max_examples=150, deadline=None)
@given(slice_lists())
def test_random_lists(case: tuple[AttnSlices, int, int]) -> None:
    slices, q_len, kv_len = case
    expected = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for q in range(q_len):
        expected[q] = keys_of_row(slices, q, kv_len)
    intervals = intervals_from_attn_slices(slices.q_ranges, slices.k_ranges, slices.types, q_len, kv_len)
    assert torch.equal(intervals.to_dense()[0, 0], expected)
    numbers = [SLICE_TYPES.index(kind) for kind in slices.types]
    pairs = (torch.tensor(x, dtype=torch.int32).view(-1, 2) for x in (slices.q_ranges, slices.k_ranges))
    assert torch.equal(plan_from_attn_slices(*pairs, numbers, q_len, kv_len).to_dense()[0, 0], expected)
    back = to_attn_slices(intervals)
    again = torch.zeros_like(expected)
    for q in range(q_len):
        row = [keys_of_row(AttnSlices([a], [b], [c]), q, kv_len) for a, b, c in zip(*vars(back).values(), strict=True)]
        stacked = torch.stack([*row, torch.zeros(kv_len, dtype=torch.bool)]).sum(0)
        assert stacked.max() <= 1 if kv_len else True
        again[q] = stacked > 0
    assert torch.equal(again, expected)


@pytest.mark.parametrize("name", MASKS)
def test_patterns_as_slices(name: str) -> None:
    intervals = RowIntervals.from_dense(make_mask(name, 129, 257).dense()[:1, :1])
    back = to_attn_slices(intervals)
    again = intervals_from_attn_slices(back.q_ranges, back.k_ranges, back.types, 129, 257)
    assert torch.equal(again.starts, intervals.starts) and torch.equal(again.ends, intervals.ends)


@pytest.mark.parametrize(
    "name,most", [("causal", 1), ("sliding_window", 2), ("full", 1), ("nothing", 0), ("bidirectional_local", 3)]
)
def test_few_slices(name: str, most: int) -> None:
    assert len(to_attn_slices(RowIntervals.from_dense(make_mask(name, 1000).dense())).types) <= most


def test_pairs_of_rows_stay_compact() -> None:
    """Rows 100 to 200 in pairs, each pair sees all before it and itself: one interval a row, a slice a pair."""
    q_ranges = [(0, 100), *((q, q + 2) for q in range(100, 200, 2))]
    k_ranges = [(0, 100), *((0, q + 2) for q in range(100, 200, 2))]
    types = ["causal", *["full"] * 50]
    plan = plan_from_attn_slices(q_ranges, k_ranges, types, 200, 200)
    assert plan.bit_tiles is None and plan.intervals.max_intervals == 1 and plan.nbytes == 2 * 4 * 200
    row = torch.arange(200)
    assert torch.equal(plan.ends.view(-1), torch.where(row < 100, row, row // 2 * 2 + 1).int() + 1)
    assert len(to_attn_slices(plan.intervals).types) <= 51
    for transposed in (False, True):
        tiles = plan.tiles(64, 64, transposed)
        assert len(tiles.full_runs) <= 3 and len(tiles.partial_runs) == 4


def test_million_rows() -> None:
    size = 1 << 20
    cuts = list(range(0, size + 1, 1024))
    ranges = list(zip(cuts[:-1], cuts[1:], strict=True))
    plan = plan_from_attn_slices(ranges, ranges, ["causal"] * len(ranges), size, size)
    assert plan.area() == len(ranges) * 1024 * 1025 // 2 and plan.nbytes == 8 * size


def test_no_slices() -> None:
    for q_len, kv_len in ((3, 4), (0, 4), (3, 0)):
        plan = plan_from_attn_slices([], [], [], q_len, kv_len)
        assert isinstance(plan, MaskPlan) and plan.area() == 0 and plan.to_dense().shape == (1, 1, q_len, kv_len)


def test_errors() -> None:
    def build(q: Any = ((0, 2),), k: Any = ((0, 2),), types: Any = ("full",)) -> None:
        plan_from_attn_slices(q, k, types, 4, 5)

    with pytest.raises(ValueError, match=r"q_ranges\[1\]: is \(3, 5\); 0 <= begin <= end <= q_len = 4"):
        build(q=[(0, 2), (3, 5)])
    with pytest.raises(ValueError, match=r"k_ranges\[0\]: is \(2, 1\); 0 <= begin <= end <= kv_len = 5"):
        build(k=[(2, 1)])
    with pytest.raises(ValueError, match=r"k_ranges\[0\]: is \(-1, 1\)"):
        build(k=[(-1, 1)])
    with pytest.raises(ValueError, match=r"types\[0\]: is 'diagonal'; give one of full, causal, inv_causal, bi_causal"):
        build(types=["diagonal"])
    with pytest.raises(ValueError, match=r"types\[0\]: is 4"):
        build(types=torch.tensor([4]))
    with pytest.raises(ValueError, match="have 1, 1 and 2 entries"):
        build(types=["full", 1])
    with pytest.raises(ValueError, match=r"q_ranges: is torch.float32 \[1, 2\]"):
        build(q=[(0.0, 2.0)])
    with pytest.raises(ValueError, match=r"q_ranges: is torch.int64 \[1, 3\]"):
        build(q=[(0, 2, 3)])
    with pytest.raises(ValueError, match="have 2 batch entries and 1 heads"):
        to_attn_slices(RowIntervals.full(3, 3).expand(2, 1))
