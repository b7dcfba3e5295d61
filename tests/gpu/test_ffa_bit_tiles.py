"""Masks with bit tiles in the Hopper kernels, forward and backward, against dense float64 attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.request import AttentionRequest
from magi_flex.mask_plan import BitTiles, MaskPlan
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def on_gpu(plan: MaskPlan) -> MaskPlan:
    bits = plan.bit_tiles
    assert bits is not None
    tensors = (x.cuda() for x in (bits.row_ptr, bits.cols, bits.slot, bits.bits))
    intervals = RowIntervals(plan.starts.cuda(), plan.ends.cuda(), plan.kv_len)
    return MaskPlan(intervals, BitTiles(bits.q_tile, bits.kv_tile, *tensors))


def random_mask(batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Bands of random bits with empty and full tiles, of causal rows and of empty rows."""
    torch.manual_seed(q_len + heads)
    mask = torch.rand(batch, heads, q_len, kv_len) < 0.5
    mask[..., :128, 128:256] = True
    mask[..., 128:256, : kv_len // 2] = False
    mask[..., 256:300, :] &= torch.arange(kv_len) <= torch.arange(256, min(max(q_len, 256), 300))[:, None]
    mask[..., 300:384, :] = False
    mask[..., 9:10, :] = False
    return mask


@pytest.mark.parametrize(
    ("dims", "deterministic"),
    [((128, 128), False), ((64, 64), False), ((128, 128), True), ((256, 256), False), ((192, 128), False)],
    ids=str,
)
def test_bit_tiles(dims: tuple[int, int], deterministic: bool) -> None:
    shapes = [(2, 1, 1, 700, 515), (2, 2, 8, 130, 1000), (1, 1, 1, 5, 129)]
    for batch, mask_batch, mask_heads, q_len, kv_len in shapes[: 3 if dims == (128, 128) else 2]:
        mask = random_mask(mask_batch, mask_heads, q_len, kv_len)
        plan = MaskPlan.from_dense(mask)
        heads, kv_heads = 8, 2
        torch.manual_seed(sum(dims))
        q = torch.randn(batch, heads, q_len, dims[0], device="cuda").bfloat16()
        k = torch.randn(batch, kv_heads, kv_len, dims[0], device="cuda").bfloat16()
        v = torch.randn(batch, kv_heads, kv_len, dims[1], device="cuda").bfloat16()
        d_out = torch.randn(batch, heads, q_len, dims[1], device="cuda").bfloat16()
        exact, rounded = (
            dense_attention_with_gradients(q, k, v, d_out, None, mask.cuda(), None, (), 0.1, dtype)
            for dtype in (torch.float64, q.dtype)
        )
        poison = torch.full((64 << 20,), float("nan"), device="cuda")
        del poison
        request = AttentionRequest(q, k, v, on_gpu(plan), 0.1, deterministic=deterministic)
        result = FfaBackend().forward(request)
        assert_within_factor(result.out, rounded.out, exact.out, floor=1e-3)
        assert_within_factor(result.lse, rounded.lse, exact.lse, floor=1e-5)
        assert_within_factor(result.max_score, rounded.max_score, exact.max_score, floor=1e-5)
        gradients = FfaBackend().backward(request, result.out, result.lse, d_out, None)
        for name in ("dq", "dk", "dv"):
            actual = getattr(gradients, name)
            assert_within_factor(actual, getattr(rounded, name), getattr(exact, name), floor=2e-3)
