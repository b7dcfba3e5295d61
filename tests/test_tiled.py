"""The tiled torch kernel against dense float64 attention: masks, shapes, dtypes, layouts, non-finite values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from magi_flex.kernels import tiled_torch
from magi_flex.kernels.request import AttentionRequest, IndexMap, ScoreProgram
from magi_flex.kernels.tiled_torch import TiledBackend
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients

KERNEL = TiledBackend()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in both directions, and several groups of heads, at test sizes."""
    monkeypatch.setattr(tiled_torch, "Q_TILE", 32)
    monkeypatch.setattr(tiled_torch, "KV_TILE", 64)
    monkeypatch.setattr(tiled_torch, "TILE_ELEMENTS", 32 * 64 * 3)


def inputs(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, v_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v, d_out."""
    generator = torch.Generator().manual_seed(q_len * 7 + kv_len)
    shapes = (
        (batch, heads, q_len, dim),
        (batch, kv_heads, kv_len, dim),
        (batch, kv_heads, kv_len, v_dim),
        (batch, heads, q_len, v_dim),
    )
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def check(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, plan: MaskPlan, dense: Tensor, d_lse: Tensor | None = None):
    request = AttentionRequest(q, k, v, plan, q.shape[-1] ** -0.5)
    result = KERNEL.forward(request)
    grads = KERNEL.backward(request, result.out, result.lse, d_out, d_lse)
    reference, same = (
        dense_attention_with_gradients(q, k, v, d_out, d_lse, dense, dtype=dtype) for dtype in (torch.float64, q.dtype)
    )
    for name in ("out", "lse", "max_score"):
        assert_within_factor(getattr(result, name), getattr(same, name), getattr(reference, name), floor=1e-6)
    for name in ("dq", "dk", "dv"):
        assert_within_factor(getattr(grads, name), getattr(same, name), getattr(reference, name), floor=1e-6)
    return result, grads


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("lengths", [(129, 129), (70, 130)])
def test_every_mask(name: str, lengths: tuple[int, int]) -> None:
    case = make_mask(name, *lengths)
    dense = case.dense()
    batch = case.batch if case.batch > 1 else 2
    heads, kv_heads = (case.heads, 1) if case.heads > 1 else (4, 2)
    check(*inputs(batch, heads, kv_heads, *lengths, 16, 16, torch.float32), MaskPlan.from_dense(dense), dense)


def test_bit_tiles() -> None:
    dense = torch.rand(2, 3, 150, 300, generator=torch.Generator().manual_seed(0)) < 0.3
    dense[:, :, 128:, 128:256] = True
    plan = MaskPlan.from_dense(dense)
    assert plan.bit_tiles is not None and (plan.bit_tiles.slot < 0).any()
    check(*inputs(2, 3, 1, 150, 300, 16, 16, torch.float32), plan, dense)


@pytest.mark.parametrize("length", [1, 5, 127, 257])
def test_sizes(length: int) -> None:
    dense = make_mask("causal", length).dense()
    check(*inputs(1, 2, 1, length, length, 16, 24, torch.float32), MaskPlan.from_dense(dense), dense)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (4, 1)])
def test_dtypes_and_head_ratios(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    case = make_mask("sliding_window", 100, 90)
    dense = case.dense()
    result, grads = check(*inputs(2, *heads, 100, 90, 16, 8, dtype), MaskPlan.from_dense(dense), dense)
    assert result.out.dtype == grads.dq.dtype == grads.dk.dtype == grads.dv.dtype == dtype
    assert result.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_gradient_through_lse_and_empty_rows() -> None:
    dense = torch.zeros(2, 1, 80, 80, dtype=torch.bool)
    dense[0] = torch.ones(80, 80, dtype=torch.bool).tril()
    dense[0, :, 40:50] = False
    q, k, v, d_out = inputs(2, 2, 2, 80, 80, 16, 16, torch.float32)
    d_lse = torch.randn(2, 2, 80)
    d_lse[1] = math.nan  # the gradient of a row without keys must not matter
    result, grads = check(q, k, v, d_out, MaskPlan.from_dense(dense), dense, d_lse)
    assert (result.out[1] == 0).all() and (result.lse[1] == -math.inf).all()
    assert all((x[1] == 0).all() for x in (grads.dq, grads.dk, grads.dv))


def test_results_follow_the_inputs_stride_order() -> None:
    q, k, v, d_out = inputs(2, 4, 2, 40, 50, 16, 16, torch.float32)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    v = v.expand(2, 2, 50, 16)[:, :, ::1]
    dense = torch.ones(1, 1, 40, 50, dtype=torch.bool)
    result, grads = check(q, k, v, d_out, MaskPlan.from_dense(dense), dense)
    assert result.out.stride() == q.stride()
    assert grads.dq.stride() == q.stride() and grads.dk.stride() == k.stride()


def test_partial_results_are_wide() -> None:
    q, k, v, d_out = inputs(1, 2, 2, 40, 40, 16, 16, torch.bfloat16)
    plan = MaskPlan.from_dense(torch.ones(1, 1, 40, 40, dtype=torch.bool))
    request = AttentionRequest(q, k, v, plan, 0.25, wide_results=True)
    result = KERNEL.forward(request)
    grads = KERNEL.backward(request, result.out, result.lse, d_out, None)
    assert result.out.dtype == grads.dq.dtype == grads.dk.dtype == grads.dv.dtype == torch.float32
    narrow = KERNEL.forward(AttentionRequest(q, k, v, plan, 0.25))
    assert torch.equal(result.out.to(torch.bfloat16), narrow.out)


def test_unattended_keys_may_hold_anything() -> None:
    """NaN and inf in keys and values reach the rows that attend to them and no others."""
    dense = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
    q, k, v, d_out = inputs(1, 1, 1, 70, 70, 16, 16, torch.float32)
    clean = KERNEL.forward(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25))
    for bad in (math.nan, math.inf, -math.inf):
        dirty_k, dirty_v, dirty_d_out = k.clone(), v.clone(), d_out.clone()
        dirty_k[:, :, 45] = dirty_v[:, :, 45] = bad
        dirty_d_out[:, :, 60] = bad
        request = AttentionRequest(q, dirty_k, dirty_v, MaskPlan.from_dense(dense), 0.25)
        result = KERNEL.forward(request)
        assert torch.equal(result.out[:, :, :45], clean.out[:, :, :45])
        assert not result.out[:, :, 45:].isfinite().any(-1).all()
        grads = KERNEL.backward(request, result.out, result.lse, dirty_d_out, None)
        assert grads.dq[:, :, :45].isfinite().all()
        assert grads.dv[:, :, 61:].isfinite().logical_not().any()


def test_no_keys_no_rows_no_batch() -> None:
    for batch, q_len, kv_len in ((1, 5, 0), (1, 0, 5), (0, 5, 5)):
        q, k, v, d_out = inputs(batch, 2, 1, q_len, kv_len, 8, 8, torch.float32)
        plan = MaskPlan.from_dense(torch.ones(1, 1, q_len, kv_len, dtype=torch.bool))
        request = AttentionRequest(q, k, v, plan, 1.0)
        result = KERNEL.forward(request)
        grads = KERNEL.backward(request, result.out, result.lse, d_out, None)
        assert (result.out == 0).all() and (result.lse == -math.inf).all()
        assert [x.shape for x in (grads.dq, grads.dk, grads.dv)] == [q.shape, k.shape, v.shape]
        assert (grads.dq == 0).all() and (grads.dk == 0).all() and (grads.dv == 0).all()


def test_memory_grows_with_tokens() -> None:
    """No tensor of the size of the score matrix is made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    length = 320
    plan = MaskPlan.from_dense(make_mask("causal", length).dense())
    q, k, v, d_out = inputs(1, 1, 1, length, length, 8, 8, torch.float32)
    request = AttentionRequest(q, k, v, plan, 1.0)
    with Watch():
        result = KERNEL.forward(request)
        KERNEL.backward(request, result.out, result.lse, d_out, None)
    assert largest <= 3 * 32 * 65 + length * 16


def test_score_mods_see_the_positions_of_sharded_rows_and_keys() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from inductor_lowering.tile_program import score_program

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + 0.01 * (q - k) * (h + 1) + b

    zero = [torch.zeros(()), *(torch.zeros((), dtype=torch.int32) for _ in range(4))]
    program = score_program(make_fx(score_mod, tracing_mode="fake")(*zero))
    q, k, v, _ = inputs(4, 6, 6, 80, 80, 16, 16, torch.float32)
    full = MaskPlan.from_dense(torch.ones(1, 1, 80, 80, dtype=torch.bool))
    whole = KERNEL.forward(AttentionRequest(q, k, v, full, 0.25, ScoreProgram(None, program)))
    rows, keys = torch.randperm(80)[:50], torch.randperm(80)
    part = MaskPlan.from_dense(torch.ones(1, 1, 50, 80, dtype=torch.bool))
    index_map = IndexMap(2, 3, rows, keys)
    shard = AttentionRequest(
        q[2:, 3:, rows], k[2:, 3:, keys], v[2:, 3:, keys], part, 0.25, ScoreProgram(None, program, index_map=index_map)
    )
    torch.testing.assert_close(KERNEL.forward(shard).out, whole.out[2:, 3:, rows], atol=1e-5, rtol=1e-5)
