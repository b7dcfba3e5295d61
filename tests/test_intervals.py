"""RowIntervals: every operation against the same one on dense masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magi_flex.intervals import RowIntervals
from tests.cases.masks import MASKS, make_mask

LAWS = settings(max_examples=60, deadline=None)
SIZES = st.one_of(st.integers(0, 3), st.integers(4, 40))


def random_bounds(seed: int, shape: tuple[int, ...], kv_len: int) -> tuple[Tensor, Tensor]:
    """Unsorted, overlapping, adjacent, empty and out of range intervals."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(-5, kv_len + 5, shape, generator=generator)
    return starts, starts + torch.randint(-3, max(1, kv_len // 2) + 1, shape, generator=generator)


def dense_of(starts: Tensor, ends: Tensor, kv_len: int) -> Tensor:
    key = torch.arange(kv_len)
    return ((key >= starts[..., None]) & (key < ends[..., None])).any(2)


@st.composite
def intervals(draw: st.DrawFn, q_len: int | None = None, kv_len: int | None = None) -> RowIntervals:
    q_len = draw(SIZES) if q_len is None else q_len
    kv_len = draw(SIZES) if kv_len is None else kv_len
    batch, heads, slots = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3])), draw(st.integers(1, 6))
    starts, ends = random_bounds(draw(st.integers(0, 2**31)), (batch, heads, slots, q_len), kv_len)
    return RowIntervals.build(starts, ends, kv_len)


@st.composite
def interval_pairs(draw: st.DrawFn) -> tuple[RowIntervals, RowIntervals]:
    q_len, kv_len = draw(SIZES), draw(SIZES)
    return draw(intervals(q_len, kv_len)), draw(intervals(q_len, kv_len))


def assert_canonical(x: RowIntervals) -> None:
    assert x.starts.dtype == x.ends.dtype == torch.int32 and x.starts.shape == x.ends.shape
    used = x.ends > x.starts
    assert (used[:, :, 1:] <= used[:, :, :-1]).all(), "unused slots come last"
    assert (x.starts[~used] == x.kv_len).all() and (x.ends[~used] == 0).all()
    assert ((x.starts[:, :, 1:] > x.ends[:, :, :-1]) | ~used[:, :, 1:]).all(), "sorted, disjoint and not adjacent"
    assert (x.starts >= 0).all() and (x.ends <= x.kv_len).all()


@LAWS
@given(st.integers(0, 2**31), st.integers(1, 40), SIZES, SIZES)
def test_build(seed: int, slots: int, q_len: int, kv_len: int) -> None:
    starts, ends = random_bounds(seed, (2, 1, slots, q_len), kv_len)
    x = RowIntervals.build(starts, ends, kv_len)
    assert_canonical(x)
    dense = dense_of(starts, ends, kv_len)
    assert torch.equal(x.to_dense(), dense)
    assert torch.equal(x.row_area(), dense.sum(-1)) and x.area() == int(dense.sum())
    again = RowIntervals.build(x.starts, x.ends, kv_len)
    assert torch.equal(again.starts, x.starts) and torch.equal(again.ends, x.ends)
    assert x.max_intervals == slots and x.nbytes == 2 * 4 * x.starts.numel()


@LAWS
@given(intervals())
def test_from_dense_and_trim(x: RowIntervals) -> None:
    other = RowIntervals.from_dense(x.to_dense())
    assert_canonical(other)
    trimmed = x.trim()
    assert torch.equal(other.starts, trimmed.starts) and torch.equal(other.ends, trimmed.ends)


@LAWS
@given(interval_pairs())
def test_union_and_intersection(pair: tuple[RowIntervals, RowIntervals]) -> None:
    one, two = pair
    union, both = one.union(two), one.intersect(two)
    for x in (union, both):
        assert_canonical(x)
    assert torch.equal(union.to_dense(), one.to_dense() | two.to_dense())
    assert torch.equal(both.to_dense(), one.to_dense() & two.to_dense())
    assert union.max_intervals == one.max_intervals + two.max_intervals
    assert both.max_intervals <= one.max_intervals + two.max_intervals - 1


@LAWS
@given(intervals())
def test_complement(x: RowIntervals) -> None:
    other = x.complement()
    assert_canonical(other)
    assert torch.equal(other.to_dense(), ~x.to_dense())
    assert torch.equal(other.complement().to_dense(), x.to_dense())


@LAWS
@given(intervals(), st.integers(-50, 50), SIZES)
def test_shift(x: RowIntervals, offset: int, kv_len: int) -> None:
    moved = x.shift(offset, kv_len)
    assert_canonical(moved)
    expected = torch.zeros(*x.starts.shape[:2], x.q_len, kv_len, dtype=torch.bool)
    for key in range(kv_len):
        if 0 <= key - offset < x.kv_len:
            expected[..., key] = x.to_dense()[..., key - offset]
    assert torch.equal(moved.to_dense(), expected)


@LAWS
@given(intervals(), st.integers(0, 2**31))
def test_shift_by_row(x: RowIntervals, seed: int) -> None:
    offset = torch.randint(-9, 9, (x.q_len,), generator=torch.Generator().manual_seed(seed))
    moved = x.shift(offset)
    assert_canonical(moved)
    for q in range(x.q_len):
        row = RowIntervals(x.starts[..., q : q + 1], x.ends[..., q : q + 1], x.kv_len).shift(int(offset[q]))
        assert torch.equal(moved.to_dense()[:, :, q : q + 1], row.to_dense())


@LAWS
@given(intervals(), st.integers(0, 2**31))
def test_take_rows_and_keys(x: RowIntervals, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dense = x.to_dense()
    rows = torch.randint(0, max(1, x.q_len), (7,), generator=generator)[: 7 * (x.q_len > 0)]
    assert torch.equal(x.take_rows(rows).to_dense(), dense[:, :, rows])
    assert torch.equal(x.take_rows(slice(1, 4)).to_dense(), dense[:, :, 1:4])
    keys = (torch.rand(x.kv_len, generator=generator) < 0.6).nonzero().squeeze(1)
    kept = x.take_keys(keys)
    assert_canonical(kept)
    assert kept.max_intervals == x.max_intervals and kept.kv_len == len(keys)
    assert torch.equal(kept.to_dense(), dense[..., keys])


@LAWS
@given(intervals())
def test_transpose(x: RowIntervals) -> None:
    dense = x.to_dense().transpose(2, 3)
    most = (
        max(1, int((torch.nn.functional.pad(dense, (1, 0)).int().diff(dim=-1) == 1).sum(-1).max()))
        if dense.numel()
        else 1
    )
    columns = x.transpose(most)
    assert columns is not None
    assert_canonical(columns)
    assert torch.equal(columns.to_dense(), dense) and columns.max_intervals == most
    assert most == 1 or x.transpose(most - 1) is None


@LAWS
@given(st.integers(0, 2**31), SIZES, SIZES)
def test_transpose_of_ascending_intervals(seed: int, q_len: int, kv_len: int) -> None:
    """Bands, documents and the like: bounds that never go back from row to row."""
    bounds, _ = random_bounds(seed, (2, 3, 2, q_len), kv_len)
    bounds = bounds.sort(3).values.sort(2).values
    x = RowIntervals.build(bounds[:, :, :1], bounds[:, :, 1:], kv_len)
    columns = x.transpose(kv_len + 1)
    assert columns is not None
    assert_canonical(columns)
    assert torch.equal(columns.to_dense(), x.to_dense().transpose(2, 3))
    if ((x.ends > x.starts).all() and q_len) or not kv_len:
        assert columns.max_intervals == 1


@LAWS
@given(intervals())
def test_expand(x: RowIntervals) -> None:
    batch, heads = x.starts.shape[:2]
    wide = x.expand(2, 3)
    assert torch.equal(wide.to_dense(), x.to_dense().expand(2, 3, -1, -1))
    for name, sizes, present in (("batch", (5, heads), batch), ("heads", (batch, 5), heads)):
        if present > 1:
            with pytest.raises(ValueError, match=f"{name}: is 5, but the mask has {present}"):
                x.expand(*sizes)


@pytest.mark.parametrize("slots", [1, 2, 5, 16, 17, 33])
def test_many_slots(slots: int) -> None:
    """Sorting networks of every size used, and the sort beyond them."""
    starts, ends = random_bounds(slots, (1, 2, slots, 300), 500)
    x = RowIntervals.build(starts, ends, 500)
    assert_canonical(x)
    assert torch.equal(x.to_dense(), dense_of(starts, ends, 500))


@pytest.mark.parametrize("name", MASKS)
def test_patterns_round_trip(name: str) -> None:
    mask = make_mask(name, 130, 127).dense()
    x = RowIntervals.from_dense(mask)
    assert_canonical(x)
    assert torch.equal(x.to_dense(), mask)


def test_default_device_does_not_matter() -> None:
    dense = make_mask("per_head_mix", 60).dense()
    keys = torch.arange(3, 50)
    with torch.device("meta"):
        x = RowIntervals.from_dense(dense)
        results = [x.union(x).trim(), x.intersect(x).trim(), x.complement().complement().trim(), x.shift(3).shift(-3)]
        columns, kept = x.transpose(9), x.take_keys(keys)
    assert all(torch.equal(y.to_dense(), dense) for y in results[:3]) and columns is not None
    assert torch.equal(results[3].to_dense()[..., :57], dense[..., :57])
    assert torch.equal(columns.to_dense(), dense.transpose(2, 3)) and torch.equal(kept.to_dense(), dense[..., keys])


def test_full_and_empty() -> None:
    assert RowIntervals.full(3, 4).to_dense().all() and RowIntervals.full(3, 4).area() == 12
    assert not RowIntervals.empty(3, 4).to_dense().any() and RowIntervals.empty(3, 4).area() == 0
    for x in (RowIntervals.full(3, 0), RowIntervals.full(0, 4), RowIntervals.empty(0, 0)):
        assert_canonical(x)
        assert x.area() == 0 and x.complement().area() == 0


def test_large_areas_do_not_overflow() -> None:
    assert RowIntervals.full(70_000, 70_000).area() == 70_000**2


def test_errors() -> None:
    ones = torch.ones(1, 1, 1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"starts, ends: are \[1, 1, 1, 3\] and \[1, 1, 3\]"):
        RowIntervals.build(ones, ones[0], 5)
    with pytest.raises(ValueError, match="starts: is torch.float32; give integers"):
        RowIntervals.build(ones.float(), ones, 5)
    with pytest.raises(ValueError, match="kv_len: is -1"):
        RowIntervals.build(ones, ones, -1)
    with pytest.raises(ValueError, match="other: has 3 x 6 rows x keys, but 3 x 5 is needed"):
        RowIntervals.full(3, 5).union(RowIntervals.full(3, 6))
    with pytest.raises(ValueError, match="batch: is 2, but the mask has 3"):
        RowIntervals.full(3, 5).expand(2, 1).union(RowIntervals.full(3, 5).expand(3, 1))
