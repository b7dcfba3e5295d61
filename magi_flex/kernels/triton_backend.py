"""Backend ``triton``: our own Triton kernels, for every GPU that Triton compiles for and every mask and score mod.

This file imports no Triton, which may be missing; the kernels are imported when one is launched.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from magi_flex.kernels.layout import empty_in_order, fill_order
from magi_flex.kernels.request import (
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Backend,
    RequestFacts,
    ScoreProgram,
)
from magi_flex.kernels.score_split import leading_factors
from magi_flex.kernels.triton_configs import (
    DIRECTIONS,
    HOPPER_HEAD_DIM,
    LARGEST_HEAD_DIM,
    Tiles,
    fits,
    for_score_mod,
    padded,
    tiles_for,
)
from magi_flex.kernels.triton_score import SUPPORTED, backward_score, forward_score

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_CAPABILITY = (8, 0)
_GLUON_RELEASES = ("3.6.",)


class TritonBackend(Backend):
    """Forward and backward; see :meth:`objections` for what it leaves to others."""

    name = "triton"
    never_waits = True

    def missing(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton, which comes with CUDA builds of torch"
        if device.type != "cuda" or torch.version.hip is not None:
            kind = "an AMD GPU" if torch.version.hip is not None else device.type
            return f"needs an NVIDIA GPU, not {kind}"
        if not torch.cuda.is_available():
            return "torch sees no GPU"
        return _missing_on(device.index if device.index is not None else torch.cuda.current_device())

    def objections(self, facts: RequestFacts) -> list[str]:
        found = []
        if facts.dtype not in DTYPES:
            found.append(f"serves float32, bfloat16 and float16, not {str(facts.dtype).removeprefix('torch.')}")
        if facts.mixed_dtypes:
            found.append("q, k and v must have one dtype")
        if not 1 <= min(facts.head_dim, facts.v_head_dim) <= max(facts.head_dim, facts.v_head_dim) <= LARGEST_HEAD_DIM:
            found.append(f"serves head dims from 1 to {LARGEST_HEAD_DIM}, not {facts.head_dim} and {facts.v_head_dim}")
        elif not fits(
            DIRECTIONS if facts.needs_backward else DIRECTIONS[:1],
            padded(facts.head_dim, facts.dtype.itemsize),
            padded(facts.v_head_dim, facts.dtype.itemsize),
            facts.dtype.itemsize,
            facts.device,
        ):
            found.append(
                f"this GPU has too little shared memory for head dims {facts.head_dim} and {facts.v_head_dim} in "
                f"{str(facts.dtype).removeprefix('torch.')}"
            )
        unknown = sorted(facts.score_ops - SUPPORTED)
        if unknown:
            found.append(f"cannot generate code for {', '.join(unknown)} in a score mod")
        if facts.score_grads and facts.needs_backward and facts.deterministic:
            found.append("sums the gradients of what a score mod captures in no fixed order")
        return found

    def reservations(self, facts: RequestFacts) -> list[str]:
        major, minor = torch.cuda.get_device_capability(facts.device)
        return [] if major == 9 else [f"its code for compute capability {major}.{minor}"]

    def behind_stock(self, facts: RequestFacts) -> str | None:
        timed = facts.dtype.itemsize == 2 and max(facts.head_dim, facts.v_head_dim) <= HOPPER_HEAD_DIM
        if timed and facts.score_steps is not None and _hopper_launch(facts.device) is not None:
            return None
        return "only its Hopper kernels have been timed beside PyTorch's"

    def forward(self, request: AttentionRequest) -> AttentionOutput:
        from magi_flex.kernels import triton_launch

        q, k, v = request.q, request.k, request.v
        if q.shape[:3].numel() == 0 or k.shape[2] == 0:
            dtype = torch.float32 if request.wide_results else q.dtype
            out = empty_in_order(q, (*q.shape[:3], v.shape[3]), fill_order(q), dtype).zero_()
            lse = torch.full(q.shape[:3], -math.inf, device=q.device)
            return AttentionOutput(out, lse, lse.clone())
        score, scale = _folded(request)
        kernel_score = forward_score(score, q.device)
        hopper = _hopper_launch(q.device)
        if hopper is not None and hopper.serves(request):
            return hopper.forward(request, kernel_score, scale)
        return triton_launch.forward(request, kernel_score, scale, _tiles("forward", q, v, score))

    def backward(
        self, request: AttentionRequest, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> AttentionGradients:
        from magi_flex.kernels import triton_launch

        q, k, v = request.q, request.k, request.v
        score, scale = _folded(request)
        kernel_score = backward_score(score, q.device)
        if q.shape[:3].numel() == 0 or k.shape[2] == 0:
            dtypes = (torch.float32 if request.wide_results else x.dtype for x in (q, k, v))
            dq, dk, dv = (
                empty_in_order(x, x.shape, fill_order(x), dtype).zero_()
                for x, dtype in zip((q, k, v), dtypes, strict=True)
            )
            return AttentionGradients(dq, dk, dv, kernel_score.finish())
        lse, delta = triton_launch.row_statistics(out, d_out, lse, d_lse)
        d_out = d_out.to(q.dtype)
        hopper = _hopper_launch(q.device)
        if hopper is not None and hopper.serves(request, d_out):
            dk, dv = hopper.backward_kv(request, kernel_score, scale, d_out, lse, delta)
            dq = hopper.backward_q(request, kernel_score, scale, d_out, lse, delta)
            return AttentionGradients(dq, dk, dv, kernel_score.finish())
        kv_tiles, q_tiles = (_tiles(direction, q, v, score) for direction in ("kv", "q"))
        dk, dv = triton_launch.backward_kv(request, kernel_score, scale, d_out, lse, delta, kv_tiles)
        dq = triton_launch.backward_q(request, kernel_score, scale, d_out, lse, delta, q_tiles)
        return AttentionGradients(dq, dk, dv, kernel_score.finish())


def _tiles(direction: str, q: Tensor, v: Tensor, score: ScoreProgram) -> Tiles:
    head_dim, v_dim = (padded(x.shape[3], x.dtype.itemsize) for x in (q, v))
    tiles = tiles_for(direction, q.dtype, head_dim, v_dim, q.device)
    return tiles if score.is_identity else for_score_mod(direction, tiles, score.steps is None)


def _folded(request: AttentionRequest) -> tuple[ScoreProgram, float]:
    """The score program without the factors that it begins with, and the scale with them."""
    if request.score.steps is None:
        return request.score, request.scale
    scale, steps = leading_factors(request.scale, request.score.steps)
    return replace(request.score, steps=steps), scale


@functools.cache
def _hopper_launch(device: torch.device) -> ModuleType | None:
    """The module that launches the Hopper kernels, where they run.

    They are written in Gluon, an experimental part of Triton that changes between releases: others than those that they
    ran with take the plain kernels.
    """
    import triton

    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    if not triton.__version__.startswith(_GLUON_RELEASES):
        return None
    return importlib.import_module("magi_flex.kernels.hopper_launch")


@functools.cache
def _missing_on(device_index: int) -> str | None:
    capability = torch.cuda.get_device_capability(device_index)
    if capability < _LEAST_CAPABILITY:
        return f"needs compute capability 8.0 or newer, this GPU has {capability[0]}.{capability[1]}"
    return None
