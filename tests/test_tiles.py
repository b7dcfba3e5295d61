"""Tile plans against the dense mask: no pair lost, full runs full, exact classes on the fixed grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import TilePlan, block_lists, build_tile_plan, count_tiles
from tests.cases.masks import MASKS, make_mask

CLASSES = {"fixed": (False, False), "ragged": (False, True), "fixed-t": (True, False), "ragged-t": (True, True)}


def expanded(tiles: TilePlan, ptr: torch.Tensor, runs: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """int32 ``[X, rows, length]``: how many runs hold each pair (each run adds a rectangle: four corners, two sums)."""
    heads = len(tiles.head_ptr) - 1
    head = torch.repeat_interleave(torch.arange(heads), tiles.head_ptr.diff().long())
    tile = torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff().long())
    out = torch.zeros(heads, rows + 1, length + 1, dtype=torch.int32)
    for row, row_sign in ((tiles.tile_begin, 1), (tiles.tile_end, -1)):
        for key, key_sign in ((runs[:, 0], 1), (runs[:, 1], -1)):
            sign = torch.full((len(runs),), row_sign * key_sign, dtype=torch.int32)
            out.index_put_((head[tile], row.long()[tile], key.long()), sign, accumulate=True)
    return out.cumsum(1).cumsum(2)[:, :rows, :length]


def check(plan: MaskPlan, mask: torch.Tensor, q_tile: int, kv_tile: int, kind: str, run_align: int = 1) -> TilePlan:
    transposed, ragged = CLASSES[kind]
    tiles = build_tile_plan(plan, q_tile, kv_tile, transposed, ragged, run_align)
    check_invariants(tiles, mask, q_tile, kv_tile, kind, run_align)
    return tiles


def check_invariants(
    tiles: TilePlan, mask: torch.Tensor, q_tile: int, kv_tile: int, kind: str, run_align: int = 1
) -> None:
    """What a tile plan of ``mask`` promises, whoever built it; without unused capacity."""
    transposed, ragged = CLASSES[kind]
    assert (tiles.q_tile, tiles.kv_tile, tiles.transposed) == (q_tile, kv_tile, transposed)
    tensors = (tiles.head_ptr, tiles.tile_begin, tiles.tile_end, tiles.full_ptr, tiles.full_runs)
    assert all(x.dtype == torch.int32 for x in (*tensors, tiles.partial_ptr, tiles.partial_runs))
    mask_XRL = mask.flatten(0, 1).transpose(1, 2) if transposed else mask.flatten(0, 1)
    heads, rows, length = mask_XRL.shape
    height, step = (kv_tile, q_tile) if transposed else (q_tile, kv_tile)
    # Row tiles are all rows of each head, in order.
    assert tiles.head_ptr.tolist()[-1] == len(tiles.tile_begin) == len(tiles.tile_end)
    for x in range(heads):
        begin, end = (t[tiles.head_ptr[x] : tiles.head_ptr[x + 1]].tolist() for t in (tiles.tile_begin, tiles.tile_end))
        assert begin == ([0] + end[:-1] if rows else []) and (end[-1:] == [rows] or not rows)
        assert all(0 < e - b <= height for b, e in zip(begin, end, strict=True))
        assert ragged or begin == list(range(0, rows, height))
    full = expanded(tiles, tiles.full_ptr, tiles.full_runs, rows, length)
    partial = expanded(tiles, tiles.partial_ptr, tiles.partial_runs, rows, length)
    assert (full + partial).max() <= 1 if full.numel() else True
    assert not ((full == 1) & ~mask_XRL).any()
    assert not ((full + partial == 0) & mask_XRL).any()
    for ptr, runs in ((tiles.full_ptr, tiles.full_runs), (tiles.partial_ptr, tiles.partial_runs)):
        assert (runs[:, 0] % run_align == 0).all()
        assert (runs[:, 0] >= 0).all() and (runs[:, 0] < runs[:, 1]).all() and (runs[:, 1] <= length).all()
        tile = torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff().long())
        assert ((runs[1:, 0] > runs[:-1, 1]) | (tile[1:] != tile[:-1])).all()
    size = tiles.full_runs[:, 1] - tiles.full_runs[:, 0]
    assert ((size % step == 0) | ((tiles.full_runs[:, 1] == length) & (not ragged))).all()
    counts = [(b - a + step - 1) // step for a, b in tiles.full_runs.tolist()]
    assert tiles.steps()[0].sum() == sum(counts)


def grid_classes(mask: torch.Tensor, q_tile: int, kv_tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(touched, full) of every tile of the fixed grid, ``[B, H, T, C]``."""
    pad = (0, -mask.shape[3] % kv_tile, 0, -mask.shape[2] % q_tile)

    def tiled(value: bool) -> torch.Tensor:
        x = torch.nn.functional.pad(mask, pad, value=value)
        return x.unflatten(3, (-1, kv_tile)).unflatten(2, (-1, q_tile)).transpose(3, 4)

    return tiled(False).any(-1).any(-1), tiled(True).all(-1).all(-1)


def plan_classes(tiles: TilePlan, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a plan on the fixed grid."""
    q_len, kv_len = mask.shape[2:]
    rows, length = (kv_len, q_len) if tiles.transposed else (q_len, kv_len)
    full = expanded(tiles, tiles.full_ptr, tiles.full_runs, rows, length)
    touched = full + expanded(tiles, tiles.partial_ptr, tiles.partial_runs, rows, length)
    if tiles.transposed:
        full, touched = full.transpose(1, 2), touched.transpose(1, 2)
    corners = (x[:, :: tiles.q_tile, :: tiles.kv_tile].unflatten(0, mask.shape[:2]) > 0 for x in (touched, full))
    return next(corners), next(corners)


@pytest.mark.parametrize("name", MASKS)
def test_mask_patterns(name: str) -> None:
    for (q_len, kv_len), (q_tile, kv_tile) in zip(
        [(5, 1), (129, 257), (257, 130)], [(16, 16), (32, 64), (64, 32)], strict=True
    ):
        mask = make_mask(name, q_len, kv_len).dense()
        plan = MaskPlan.from_dense(mask)
        for kind in CLASSES:
            tiles = check(plan, mask, q_tile, kv_tile, kind)
            if kind.startswith("fixed") and plan.bit_tiles is None:
                for got, wanted in zip(plan_classes(tiles, mask), grid_classes(mask, q_tile, kv_tile), strict=True):
                    assert torch.equal(got, wanted)


@st.composite
def random_masks(draw: st.DrawFn) -> torch.Tensor:
    """Blocks of random boundaries: full, empty, thin, and smooth ones (bands) side by side."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batch, heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]))
    q_len, kv_len = draw(st.integers(1, 150)), draw(st.integers(1, 150))

    def labels(size: int) -> torch.Tensor:
        cut = torch.rand(size, generator=generator) < draw(st.sampled_from([0.02, 0.1, 0.5]))
        return cut.cumsum(0)

    q_label, k_label = labels(q_len), labels(kv_len)
    count = (int(q_label[-1]) + 1, int(k_label[-1]) + 1)
    blocks = torch.randint(0, 4, (batch, heads, *count), generator=generator)[..., q_label, :][..., k_label]
    q, k = torch.arange(q_len)[:, None], torch.arange(kv_len)
    band = (k <= q) & (q - k < draw(st.integers(1, 100)))
    noise = torch.rand(batch, heads, q_len, kv_len, generator=generator) < 0.5
    return torch.where(blocks == 0, False, torch.where(blocks == 1, True, torch.where(blocks == 2, band, noise)))


@settings(max_examples=80, deadline=None)
@given(random_masks(), st.sampled_from([(8, 8), (16, 4), (4, 16), (1, 1), (7, 5)]), st.sampled_from(list(CLASSES)))
def test_random_masks(mask: torch.Tensor, sizes: tuple[int, int], kind: str) -> None:
    plan = MaskPlan(RowIntervals.from_dense(mask))
    tiles = check(plan, mask, *sizes, kind)
    if kind.startswith("fixed"):
        for got, wanted in zip(plan_classes(tiles, mask), grid_classes(mask, *sizes), strict=True):
            assert torch.equal(got, wanted)


@settings(max_examples=30, deadline=None)
@given(random_masks(), st.sampled_from(["ragged", "ragged-t"]), st.sampled_from([2, 4, 8]))
def test_aligned_runs(mask: torch.Tensor, kind: str, run_align: int) -> None:
    check(MaskPlan(RowIntervals.from_dense(mask)), mask, 8, 8, kind, run_align)


@settings(max_examples=30, deadline=None)
@given(random_masks(), st.sampled_from(list(CLASSES)))
def test_bit_tiles(mask: torch.Tensor, kind: str) -> None:
    plan = MaskPlan.from_dense(mask, max_intervals=1)
    check(plan, mask, 16, 32, kind)


@settings(max_examples=30, deadline=None)
@given(random_masks(), st.sampled_from([(8, 8), (16, 4), (128, 128)]))
def test_block_lists(mask: torch.Tensor, sizes: tuple[int, int]) -> None:
    plan = MaskPlan(RowIntervals.from_dense(mask))
    touched, full = grid_classes(mask, *sizes)
    for (num, indices), wanted in zip(
        (block_lists(plan, *sizes)[:2], block_lists(plan, *sizes)[2:]), (touched & ~full, full), strict=True
    ):
        assert num.dtype == indices.dtype == torch.int32 and indices.shape == wanted.shape
        assert torch.equal(num, wanted.sum(-1))
        for index in torch.cartesian_prod(*(torch.arange(n) for n in wanted.shape[:3])).tolist():
            b, h, t = index
            assert indices[b, h, t, : num[b, h, t]].tolist() == wanted[b, h, t].nonzero().squeeze(1).tolist()
    counts = count_tiles(plan, *sizes)
    assert counts.full == int(full.sum()) and counts.partial == int((touched & ~full).sum())
    assert counts.full + counts.partial + counts.empty == full.numel()


def interval_plan(starts: torch.Tensor, ends: torch.Tensor, kv_len: int) -> MaskPlan:
    return MaskPlan(RowIntervals.build(starts.view(1, 1, 1, -1), ends.view(1, 1, 1, -1), kv_len))


@pytest.mark.parametrize("kind", CLASSES)
def test_causal_million_tokens(kind: str) -> None:
    size = 1 << 20
    row = torch.arange(size)
    tiles = build_tile_plan(interval_plan(row * 0, row + 1, size), 128, 128, *CLASSES[kind])
    assert len(tiles.full_runs) == 8191 and len(tiles.partial_runs) == 8192 and tiles.nbytes < 400_000
    full, partial = tiles.steps()
    count = torch.arange(8192)
    assert torch.equal(full, count.flip(0) if tiles.transposed else count) and (partial == 1).all()


def packed_documents(lengths: list[int], causal: bool) -> MaskPlan:
    size = torch.tensor(lengths)
    end = size.cumsum(0).repeat_interleave(size)
    row = torch.arange(len(end))
    return interval_plan((size.cumsum(0) - size).repeat_interleave(size), row + 1 if causal else end, len(end))


@pytest.mark.parametrize("transposed", [False, True])
def test_ragged_tiles_start_with_documents(transposed: bool) -> None:
    """Documents that cannot save a tile by sharing one each begin a tile; no step holds keys of two of them."""
    lengths = [300, 517, 1000, 200, 641]
    for causal in (False, True):
        tiles = build_tile_plan(packed_documents(lengths, causal), 128, 128, transposed, ragged=True)
        assert set(torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()) <= set(tiles.tile_begin.tolist())
        blocks = [-(-n // 128) for n in lengths]
        least = sum(n * (n + 1) // 2 if causal else n * n for n in blocks)
        assert int(sum(x.sum() for x in tiles.steps())) == least
        fixed = build_tile_plan(packed_documents(lengths, causal), 128, 128, transposed)
        assert least < int(sum(x.sum() for x in fixed.steps()))


def test_small_documents_share_tiles() -> None:
    tiles = build_tile_plan(packed_documents([10] * 100 + [1000] + [7] * 20, True), 128, 128, ragged=True)
    # 8 tiles for the 100 small documents, 8 for the long one, 2 for the rest (or the long one's last rows with them).
    assert len(tiles.tile_begin) <= 18 and 1000 in tiles.tile_begin.tolist()


def test_full_steps_of_a_window() -> None:
    """Runs begin where the window does: 127 keys on either side of 7 full steps, in 9 steps, for every row tile."""
    row = torch.arange(4096)
    tiles = build_tile_plan(interval_plan(row - 1023, row + 1, 4096), 128, 128, ragged=True)
    full, partial = tiles.steps()
    assert (full[8:] == 7).all() and (partial[8:] == 2).all()


def test_columns_of_causal_documents_end_with_them() -> None:
    """Key tiles count from the end of each document: one masked step a tile, whatever the lengths."""
    lengths = [1000, 300, 517, 1141]
    plan = packed_documents(lengths, causal=True)
    tiles = build_tile_plan(plan, 128, 128, transposed=True, ragged=True)
    full, partial = tiles.steps()
    assert (partial == 1).all() and len(partial) == sum(-(-n // 128) for n in lengths)
    rest = {sum(lengths[:n]) + lengths[n] % 128 for n in range(4)}
    assert rest <= set(tiles.tile_begin.tolist())
    check(plan, plan.to_dense(), 128, 128, "ragged-t")


def test_default_device_does_not_matter() -> None:
    """Everything is made on the plan's device: with another default device nothing meets a tensor of that one."""
    for name in ("document_causal", "sink_and_window", "dense_table", "per_head_mix", "longformer"):
        mask = make_mask(name, 300, 260).dense()
        with torch.device("meta"):
            plan = MaskPlan.from_dense(mask)
            for transposed, ragged in CLASSES.values():
                build_tile_plan(plan, 64, 64, transposed, ragged)
            block_lists(plan, 64, 64)
            count_tiles(plan, 64, 64)
            back = plan.to_dense()
            area = plan.area()
        assert torch.equal(back, mask) and area == int(mask.sum())


def test_pairs_share_their_view() -> None:
    """Rows 100 to 200 in pairs, each pair sees all before it and itself: one interval a row, few runs."""
    row = torch.arange(300)
    end = torch.where((row >= 100) & (row < 200), row // 2 * 2 + 2, row + 1)
    plan = interval_plan(row * 0, end, 300)
    assert plan.intervals.max_intervals == 1
    mask = torch.arange(300) < end[:, None]
    for kind in CLASSES:
        tiles = check(plan, mask[None, None], 64, 64, kind)
        assert len(tiles.full_runs) <= 5 and len(tiles.partial_runs) <= (5 if not kind.startswith("ragged") else 10)


def test_no_rows_or_keys() -> None:
    for q_len, kv_len in ((0, 5), (5, 0), (0, 0)):
        mask = torch.ones(2, 1, q_len, kv_len, dtype=torch.bool)
        for kind in CLASSES:
            tiles = check(MaskPlan.from_dense(mask), mask, 4, 4, kind)
            assert not len(tiles.full_runs) and not len(tiles.partial_runs)


def test_errors() -> None:
    plan = MaskPlan(RowIntervals.full(4, 4))
    with pytest.raises(ValueError, match="kv_tile: is 0; give at least 1"):
        build_tile_plan(plan, 4, 0)
    with pytest.raises(ValueError, match="run_align: is 3; give a divisor of the step, 4"):
        build_tile_plan(plan, 4, 8, transposed=True, run_align=3)
