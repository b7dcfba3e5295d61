"""Learned sinks against dense attention with one more column."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import magi_flex
from tests.cases.reference import assert_within_factor
from tests.compiling import attend, qkv

HEADS, LENGTH = 4, 37


def causal_but_three(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Row 3 attends to nothing."""
    return (k <= q) & (q != 3)


def dense(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    row, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~((key <= row) & (row != 3)), -torch.inf)
    scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), 3)
    return scores.softmax(3)[..., :-1] @ v, scores.logsumexp(3)


def test_sink_is_one_more_column() -> None:
    inputs = (*qkv(q_len=LENGTH), torch.tensor([0.3, -2.0, 5.0, 0.0], requires_grad=True))
    mask = create_block_mask(causal_but_three, 1, 1, LENGTH, LENGTH, device="cpu")
    d_out, d_lse = torch.randn(2, HEADS, LENGTH, 16), torch.randn(2, HEADS, LENGTH)

    def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = attend(q, k, v, None, mask, return_aux=AuxRequest(lse=True))
        return magi_flex.with_sink(out, aux.lse, sink)

    def run(function: object, leaves: tuple[Tensor, ...]) -> list[Tensor]:
        out, lse = function(*leaves)  # type: ignore[operator]
        loss = (out * d_out).sum() + (lse * d_lse).sum()
        return [out, lse, *torch.autograd.grad(loss, leaves)]

    with magi_flex.enable():
        actual = run(with_sink, inputs)
    exact, same = (
        run(dense, tuple(x.detach().to(dtype).requires_grad_() for x in inputs))
        for dtype in (torch.float64, torch.float32)
    )
    for got, near, right in zip(actual, same, exact, strict=True):
        assert_within_factor(got, near, right, floor=1e-6)
    assert (actual[0][:, :, 3] == 0).all()


def test_sink_is_traced_whole() -> None:
    inputs = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3), torch.randn(2)
    traced = torch.compile(magi_flex.with_sink, backend="eager", fullgraph=True)
    for got, wanted in zip(traced(*inputs), magi_flex.with_sink(*inputs), strict=True):
        assert torch.equal(got, wanted)


def test_no_sink_is_nothing_new() -> None:
    out, lse = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16), torch.randn(1, 2, 3)
    lse[0, 0, 0] = -torch.inf
    out[0, 0, 0] = 0
    sink = torch.full((2,), -torch.inf, requires_grad=True)
    lse.requires_grad_()
    new_out, new_lse = magi_flex.with_sink(out, lse, sink)
    assert torch.equal(new_out, out) and new_out.dtype == torch.bfloat16 and torch.equal(new_lse, lse)
    d_lse, d_sink = torch.autograd.grad(
        new_lse.masked_fill(new_lse == -torch.inf, 0).sum() + new_out.sum(), (lse, sink)
    )
    assert d_lse.isfinite().all() and (d_sink == 0).all()


def test_shapes_are_checked() -> None:
    out, lse = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=r"sink: has shape \[3\]; \[2\] is needed"):
        magi_flex.with_sink(out, lse, torch.zeros(3))
    with pytest.raises(ValueError, match="out, lse: have shapes"):
        magi_flex.with_sink(out, lse[0], torch.zeros(2))
