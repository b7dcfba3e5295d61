"""The picture of a mask counts what the mask holds: cell areas against the dense mask, classes, colours, files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magi_flex import tile_map
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def pooled(dense_QK: Tensor, q_cell: int, kv_cell: int) -> Tensor:
    q_len, kv_len = dense_QK.shape
    padded = torch.nn.functional.pad(dense_QK.long(), (0, -kv_len % kv_cell, 0, -q_len % q_cell))
    return padded.unflatten(0, (-1, q_cell)).unflatten(2, (-1, kv_cell)).sum((1, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 45),
    st.integers(1, 45),
    st.integers(0, 999),
)
def test_cell_areas_equal_the_dense_mask(q_len, kv_len, slots, q_cell, kv_cell, seed) -> None:
    rng = torch.Generator().manual_seed(seed)
    bounds = torch.randint(-3, kv_len + 4, (2, 1, 2, slots, q_len), generator=rng)
    plan = MaskPlan(RowIntervals.build(bounds[0], bounds[1], kv_len))
    for head in range(2):
        area = tile_map.cell_area(plan, q_cell, kv_cell, 0, head)
        assert torch.equal(area, pooled(plan.to_dense()[0, head], q_cell, kv_cell))


@pytest.mark.parametrize("cell", [32, 100, 128, 256])
@pytest.mark.parametrize("written_out", [True, False])
def test_cell_areas_with_bit_tiles(cell: int, written_out: bool, monkeypatch) -> None:
    rng = torch.Generator().manual_seed(1)
    dense = torch.rand(2, 2, 300, 517, generator=rng) < 0.5
    dense[:, 1, :128] = True
    plan = MaskPlan.from_dense(dense)
    assert plan.bit_tiles is not None
    if not written_out:
        monkeypatch.setattr(tile_map, "_MOST_DENSE_PAIRS", 0)
        if cell % 128:
            with pytest.raises(ValueError, match="cell: .* multiples of 128 x 128"):
                tile_map.cell_area(plan, cell, cell, 1, 1)
            return
    for batch in range(2):
        for head in range(2):
            area = tile_map.cell_area(plan, cell, cell, batch, head)
            assert torch.equal(area, pooled(dense[batch, head], cell, cell))


@pytest.mark.parametrize(
    ("length", "tile"), [(1, 128), (5, 128), (257, 128), (4096, 128), (100_000, 128), (10**7, 64), (900, 100)]
)
def test_cells_stay_few_and_fit_the_tiles(length: int, tile: int) -> None:
    cell = tile_map.cell_size(length, tile)
    assert -(-length // cell) <= tile_map.MOST_CELLS
    assert cell % tile == 0 or tile % cell == 0


def test_colours_tell_the_classes_apart() -> None:
    dense = torch.ones(256, 256).tril_().bool()[None, None]
    share, tile_share = tile_map.picture(MaskPlan.from_dense(dense), 128, 128, 0, 0)
    rgb = tile_map.colours(share, tile_share)
    size = share.shape[0]
    assert rgb[size - 1, 0].tolist() == pytest.approx([0x1F / 255, 0x3B / 255, 0x63 / 255])  # below the diagonal: full
    assert rgb[0, size - 1].tolist() == pytest.approx([0xF6 / 255, 0xF7 / 255, 0xF9 / 255])  # above it: empty
    assert rgb[0, size // 4].tolist() == pytest.approx([0xFD / 255, 0xE9 / 255, 0xC4 / 255])  # unattended, partial tile


@needs_matplotlib
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (1, 1), (257, 1025)])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_file_is_written(q_len: int, kv_len: int, suffix: str, tmp_path: Path) -> None:
    plan = MaskPlan(RowIntervals.full(q_len, kv_len))
    target = tmp_path / f"map.{suffix}"
    counts = {"full": 1, "partial": 0, "empty": 0}
    assert tile_map.draw(plan, target, title="full", counts=counts, q_tile=128, kv_tile=128) == target
    head = target.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head
