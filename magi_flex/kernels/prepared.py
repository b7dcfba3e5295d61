"""Calls like an earlier one, which differ from it in what tensors hold and where these lie: checked, routed and laid
out once.

What is to be done is kept with the plan (``plan_cache.py``) under all that it depends on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_flex.kernels.checks import Layout
from magi_flex.kernels.plan_cache import kept
from magi_flex.kernels.request import AttentionRequest, PreparedBackward, PreparedForward
from magi_flex.kernels.route import facts_of, route
from magi_flex.mask_plan import MaskPlan


def prepared_forward(
    q: Tensor, k: Tensor, v: Tensor, plan: MaskPlan, scale: float, backend: str, needs_backward: bool, max_score: bool
) -> PreparedForward | None:
    """The forward pass of a call without a score mod; None where the backend prepares none."""

    def prepare() -> PreparedForward | None:
        request = AttentionRequest(q, k, v, plan, scale, max_score=max_score)
        return route(facts_of(request, needs_backward), backend).prepare_forward(request)

    settings = (scale, backend, needs_backward, max_score, torch.are_deterministic_algorithms_enabled())
    return kept(plan, ("forward", Layout.of(q, k, v), _misaligned(q, k, v), settings), prepare)


def prepared_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, plan: MaskPlan, scale: float, backend: str
) -> PreparedBackward | None:
    """As :func:`prepared_forward`, where no gradient with respect to ``lse`` is given."""

    def prepare() -> PreparedBackward | None:
        request = AttentionRequest(q, k, v, plan, scale, max_score=False)
        return route(facts_of(request, True), backend).prepare_backward(request, out, lse, d_out)

    others = (out.dtype, out.stride(), d_out.dtype, d_out.stride(), lse.stride())
    settings = (scale, backend, torch.are_deterministic_algorithms_enabled())
    what = ("backward", Layout.of(q, k, v), others, _misaligned(q, k, v, out, d_out), settings)
    return kept(plan, what, prepare)


def _misaligned(*tensors: Tensor) -> tuple[int, ...]:
    """How far each address is from a multiple of 16 bytes: kernels may take copies of tensors where it is."""
    return tuple([x.data_ptr() % 16 for x in tensors])
