"""Dense attention reference: float64 by default, with every gradient.

Shape legend: B batch, H query heads, G key/value heads (H = G * group), Q query rows, K keys, D query/key head dim,
E value head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases.score_mods import ScoreMod

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Attention:
    """``out`` [B, H, Q, E]; ``lse`` and ``max_score`` [B, H, Q] in the log2 domain (natural value * log2 e)."""

    out: Tensor
    lse: Tensor
    max_score: Tensor


@dataclass(frozen=True)
class AttentionWithGradients(Attention):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    captures: tuple[Tensor, ...]


def dense_attention(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    mask_BHQK: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Attention:
    """softmax(mod(scale q k^T)) v over the pairs where ``mask`` (broadcast over B and H) is true.

    All arithmetic is in ``dtype``.  A row with no pair, or only scores of -inf, gives 0 / -inf / -inf and zero
    gradients.  Differentiable in q, k, v and whatever ``score_mod`` captures.
    """
    heads, q_len = q_BHQD.shape[1:3]
    group = heads // k_BGKD.shape[1]
    scale = q_BHQD.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(dtype) for x in (q_BHQD, k_BGKD, v_BGKE))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if score_mod is not None:
        batch, _, _, kv_len = scores.shape
        device = scores.device
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=device).view(1, -1, 1, 1)
        rows = torch.arange(q_len, device=device).view(1, 1, -1, 1)
        keys = torch.arange(kv_len, device=device).view(1, 1, 1, -1)
        scores = score_mod(scores, b, h, rows, keys).to(dtype).expand_as(scores)
    if mask_BHQK is not None:
        scores = scores.masked_fill(~mask_BHQK, -math.inf)
    if scores.shape[-1]:
        max_score = scores.detach().amax(-1)
    else:
        max_score = scores.new_full(scores.shape[:-1], -math.inf)
    empty = max_score == -math.inf
    shift = max_score.masked_fill(empty, 0)
    weights = (scores - shift[..., None]).exp()
    total = weights.sum(-1).masked_fill(empty, 1)
    out = weights @ v / total[..., None]
    lse = (shift + total.log()).masked_fill(empty, -math.inf)
    return Attention(out, lse * LOG2_E, max_score * LOG2_E)


def dense_attention_with_gradients(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    d_out_BHQE: Tensor,
    d_lse_BHQ: Tensor | None = None,
    mask_BHQK: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    captures: Sequence[Tensor] = (),
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionWithGradients:
    """:func:`dense_attention` and the gradients of q, k, v and ``captures`` (leaves that ``score_mod`` reads).

    ``d_lse`` is the gradient with respect to the returned (log2 domain) lse; its values on empty rows do not matter.
    A leaf that nothing depends on gets zeros.
    """
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q_BHQD, k_BGKD, v_BGKE)]
    result = dense_attention(*leaves, mask_BHQK, score_mod, scale, dtype)
    loss = (result.out * d_out_BHQE.to(dtype)).sum()
    if d_lse_BHQ is not None:
        seen = result.lse > -math.inf
        loss = loss + (result.lse.masked_fill(~seen, 0) * d_lse_BHQ.to(dtype).masked_fill(~seen, 0)).sum()
    wanted = [*leaves, *captures]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return AttentionWithGradients(
        result.out.detach(), result.lse.detach(), result.max_score, *grads[:3], captures=tuple(grads[3:])
    )


def assert_within_factor(
    actual: Tensor, same_precision: Tensor, reference: Tensor, factor: float = 2.0, floor: float = 1e-7
) -> None:
    """``actual`` is at most ``factor`` times as far from ``reference`` as ``same_precision`` is (largest errors).

    ``same_precision`` is the dense result at the precision of ``actual``; ``floor`` (relative to the largest
    reference value) keeps accidents of a near exact dense result out.  Infinities must agree exactly.
    """
    actual, same_precision, reference = (x.detach().to(torch.float64) for x in (actual, same_precision, reference))
    finite = reference.isfinite()
    if not torch.equal(actual[~finite], reference[~finite]):
        raise AssertionError("infinite entries differ")
    if not actual.isfinite()[finite].all():
        raise AssertionError("non-finite values where the reference is finite")
    if not finite.any():
        return
    error = (actual - reference)[finite].abs().max().item()
    allowed = factor * (same_precision - reference)[finite].abs().max().item()
    allowed += floor * max(1.0, reference[finite].abs().max().item())
    if error > allowed:
        raise AssertionError(f"largest error {error:.3e} is above the allowed {allowed:.3e}")
