"""What the tests of compiled and eager calls share: inputs, one compiled function, comparison with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.cases.reference import assert_within_factor, dense_attention_with_gradients


def attend(q: Tensor, k: Tensor, v: Tensor, score_mod: Any = None, block_mask: Any = None, **options: Any) -> Any:
    return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True, **options)


def qkv(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 129,
    kv_len: int | None = None,
    dim: int = 16,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    grad: bool = True,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kv_len = q_len if kv_len is None else kv_len
    shapes = ((batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim or dim))
    q, k, v = (torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes)
    return q, k, v


def check_training(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    dense: Tensor | None,
    block_mask: Any = None,
    score_mod: Any = None,
    reference_mod: Any = None,
    captures: Sequence[Tensor] = (),
    reference_captures: Sequence[Tensor] = (),
    floor: float = 1e-6,
    near_mod: Any = None,
) -> Tensor:
    """Output and all gradients of ``function`` are as near to float64 as dense attention of the same precision.

    ``reference_mod`` is ``score_mod`` on ``reference_captures`` (float64 leaves); ``near_mod`` is ``score_mod`` where
    that cannot be called on tensors that broadcast.
    """
    q, k, v = inputs
    out = function(q, k, v, score_mod, block_mask)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad(out, (q, k, v, *captures), d_out)
    if reference_mod is None:
        reference_mod, reference_captures = score_mod, captures
    exact = dense_attention_with_gradients(
        q, k, v, d_out, None, dense, reference_mod, reference_captures, dtype=torch.float64
    )
    near_mod = near_mod or score_mod
    same = dense_attention_with_gradients(q, k, v, d_out, None, dense, near_mod, captures, dtype=q.dtype)
    assert_within_factor(out, same.out, exact.out, floor=floor)
    for actual, near, right in zip(
        grads, (same.dq, same.dk, same.dv, *same.captures), (exact.dq, exact.dk, exact.dv, *exact.captures), strict=True
    ):
        assert actual.shape == right.shape
        assert_within_factor(actual, near, right, floor=floor)
    return out
