"""MaskPlan: every mask pattern comes back exactly, and stays small."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_flex.bit_tiles import count_bits, pack_bits, unpack_bits
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan, MaskPlanBuilder
from tests.cases.masks import MASKS, make_mask


def check(plan: MaskPlan, mask: torch.Tensor) -> None:
    assert torch.equal(plan.to_dense(), mask)
    assert plan.area() == int(mask.sum())
    tensors = [plan.starts, plan.ends]
    if plan.bit_tiles is not None:
        bits = plan.bit_tiles
        tensors += [bits.row_ptr, bits.cols, bits.slot, bits.bits]
        assert not (plan.intervals.to_dense() & bits.to_dense(plan.q_len, plan.kv_len)).any()
        interval_rows = (plan.ends > plan.starts).any(2)
        bit_rows = (bits.row_ptr.diff(dim=2) > 0).repeat_interleave(bits.q_tile, 2)[..., : plan.q_len]
        assert not (interval_rows & bit_rows).any()
    assert all(x.dtype == torch.int32 for x in tensors)
    assert plan.nbytes == sum(x.numel() * 4 for x in tensors)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("q_len,kv_len", [(1, 1), (5, 5), (127, 129), (257, 1025), (1025, 127)])
def test_from_dense(name: str, q_len: int, kv_len: int) -> None:
    case = make_mask(name, q_len, kv_len)
    mask = case.dense()
    plan = MaskPlan.from_dense(mask)
    check(plan, mask)
    if case.max_intervals is not None and case.max_intervals <= 8:
        assert plan.bit_tiles is None and plan.intervals.max_intervals <= case.max_intervals


@pytest.mark.parametrize("name", ["causal", "dense_table", "bigbird", "temporal_head", "tree", "per_head_mix"])
def test_from_dense_long(name: str) -> None:
    mask = make_mask(name, 2046).dense()
    check(MaskPlan.from_dense(mask), mask)


@pytest.mark.parametrize("batch,heads,q_len,kv_len", [(1, 1, 0, 5), (1, 1, 5, 0), (2, 3, 0, 0), (0, 1, 5, 5)])
def test_no_rows_or_keys(batch: int, heads: int, q_len: int, kv_len: int) -> None:
    mask = torch.ones(batch, heads, q_len, kv_len, dtype=torch.bool)
    plan = MaskPlan.from_dense(mask)
    assert torch.equal(plan.to_dense(), mask) and plan.area() == 0
    assert plan.intervals.max_intervals == 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_dense(data: st.DataObject) -> None:
    """Row tiles of all densities side by side: few runs, many runs, full and empty tiles."""
    seed = data.draw(st.integers(0, 2**31))
    batch, heads = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    q_len, kv_len = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    max_intervals = data.draw(st.sampled_from([1, 2, 8, 100]))
    generator = torch.Generator().manual_seed(seed)
    density = torch.rand(batch, heads, -(-q_len // 64), -(-kv_len // 64), generator=generator) * 3 - 1
    density = density.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :q_len, :kv_len]
    mask = torch.rand(batch, heads, q_len, kv_len, generator=generator) < density
    plan = MaskPlan.from_dense(mask, max_intervals)
    check(plan, mask)
    builder = MaskPlanBuilder(batch, heads, q_len, kv_len, "cpu", max_intervals)
    for begin in range(0, q_len, builder.q_tile):
        builder.add_rows(mask[:, :, begin : begin + builder.q_tile])
    other = builder.finish()
    assert torch.equal(other.starts, plan.starts) and torch.equal(other.ends, plan.ends)
    assert (other.bit_tiles is None) == (plan.bit_tiles is None)
    assert torch.equal(other.to_dense(), mask)


def test_bits_only_where_needed() -> None:
    """One row tile of noise does not cost the other rows anything."""
    mask = make_mask("causal", 2048).dense()
    mask[:, :, 640:768] = torch.rand(1, 1, 128, 2048) < 0.5
    plan = MaskPlan.from_dense(mask)
    check(plan, mask)
    assert plan.intervals.max_intervals == 1 and plan.bit_tiles is not None
    assert plan.bit_tiles.row_ptr.diff().nonzero()[:, 2].tolist() == [5]
    assert plan.nbytes < 8 * 2048 + 128 * 2048 // 8 + 1024


def test_many_thin_runs_stay_intervals() -> None:
    """12 single keys a row, far apart: bits would be larger."""
    mask = torch.zeros(1, 1, 128, 20000, dtype=torch.bool)
    mask[..., ::1700] = True
    plan = MaskPlan.from_dense(mask)
    check(plan, mask)
    assert plan.bit_tiles is None and plan.intervals.max_intervals == 12


def test_few_intervals_win_over_smaller_bits() -> None:
    """Up to ``max_intervals`` a row tile has intervals even where its bits would be smaller."""
    mask = torch.zeros(1, 1, 256, 64, dtype=torch.bool)
    mask[:, :, :128, ::8] = True
    plan = MaskPlan.from_dense(mask)
    check(plan, mask)
    assert plan.bit_tiles is None and plan.intervals.max_intervals == 8


def test_dense_table_is_one_bit_a_pair() -> None:
    mask = make_mask("dense_table", 2048).dense()
    plan = MaskPlan.from_dense(mask)
    assert plan.nbytes < 1.2 * mask.numel() / 8


def test_bit_packing() -> None:
    mask = torch.rand(3, 5, 96) < 0.5
    words = pack_bits(mask)
    assert words.dtype == torch.int32 and words.shape == (3, 5, 3)
    for j in (0, 1, 31, 32, 63, 64, 95):
        assert torch.equal((words[..., j // 32] >> (j % 32)) & 1, mask[..., j].to(torch.int32))
    assert torch.equal(unpack_bits(words), mask)
    assert torch.equal(count_bits(words).sum(-1), mask.sum(-1))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"mask: is torch.float32 \[3, 4\]; give a bool tensor"):
        MaskPlan.from_dense(torch.zeros(3, 4))
    builder = MaskPlanBuilder(1, 1, 200, 10, "cpu")
    with pytest.raises(ValueError, match="multiple of 128"):
        builder.add_rows(torch.zeros(1, 1, 100, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\[1, 1, at most 200, keys\] is needed"):
        builder.add_rows(torch.zeros(1, 2, 128, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match="keys from 0 to 11; both must be multiples of 128"):
        builder.add_rows(torch.zeros(1, 1, 128, 11, dtype=torch.bool))
    with pytest.raises(ValueError, match="intervals: have 9 keys; 10 are needed"):
        builder.add_intervals(RowIntervals.full(128, 9))
    builder.add_rows(torch.zeros(1, 1, 128, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match="got 128 of 200 rows"):
        builder.finish()
    with pytest.raises(ValueError, match="max_intervals: is 0"):
        MaskPlanBuilder(1, 1, 200, 10, "cpu", max_intervals=0)


@pytest.mark.parametrize("batch,heads", [(1, 1), (2, 3)])
def test_builder_takes_intervals_and_narrow_bands(batch: int, heads: int) -> None:
    q_len, kv_len = 500, 700
    dense = random_runs(batch, heads, q_len, kv_len)
    dense[:, :, 128:256, :256] = False
    dense[:, :, 128:256, 384:] = False
    dense[:, :, 256:384] = dense[:1, :1, 256:384]  # shared by all heads
    builder = MaskPlanBuilder(batch, heads, q_len, kv_len, "cpu")
    builder.add_intervals(RowIntervals.from_dense(dense[:, :, :128]))
    builder.add_rows(dense[:, :, 128:256, 256:384], first_key=256)
    builder.add_intervals(RowIntervals.from_dense(dense[:1, :1, 256:384]))
    builder.add_rows(dense[:, :, 384:, :])
    assert torch.equal(builder.finish().to_dense(), dense)


def random_runs(batch: int, heads: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Rows with few and with many runs."""
    generator = torch.Generator().manual_seed(0)
    flips = torch.rand(batch, heads, q_len, kv_len, generator=generator)
    rate = torch.linspace(0, 0.1, q_len)[:, None]
    return (flips < rate).cumsum(3) % 2 == 1
