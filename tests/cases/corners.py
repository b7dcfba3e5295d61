"""The corners of the routing table, as calls that any backend may be asked for.

for name in CORNERS: check_corner(name, backend, "cpu")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import magi_flex
from tests.cases.masks import make_mask
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients
from tests.compiling import attend

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Corner(NamedTuple):
    """A call: dims of query/key and value, lengths, heads, the mask's name, how the score mod is made."""

    dtype: torch.dtype
    dims: tuple[int, int] = (64, 64)
    lengths: tuple[int, int] = (257, 257)
    heads: tuple[int, int] = (4, 2)
    mask: str = "document_causal"
    score_mod: str = "none"


CORNERS = {
    "plain": Corner(BRAIN),
    "half": Corner(HALF, mask="sliding_window"),
    "single": Corner(SINGLE, mask="causal"),
    "double": Corner(DOUBLE, dims=(16, 16), lengths=(127, 127)),
    "five tokens": Corner(BRAIN, lengths=(5, 5), heads=(9, 3), mask="causal"),
    "one token": Corner(BRAIN, lengths=(1, 1), mask="full"),
    "decoding": Corner(BRAIN, lengths=(1, 1025), mask="lower_right_causal"),
    "two dims": Corner(BRAIN, dims=(192, 128)),
    "wide": Corner(BRAIN, dims=(256, 256), mask="causal"),
    "dim of no power": Corner(BRAIN, dims=(72, 72), mask="causal"),
    "dim of no tile": Corner(BRAIN, dims=(20, 20), mask="causal"),
    "bit tiles": Corner(BRAIN, mask="dense_table"),
    "softcap": Corner(BRAIN, score_mod="softcap"),
    "alibi": Corner(BRAIN, score_mod="alibi"),
    "general": Corner(BRAIN, score_mod="general"),
    "learned": Corner(BRAIN, score_mod="learned"),
    "lengths apart": Corner(BRAIN, lengths=(129, 1025), mask="sink_and_window"),
    "key padding": Corner(BRAIN, mask="key_padding"),
    "no pairs": Corner(BRAIN, mask="nothing"),
}


def score_mod_of(kind: str, dtype: torch.dtype, device: str) -> tuple[Callable[..., Tensor] | None, list[Tensor]]:
    """The mod (index tensors that broadcast will do), and the leaves it captures."""
    if kind == "learned":
        bias = torch.linspace(-1, 1, 4, device=device).to(dtype).requires_grad_()
        return (lambda s, b, h, q, k: s + bias[h]), [bias]
    mods: dict[str, Callable[..., Tensor] | None] = {
        "none": None,
        "softcap": lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
        "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-2.0 * (h + 1)),
        "general": lambda s, b, h, q, k: s * torch.sigmoid(s) + torch.cos(0.1 * (q - k)),
    }
    return mods[kind], []


def run_corner(
    corner: Corner, backend: str, device: str, function: Callable[..., Tensor] = attend
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Output, then gradients: of the backend, of dense attention in the same precision, of dense float64."""
    generator = torch.Generator(device).manual_seed(0)
    (heads, kv_heads), (q_len, kv_len), (dim, v_dim) = corner.heads, corner.lengths, corner.dims
    with torch.device("cpu"):
        case = make_mask(corner.mask, q_len, kv_len)
        dense = case.dense()
    shapes = (
        (case.batch, heads, q_len, dim),
        (case.batch, kv_heads, kv_len, dim),
        (case.batch, kv_heads, kv_len, v_dim),
        (case.batch, heads, q_len, v_dim),
    )
    q, k, v, d_out = (torch.randn(s, generator=generator).to(corner.dtype) for s in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    table = dense.to(device)
    mask = magi_flex.create_block_mask(
        lambda b, h, i, j: table[b if case.batch > 1 else 0, h if case.heads > 1 else 0, i, j],
        case.batch if case.batch > 1 else None,
        case.heads if case.heads > 1 else None,
        q_len,
        kv_len,
        device,
    )
    mod, captures = score_mod_of(corner.score_mod, corner.dtype, device)
    out = function(q, k, v, mod, mask, kernel_options={"magi_backend": backend})
    got = [out, *torch.autograd.grad(out, [*leaves, *captures], d_out)]
    references = []
    for dtype in (corner.dtype, DOUBLE):
        exact_mod, exact_captures = score_mod_of(corner.score_mod, dtype, device)
        dense_result = dense_attention_with_gradients(
            q, k, v, d_out, None, table, exact_mod, exact_captures, dtype=dtype
        )
        parts = (dense_result.out, dense_result.dq, dense_result.dk, dense_result.dv, *dense_result.captures)
        references.append(list(parts))
    return got, *references


def check_corner(name: str, backend: str, device: str, function: Callable[..., Tensor] = attend) -> None:
    """Right, or refused with the reason; ``auto`` and ``tiled`` always serve it."""
    corner = CORNERS[name]
    try:
        got, near, exact = run_corner(corner, backend, device, function)
    except ValueError as error:
        if backend in ("auto", "tiled"):
            raise
        assert "was asked for but cannot serve this call" in str(error)
        pytest.skip(str(error))
    floor = {DOUBLE: 1e-12, SINGLE: 1e-5}.get(corner.dtype, 4e-3)
    for actual, same, right in zip(got, near, exact, strict=True):
        assert_within_factor(actual, same, right, floor=floor)
