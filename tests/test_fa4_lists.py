"""The block lists and interval tables that flash-attn-4's kernels get."""

from __future__ import annotations

import itertools

import pytest
import torch

from magi_flex.intervals import RowIntervals
from magi_flex.kernels.fa4_masks import backward_mask, forward_mask
from magi_flex.kernels.fa4_tiles import PADDING, BlockSize, backward_block, block_lists, forward_block, padded_bounds
from tests.cases.masks import make_mask
from tests.fa4_standin import INTERVAL_MASKS, Device, Lists, Package, plan_of


@pytest.mark.parametrize("name", INTERVAL_MASKS)
def test_lists_and_bounds_are_the_mask(name: str) -> None:
    for arch, (q_len, kv_len) in itertools.product((90, 100), ((300, 300), (1, 129))):
        dense = make_mask(name, q_len, kv_len).dense()
        plan, sizes = plan_of(dense), dense.shape
        stand_in = Package(arch)
        for mask, backward in (
            (forward_mask(plan, arch, (128, 128), 4), False),
            (backward_mask(plan, arch, (128, 128)), True),
        ):
            assert mask.lists is not None and mask.block is not None and mask.bounds is not None
            options = {
                "block_sparse_tensors": Lists(*mask.lists, mask.block),
                "mask_mod": Device.interval_mask(mask.slots, mask.by_key, False, False),
            }
            tables = [x.expand(*sizes[:2], -1, -1) for x in mask.bounds]
            assert torch.equal(stand_in.mask(sizes, tables, options, backward), dense), (arch, backward)


def test_block_sizes() -> None:
    """They must be multiples of the kernels' tiles, as the package checks; these are its rules."""
    for head_dim, v_dim in ((64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        for arch in (90, 100):
            forward, backward = forward_block(arch, head_dim, v_dim, 10_000), backward_block(arch, head_dim, v_dim)
            assert forward.q % 64 == 0 and forward.kv % 16 == 0 and backward.q % 64 == 0 and backward.kv % 16 == 0
    assert forward_block(90, 64, 64, 999) == (192, 128) and forward_block(90, 128, 128, 999) == (128, 128)
    assert forward_block(100, 128, 128, 128) == (128, 128) and forward_block(100, 128, 128, 129) == (256, 128)
    assert backward_block(90, 128, 128) == (64, 128) and backward_block(100, 128, 128) == (128, 256)


def test_lists_of_any_width() -> None:
    """As while a CUDA graph is captured, when nobody can ask how long the longest list is; and plans with capacity."""
    plan = plan_of(make_mask("document_causal", 700).dense())
    block = BlockSize(64, 32)
    for transposed in (False, True):
        exact = block_lists(plan, block, transposed)
        wide = block_lists(plan, block, transposed, width=40)
        for x, y in zip(exact, wide, strict=True):
            assert torch.equal(x, y[..., : x.shape[-1]]) and (x.dim() == 3 or not y[..., x.shape[-1] :].any())


def test_bounds_are_padded() -> None:
    dense = make_mask("sink_and_window", 57).dense()
    intervals = RowIntervals.from_dense(dense | make_mask("all_images_mutual", 57).dense())
    starts, ends = padded_bounds(intervals)
    assert starts.shape == ends.shape and starts.shape[3] == 57 + PADDING
    assert starts.shape[2] in (1, 2, 4, 8, intervals.max_intervals) and intervals.max_intervals <= starts.shape[2]
    assert torch.equal(RowIntervals(starts[..., :57], ends[..., :57], 57).to_dense(), intervals.to_dense())
    assert (ends <= starts)[..., 57:].all() and (ends <= starts)[:, :, intervals.max_intervals :].all()
