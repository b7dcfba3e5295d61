"""Tile plans built by GPU kernels: the plan that torch builds, and a right one where a tile has no room for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inductor_lowering.packed_labels import LabelledIntervals
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import device_plans
from magi_flex.kernels.device_plans import build_device_plan
from magi_flex.kernels.ffa_schedule import device_schedule, make_schedule
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import TilePlan, build_tile_plan
from tests.cases.masks import make_mask
from tests.test_tiles import CLASSES, check_invariants, interval_plan, packed_documents

LISTS = ("full_ptr", "full_runs", "partial_ptr", "partial_runs")


def without_capacity(tiles: TilePlan) -> TilePlan:
    """On the CPU, without row tiles and runs past the last ones, which must be empty or unread."""
    tensors = {name: getattr(tiles, name).cpu() for name in ("head_ptr", "tile_begin", "tile_end", *LISTS)}
    used = int(tensors["head_ptr"][-1])
    assert (tensors["tile_begin"][used:] == tensors["tile_end"][used:]).all()
    for kind in ("full", "partial"):
        ptr = tensors[f"{kind}_ptr"]
        assert (ptr[used:] == ptr[used]).all() and ptr[used] <= len(tensors[f"{kind}_runs"])
        tensors[f"{kind}_runs"] = tensors[f"{kind}_runs"][: ptr[used]]
        tensors[f"{kind}_ptr"] = ptr[: used + 1]
    for name in ("tile_begin", "tile_end"):
        tensors[name] = tensors[name][:used]
    return dataclasses.replace(tiles, **tensors)


def built(plan: MaskPlan, q_tile: int, kv_tile: int, kind: str, run_align: int = 1) -> TilePlan:
    tiles = build_device_plan(plan.intervals, q_tile, kv_tile, *CLASSES[kind], run_align)
    full, partial = tiles.steps()
    short = without_capacity(tiles)
    for steps, wanted in zip((full, partial), short.steps(), strict=True):
        assert torch.equal(steps.cpu()[: len(wanted)], wanted) and not steps[len(wanted) :].any()
    return short


def assert_same(tiles: TilePlan, wanted: TilePlan) -> None:
    for name in ("head_ptr", "tile_begin", "tile_end", *LISTS):
        assert torch.equal(getattr(tiles, name), getattr(wanted, name)), name


def total_steps(tiles: TilePlan) -> list[int]:
    return [int(x.sum()) for x in tiles.steps()]


ORDINARY = {
    "window": interval_plan(torch.arange(45) - 11, torch.arange(1, 46), 45),
    "documents": packed_documents([7, 3, 3, 2, 17], False),
    "documents, causal": packed_documents([7, 30, 3, 2, 11], True),
}


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("kind", CLASSES)
def test_same_as_torch(name: str, kind: str) -> None:
    """Masks of one interval that moves forward: the very same tiles and runs."""
    plan = ORDINARY[name]
    run_align = 4 if kind == "ragged-t" else 1
    tiles = built(plan, 8, 8, kind, run_align)
    assert_same(tiles, build_tile_plan(plan, 8, 8, *CLASSES[kind], run_align))


@pytest.mark.parametrize("name", ["sink_and_window", "longformer", "per_head_mix"])
def test_mask_patterns(name: str) -> None:
    """Several intervals, heads, rows without keys; the fixed grid has the exact classes."""
    mask = make_mask(name, 21, 23).dense()
    plan = MaskPlan(RowIntervals.from_dense(mask))
    for kind in CLASSES:
        tiles = built(plan, 16, 8, kind)
        check_invariants(tiles, mask, 16, 8, kind)
        if kind.startswith("fixed"):
            assert_same(tiles, build_tile_plan(plan, 16, 8, *CLASSES[kind]))


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    """Blocks of random boundaries: full, empty, bands and noise."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    heads = draw(st.sampled_from([1, 1, 2]))
    q_len, kv_len = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    cuts = [(torch.rand(size, generator=generator) < 0.15).cumsum(0) for size in (q_len, kv_len)]
    kinds = torch.randint(0, 4, (1, heads, *(int(cut[-1]) + 1 for cut in cuts)), generator=generator)
    kinds = kinds[..., cuts[0], :][..., cuts[1]]
    q, k = torch.arange(q_len)[:, None], torch.arange(kv_len)
    noise = torch.rand(1, heads, q_len, kv_len, generator=generator) < 0.5
    return torch.where(kinds == 0, False, torch.where(kinds == 1, True, torch.where(kinds == 2, k <= q, noise)))


QUICK = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(masks(), st.sampled_from([(8, 8), (16, 4)]), st.sampled_from(list(CLASSES)))
def test_random_masks(mask: torch.Tensor, sizes: tuple[int, int], kind: str) -> None:
    plan = MaskPlan(RowIntervals.from_dense(mask))
    check_invariants(built(plan, *sizes, kind), mask, *sizes, kind)


@QUICK
@given(masks(), st.sampled_from(list(CLASSES)))
def test_out_of_room(mask: torch.Tensor, kind: str) -> None:
    """Rows given out one by one in no order need more spans than a tile has room for: partial, but nothing is lost."""
    order = torch.randperm(mask.shape[2], generator=torch.Generator().manual_seed(0))
    mask = mask[:, :, order]
    plan = MaskPlan(RowIntervals.from_dense(mask))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_plans, "_LOOKS", 3)
        patch.setattr(device_plans, "room", lambda slots: (2, 1))
        check_invariants(built(plan, 8, 8, kind), mask, 8, 8, kind)


def test_rest_of_the_rows() -> None:
    """A key tile that may look into few blocks only: what is left is one run, and rows past it are none of it."""
    row = torch.arange(600)
    odd = (row % 2 == 0) & (row > 100) & (row < 400)
    plan = interval_plan(torch.where(odd, 0, 9), torch.where(odd, 8, 9), 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_plans, "_LOOKS", 5)
        tiles = built(plan, 8, 8, "ragged-t")
    check_invariants(tiles, plan.to_dense(), 8, 8, "ragged-t")
    assert tiles.partial_runs[-1, 1] <= 448  # the end of the last block with rows


def test_rows_without_order_are_not_guessed_at() -> None:
    """Key tiles are cut as on the fixed grid, as torch cuts them, where the rows of a key are many runs."""
    end = torch.randint(0, 24, (48,), generator=torch.Generator().manual_seed(0))
    plan = interval_plan(end * 0, end, 24)
    tiles = built(plan, 8, 8, "ragged-t")
    check_invariants(tiles, plan.to_dense(), 8, 8, "ragged-t")
    assert torch.equal(tiles.tile_begin, build_tile_plan(plan, 8, 8, *CLASSES["ragged-t"]).tile_begin)
    assert tiles.tile_begin.tolist() == [0, 8, 16]


def test_parts_of_the_path() -> None:
    """A path that is cut into parts costs at most one more tile and one more short step for each."""
    plan = packed_documents([3, 5, 2, 4, 6, 3, 5, 4, 2, 3], True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_plans, "_PATH", 3)
        tiles = built(plan, 8, 8, "ragged")
    check_invariants(tiles, plan.to_dense(), 8, 8, "ragged")
    assert len(tiles.tile_begin) <= len(build_tile_plan(plan, 8, 8, ragged=True).tile_begin) + 4


def test_nothing_to_do() -> None:
    for q_len, kv_len in ((0, 5), (5, 0)):
        mask = torch.ones(1, 2, q_len, kv_len, dtype=torch.bool)
        for kind in CLASSES:
            tiles = built(MaskPlan.from_dense(mask), 4, 4, kind)
            check_invariants(tiles, mask, 4, 4, kind)


@pytest.mark.parametrize(("slots", "lengths"), [(1, (300, 37)), (3, (1, 1)), (3, (20, 129))])
def test_rows_in_runs_of_their_labels(slots: int, lengths: tuple[int, int]) -> None:
    """As torch's operations find them: labels that return, that are missing, that stand in one run each."""
    generator = torch.Generator().manual_seed(0)
    q_len, kv_len = lengths
    rest = RowIntervals.build(
        torch.randint(-2, kv_len, (2, 2, slots, q_len), generator=generator),
        torch.randint(0, kv_len + 3, (2, 2, slots, q_len), generator=generator),
        kv_len,
    )
    seen = set()
    for kind in range(4):
        keys = torch.randint(0, 9, (2, 2, kv_len), generator=generator) * (1 << 40)
        rows = torch.randint(0, 9, (2, 2, q_len), generator=generator) * (1 << 40)
        if kind % 2:
            keys = -keys.sort().values  # one run each
        if kind == 2:
            rows = rows.fill_(torch.iinfo(torch.int64).min)  # of no key
        mask = LabelledIntervals(rest, rows, keys)
        intervals, holds = mask.packed()
        by_kernel, also_holds = mask.packed_by_kernel()
        assert torch.equal(by_kernel.starts, intervals.starts) and torch.equal(by_kernel.ends, intervals.ends)
        assert bool(holds) == bool(also_holds)
        seen.add(bool(holds))
    assert seen == {True, False} or kv_len == 1


def assert_same_schedule(tiles: TilePlan, narrow_tile: int) -> None:
    """Our kernels bring ``tiles`` into the working order of torch's operations."""
    wanted = make_schedule(tiles, narrow_tile)
    got = device_schedule(tiles, narrow_tile)
    for name in ("tile_rows", "tile_runs", "tile_heads", "full_runs", "count"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    runs = int(tiles.partial_ptr[-1])
    assert torch.equal(got.partial_runs[:runs], wanted.partial_runs[:runs])


@pytest.mark.parametrize(("name", "narrow_tile"), [("document_causal", 32), ("per_batch_and_head_mix", 0)])
def test_schedules(name: str, narrow_tile: int) -> None:
    intervals = RowIntervals.from_dense(make_mask(name, 129).dense())
    assert_same_schedule(build_device_plan(intervals, 24, 80, False, True), narrow_tile)
