"""Joining attention over disjoint sets of keys by log-sum-exp (base 2), as in Flash-Decoding and ring attention."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_lse(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of both; out ``[..., E]``, lse ``[...]``.  Differentiable.

    ``lse = log2(2^lse_a + 2^lse_b)``, ``out = 2^(lse_a - lse) out_a + 2^(lse_b - lse) out_b``; no key at all (both
    -inf) gives 0 and -inf.
    """
    empty = torch.maximum(lse_a, lse_b) == -torch.inf
    # exp2 of differences, never inf - inf: an empty side has weight 0
    lse = torch.logaddexp2(lse_a.masked_fill(empty, 0), lse_b.masked_fill(empty, 0))
    weight_a = torch.exp2(lse_a - lse).masked_fill(empty, 0)
    weight_b = torch.exp2(lse_b - lse).masked_fill(empty, 0)
    out = weight_a[..., None] * out_a + weight_b[..., None] * out_b
    return out, lse.masked_fill(empty, -torch.inf)


def merge_lse_(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """:func:`merge_lse` into ``out`` and ``lse`` in place."""
    merged_out, merged_lse = merge_lse(out, lse, out_b, lse_b)
    out.copy_(merged_out)
    lse.copy_(merged_lse)
