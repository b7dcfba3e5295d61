"""Attention by labels, interpreted: over results that are to be replaced, and over results that are right."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import label_attention
from magi_flex.kernels.label_attention import LabelledAttention
from magi_flex.kernels.request import AttentionGradients, AttentionOutput, AttentionRequest, ScoreProgram, Softcap
from magi_flex.mask_plan import MaskPlan
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients


def labelled(batch: int, q_len: int, kv_len: int, blocks: bool, generator: torch.Generator) -> LabelledAttention:
    """Labels that return, inside two intervals a row."""
    rest = RowIntervals.from_dense(torch.rand(batch, 1, q_len, kv_len, generator=generator) < 0.9)
    rest = RowIntervals(rest.starts[:, :, :2], rest.ends[:, :, :2], kv_len)
    row_labels, key_labels = (torch.randint(0, 3, (batch, 1, x), generator=generator) for x in (q_len, kv_len))
    states = torch.randint(0, 3, (1, 1, -(-q_len // 16), -(-kv_len // 8)), generator=generator, dtype=torch.int8)
    wanted = torch.ones(1, dtype=torch.int32)
    return LabelledAttention(rest, row_labels, key_labels, states if blocks else None, (16, 8), wanted)


def dense_of(mask: LabelledAttention) -> Tensor:
    dense = mask.rest.to_dense() & (mask.row_labels[..., None] == mask.key_labels[:, :, None])
    if mask.blocks is None:
        return dense
    state = mask.blocks.repeat_interleave(mask.block_size[0], 2).repeat_interleave(mask.block_size[1], 3)
    state = state[:, :, : dense.shape[2], : dense.shape[3]]
    return (state == 2) | ((state == 1) & dense)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "lengths", "dims", "blocks", "cap"),
    [
        (2, 4, 2, (33, 41), (16, 16), True, None),
        (1, 3, 1, (20, 70), (8, 24), False, 3.0),
        (1, 2, 2, (1, 5), (16, 16), True, None),
    ],
)
def test_against_dense(
    batch: int,
    heads: int,
    kv_heads: int,
    lengths: tuple[int, int],
    dims: tuple[int, int],
    blocks: bool,
    cap: float | None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    (q_len, kv_len), (dim, v_dim) = lengths, dims
    mask = labelled(batch, q_len, kv_len, blocks, generator)
    shapes = ((heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim), (heads, q_len, v_dim))
    q, k, v, d_out = (torch.randn(batch, *shape, generator=generator) for shape in shapes)
    d_lse = torch.randn(batch, heads, q_len, generator=generator)
    score = ScoreProgram() if cap is None else ScoreProgram(steps=(Softcap(cap),))
    score_mod = None if cap is None else lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    request = AttentionRequest(q, k, v, MaskPlan(mask.rest), 0.3, score)
    out = torch.full((batch, q_len, heads, v_dim), 7.0).transpose(1, 2)
    result = AttentionOutput(out, *(torch.full((batch, heads, q_len), 7.0) for _ in range(2)))
    grads = AttentionGradients(*(torch.full_like(x, 7.0) for x in (q, k, v)))
    right = dataclasses.replace(mask, wanted=torch.zeros(1, dtype=torch.int32))
    label_attention.forward(request, right, result)
    label_attention.backward(request, right, out, result.lse, d_out, d_lse, grads)
    for x in (result.out, result.lse, result.max_score, grads.dq, grads.dk, grads.dv):
        assert (x == 7.0).all()

    label_attention.forward(request, mask, result)
    label_attention.backward(request, mask, result.out, result.lse, d_out, d_lse, grads)
    near, exact = (
        dense_attention_with_gradients(q, k, v, d_out, d_lse, dense_of(mask), score_mod, (), 0.3, dtype)
        for dtype in (torch.float32, torch.float64)
    )
    for name in ("out", "lse", "max_score"):
        assert_within_factor(getattr(result, name), getattr(near, name), getattr(exact, name), floor=1e-5)
    for name in ("dq", "dk", "dv"):
        assert_within_factor(getattr(grads, name), getattr(near, name), getattr(exact, name), floor=1e-5)
