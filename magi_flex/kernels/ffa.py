"""Backend ``ffa``: our own Hopper (sm_90a) kernels, driven by ragged tile plans.

Shape legend: B batch, H query heads, G key/value heads (H = G * group), Q query rows, K keys, D query/key head dim,
E value head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.kernels.cuda_build import has_compiler
from magi_flex.kernels.cuda_driver import is_tma_ready, multiprocessors, on_device
from magi_flex.kernels.ffa_backward import BackwardInstance, BackwardLaunch, GradientQ, TwoKernels
from magi_flex.kernels.ffa_backward_schedule import BackwardSchedule
from magi_flex.kernels.ffa_forward import ForwardInstance, ForwardLaunch
from magi_flex.kernels.ffa_generated_score import SUPPORTED
from magi_flex.kernels.ffa_gradient_q import GradientQInstance
from magi_flex.kernels.ffa_plans import (
    backward_schedule,
    contiguous_bit_tiles,
    contiguous_intervals,
    forward_schedule,
    has_few_keys,
)
from magi_flex.kernels.ffa_score import GeneratedCode, KernelScore
from magi_flex.kernels.ffa_score_choice import scale_and_score
from magi_flex.kernels.ffa_split import LaunchInParts, key_parts, split_plan
from magi_flex.kernels.layout import empty_like_filled
from magi_flex.kernels.plan_cache import kept
from magi_flex.kernels.request import (
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Backend,
    Bias,
    Distance,
    PreparedBackward,
    PreparedForward,
    RequestFacts,
)
from magi_flex.kernels.tile_plans import has_room


class Tiles(NamedTuple):
    """Sizes of a variant, see ForwardInstance."""

    kv_tile: int
    narrow_tile: int
    consumers: int
    k_stages: int
    v_stages: int
    stage_out: bool


# (head_dim, v_dim) -> what was fastest of what fits into 227 KB of shared memory and the registers (docs/ffa.md).
_TWO_WARPGROUPS = {
    (64, 64): Tiles(128, 64, 2, 3, 3, True),
    (96, 96): Tiles(128, 64, 2, 2, 3, True),
    (128, 128): Tiles(128, 64, 2, 2, 3, True),
    (192, 128): Tiles(112, 64, 2, 2, 3, False),
    (192, 192): Tiles(112, 64, 2, 2, 2, False),
    (256, 256): Tiles(64, 0, 2, 2, 3, False),
}
_THREE_WARPGROUPS = {
    (64, 64): Tiles(128, 0, 3, 3, 3, True),
    (96, 96): Tiles(96, 0, 3, 3, 3, True),
    (128, 128): Tiles(80, 32, 3, 3, 3, True),
    (192, 128): Tiles(64, 0, 3, 2, 3, True),
}
HEAD_DIMS = tuple(_TWO_WARPGROUPS)
# The backward's own: (query rows of a step, keys of a tile, dq is summed beside dk and dv).
_BACKWARD = {
    (64, 64): (64, 128, True),
    (128, 128): (64, 128, True),
    (192, 128): (32, 128, True),
    (192, 192): (64, 64, False),
    (256, 256): (64, 64, False),
}
# Query rows of a step without a score mod, which leaves registers for longer ones.
_LONG_STEPS = {(64, 64): 128, (128, 128): 80, (192, 128): 48}
# Keys that a row attends to on average, below which a kernel of its own for dq is faster than sums (docs/ffa.md).
_FEW_KEYS = {(64, 64): 704, (128, 128): 832, (192, 128): 832}
# Items (a key tile, all heads of a group) that these take for each multiprocessor.
_LEAST_ITEMS = 0.9
# Of the gradient_q kernel: (keys of a tile, buffers of Q and dO, of K, of V).
_GRADIENT_Q = {
    (64, 64): (128, 2, 3, 2),
    (128, 128): (64, 2, 3, 3),
    (192, 128): (64, 1, 3, 3),
    (192, 192): (64, 1, 2, 2),
    (256, 256): (64, 1, 2, 1),
}
# Three warpgroups are at least this much faster where there are rows enough for all multiprocessors.
_GAIN_OF_THREE = 1.14
_MAX_PACK = 8


class FfaBackend(Backend):
    """Forward and backward on Hopper; see :meth:`objections` for what it leaves to others."""

    name = "ffa"
    never_waits = True

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"needs a CUDA device, not {device.type}"
        return _missing_on(device.index if device.index is not None else torch.cuda.current_device())

    def objections(self, facts: RequestFacts) -> list[str]:
        found = []
        if facts.dtype not in (torch.bfloat16, torch.float16):
            found.append(f"serves bfloat16 and float16, not {facts.dtype}")
        if facts.mixed_dtypes:
            found.append("q, k and v must have one dtype")
        if compiled_head_dims(facts.head_dim, facts.v_head_dim) is None:
            found.append(
                f"serves head dims up to 256 that are multiples of 8, not {facts.head_dim} and {facts.v_head_dim}"
            )
        unknown = sorted(facts.score_ops - SUPPORTED)
        if unknown:
            found.append(f"cannot generate code for {', '.join(unknown)} in a score mod")
        if facts.index_map and any(step in (Distance, Bias) for step in facts.score_steps or ()):
            found.append("positions that the steps of a score mod see must be the local ones")
        if facts.needs_backward and not facts.linear_gradient:
            found.append("the gradient of the score mod is not a multiple of the gradient that it gets")
        if facts.score_grads and facts.needs_backward and facts.deterministic:
            found.append("sums the gradients of what a score mod captures in no fixed order")
        return found

    def forward(self, request: AttentionRequest) -> AttentionOutput:
        result = _new_results(request.q, *_out_like(request))
        if result.out.numel() == 0 or request.k.shape[2] == 0:
            return AttentionOutput(result.out.zero_(), result.lse.fill_(-math.inf), result.max_score.fill_(-math.inf))
        self._forward(request, result, accumulate=False)
        return result

    def prepare_forward(self, request: AttentionRequest) -> PreparedForward | None:
        shape, dtype = _out_like(request)
        if 0 in shape or request.k.shape[2] == 0:
            return None
        scale, device = request.scale, request.q.device
        with on_device(device):
            launch = self._forward_launch(request, _new_results(request.q, shape, dtype), scale, None, accumulate=False)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
            result = _new_results(q, shape, dtype)
            with on_device(device):
                launch(q, k, v, result, scale, None)
            return result

        return forward

    def forward_into(self, request: AttentionRequest, result: AttentionOutput) -> None:
        in_kernel = is_tma_ready(result.out) and result.lse.is_contiguous() and result.max_score.is_contiguous()
        if in_kernel and result.out.numel() and request.k.shape[2]:
            self._forward(request, result, accumulate=False)
        else:
            super().forward_into(request, result)

    def accumulate(self, request: AttentionRequest, earlier: AttentionOutput) -> AttentionOutput:
        parts = (earlier.lse, earlier.max_score)
        in_kernel = is_tma_ready(earlier.out) and all(x.is_contiguous() for x in parts)
        if not in_kernel or earlier.out.dtype != torch.float32:
            return super().accumulate(request, earlier)
        if earlier.out.numel() and request.k.shape[2]:
            self._forward(request, earlier, accumulate=True)
        return earlier

    def _forward(self, request: AttentionRequest, result: AttentionOutput, accumulate: bool) -> None:
        q, k, v = request.q, request.k, request.v
        pack = packed_heads(q.shape[1] // k.shape[1], request.plan.starts.shape[1])
        scale, score = scale_and_score(request, backward=False, pack=pack)
        with on_device(q.device):
            self._forward_launch(request, result, scale, score, accumulate)(q, k, v, result, scale, score)

    def _forward_launch(
        self,
        request: AttentionRequest,
        result: AttentionOutput,
        scale: float,
        score: KernelScore | None,
        accumulate: bool,
    ) -> _KeptLaunch:
        what = (
            "ffa forward launch",
            request.launch_key,
            scale,
            None if score is None else (score.kinds, score.generated),
            result.out.dtype,
            result.out.stride(),
            accumulate,
        )
        return kept(request.plan, what, lambda: _forward_launch(request, result, scale, score, accumulate))

    def backward(
        self,
        request: AttentionRequest,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
    ) -> AttentionGradients:
        dtype = torch.float32 if request.wide_results else request.q.dtype
        dq = empty_like_filled(request.q, request.q.shape, dtype)
        return self._backward(request, out, lse, d_out, d_lse, dq)

    def backward_into(
        self, request: AttentionRequest, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, dq: Tensor
    ) -> AttentionGradients:
        if dq.dtype not in (request.q.dtype, torch.float32) or not is_tma_ready(dq):
            return super().backward_into(request, out, lse, d_out, d_lse, dq)
        return self._backward(request, out, lse, d_out, d_lse, dq)

    def prepare_backward(
        self, request: AttentionRequest, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> PreparedBackward | None:
        q, k, v = request.q, request.k, request.v
        is_ready = d_out.dtype == q.dtype and lse.is_contiguous() and all(map(is_tma_ready, (q, k, v, out, d_out)))
        if not is_ready or d_out.numel() == 0 or k.shape[2] == 0:
            return None
        given = (q, k, v, out, d_out, *(empty_like_filled(x, x.shape, x.dtype) for x in (q, k, v)))
        device = q.device
        with on_device(device):
            launch = self._backward_launch(request, given, request.scale, None)

        def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor) -> AttentionGradients:
            dq, dk, dv = [empty_like_filled(x, x.shape, x.dtype) for x in (q, k, v)]
            with on_device(device):
                launch(q, k, v, out, lse, d_out, None, dq, dk, dv)
            return AttentionGradients(dq, dk, dv)

        return backward

    def _backward(
        self, request: AttentionRequest, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, dq: Tensor
    ) -> AttentionGradients:
        q, k, v = request.q, request.k, request.v
        dk, dv = (empty_like_filled(x, x.shape, torch.float32 if request.wide_results else x.dtype) for x in (k, v))
        scale, score = scale_and_score(request, backward=True, pack=1)
        gradients = (
            score.gradients
            if score and any(request.score.needs_grad)
            else lambda: (None,) * len(request.score.captures)
        )
        if d_out.numel() == 0 or k.shape[2] == 0:
            for x in (dq, dk, dv):
                x.zero_()
            return AttentionGradients(dq, dk, dv, gradients())
        q, k, v, out, d_out = (tma_ready(x) for x in (q, k, v, out, d_out.to(q.dtype)))
        with on_device(q.device):
            launch = self._backward_launch(request, (q, k, v, out, d_out, dq, dk, dv), scale, score)
            d_lse = None if d_lse is None else d_lse.float().contiguous()
            launch(q, k, v, out, lse.contiguous(), d_out, d_lse, dq, dk, dv, score)
            return AttentionGradients(dq, dk, dv, gradients())

    def _backward_launch(
        self, request: AttentionRequest, given: Sequence[Tensor], scale: float, score: KernelScore | None
    ) -> BackwardLaunch:
        """``given``: q, k, v, out, d_out, dq, dk, dv as the kernels take them."""
        fixed_order = request.deterministic or torch.are_deterministic_algorithms_enabled()
        what = (
            "ffa backward launch",
            request.launch_key,
            request.wide_results,
            scale,
            None if score is None else (score.kinds, score.generated),
            fixed_order,
            *((x.dtype, x.stride()) for x in given[3:6]),
        )
        return kept(request.plan, what, lambda: _backward_launch(request, given, scale, score, fixed_order))


class _KeptLaunch(NamedTuple):
    """Of forward calls that differ in what tensors hold alone; ``copies``: the kernel reads copies of q, k or v."""

    launch: ForwardLaunch | LaunchInParts
    copies: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, result: AttentionOutput, scale: float, score: KernelScore | None
    ) -> None:
        if self.copies:
            q, k, v, _ = _ready(q, k, v, scale, score)
        self.launch(q, k, v, result.out, result.lse, result.max_score, score)


def _out_like(request: AttentionRequest) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of ``out``."""
    q = request.q
    return torch.Size((*q.shape[:3], request.v.shape[3])), torch.float32 if request.wide_results else q.dtype


def _new_results(q: Tensor, shape: torch.Size, dtype: torch.dtype) -> AttentionOutput:
    lse = q.new_empty(shape[:3], dtype=torch.float32)
    return AttentionOutput(empty_like_filled(q, shape, dtype), lse, torch.empty_like(lse))


def _ready(
    q: Tensor, k: Tensor, v: Tensor, scale: float, score: KernelScore | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v and the scale as the kernel takes them."""
    if score is None:
        q, scale = positive_scale(q, scale)
    return tma_ready(q), tma_ready(k), tma_ready(v), scale


def _forward_launch(
    request: AttentionRequest, result: AttentionOutput, scale: float, score: KernelScore | None, accumulate: bool
) -> _KeptLaunch:
    """``scale`` and ``score`` as :func:`scale_and_score` gives them."""
    plan = request.plan
    q, k, v, scale = _ready(request.q, request.k, request.v, scale, score)
    copies = not all(x is y for x, y in zip((q, k, v), (request.q, request.k, request.v), strict=True))
    batch, heads, q_len, _ = q.shape
    processors = multiprocessors(q.device)
    instance = forward_instance(
        q.dtype,
        q.shape[3],
        v.shape[3],
        heads // k.shape[1],
        plan.starts.shape[1],
        result.out.dtype == torch.float32,
        score.kinds if score else (),
        batch * heads * q_len,
        processors,
        accumulate,
        score.generated if score else None,
        plan.bit_tiles is not None,
        has_room(plan),
    )
    if score is None and not accumulate and plan.bit_tiles is None:
        tiles = batch * (heads // instance.pack) * -(-q_len // instance.q_tile)
        parts = key_parts(tiles, k.shape[2], processors)
        if parts > 1:
            instance = replace(instance, narrow_tile=0, stage_out=False, wide_out=True, split_keys=True)
            plan = split_plan(plan, parts, batch)
            schedule = forward_schedule(plan, instance)
            margin = request.sm_margin
            return _KeptLaunch(LaunchInParts(parts, instance, q, k, v, plan.intervals, schedule, scale, margin), copies)
    launch = ForwardLaunch(
        instance,
        q,
        k,
        v,
        result.out,
        contiguous_intervals(plan),
        forward_schedule(plan, instance),
        scale,
        score,
        request.sm_margin,
        contiguous_bit_tiles(plan),
    )
    return _KeptLaunch(launch, copies)


class _BackwardKernels(NamedTuple):
    """What a :class:`BackwardLaunch` takes beside tensors."""

    instance: BackwardInstance
    schedule: BackwardSchedule
    gradient_q: GradientQ | None
    two_kernels: TwoKernels | None = None


def _backward_launch(
    request: AttentionRequest, given: Sequence[Tensor], scale: float, score: KernelScore | None, fixed_order: bool
) -> BackwardLaunch:
    """``given``: the tensors as the kernels take them; ``scale``, ``score`` as :func:`scale_and_score` gives them."""
    q, k, v, out, d_out, dq, dk, dv = given
    kernels = _backward_kernels(request, dq, out, fixed_order, score)
    return BackwardLaunch(
        kernels.instance,
        *(q, k, v, out, d_out, dq, dk, dv),
        contiguous_intervals(request.plan),
        kernels.schedule,
        scale,
        score,
        kernels.gradient_q,
        request.sm_margin,
        contiguous_bit_tiles(request.plan),
        kernels.two_kernels,
    )


def _backward_kernels(
    request: AttentionRequest, dq: Tensor, out: Tensor, fixed_order: bool, score: KernelScore | None
) -> _BackwardKernels:
    """``fixed_order``: of all sums."""
    q, k, v, plan = request.q, request.k, request.v, request.plan

    def instance_of(fixed_order: bool) -> BackwardInstance:
        return backward_instance(
            q.dtype,
            q.shape[3],
            v.shape[3],
            request.wide_results,
            dq.dtype == torch.float32,
            out.dtype == torch.float32,
            fixed_order,
            score.kinds if score else (),
            score.generated if score else None,
            plan.bit_tiles is not None,
            packed_heads(q.shape[1] // k.shape[1], plan.starts.shape[1]),
        )

    def kernels(instance: BackwardInstance, fixed_order: bool) -> _BackwardKernels:
        gradient_q = None
        if not instance.sum_dq:
            of_q = gradient_q_instance(instance, has_room(plan))
            gradient_q = GradientQ(of_q, forward_schedule(plan, of_q))
        schedule = backward_schedule(request, instance, split=not fixed_order)
        return _BackwardKernels(replace(instance, counted=schedule.count is not None), schedule, gradient_q)

    instance = instance_of(fixed_order)
    few: bool | Tensor = False
    items = -(-k.shape[2] // instance.keys) * k.shape[0] * k.shape[1]
    enough = items >= _LEAST_ITEMS * multiprocessors(q.device)
    if instance.sum_dq and score is None and plan.bit_tiles is None and enough:
        few = has_few_keys(plan, _FEW_KEYS[instance.head_dim, instance.v_dim])
    if few is True:
        return kernels(instance_of(True), True)
    chosen = kernels(instance, fixed_order)
    if isinstance(few, Tensor):
        other = kernels(instance_of(True), True)
        assert other.gradient_q is not None
        chosen = chosen._replace(two_kernels=TwoKernels(other.instance, other.schedule, other.gradient_q, few))
    return chosen


@functools.cache
def _missing_on(device_index: int) -> str | None:
    capability = torch.cuda.get_device_capability(device_index)
    if capability != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0), this one has {capability[0]}.{capability[1]}"
    if not has_compiler():
        return "needs NVRTC (package nvidia-cuda-nvrtc) or nvcc to compile its kernels at first use"
    return None


def compiled_head_dims(head_dim: int, v_dim: int) -> tuple[int, int] | None:
    """The least compiled pair that holds these head dims, or None where there is none."""
    if head_dim % 8 or v_dim % 8:
        return None
    return next((pair for pair in HEAD_DIMS if head_dim <= pair[0] and v_dim <= pair[1]), None)


@functools.lru_cache(maxsize=1024)
def forward_instance(
    dtype: torch.dtype,
    head_dim: int,
    v_dim: int,
    group: int,
    mask_heads: int,
    wide_out: bool = False,
    score_steps: tuple[str, ...] = (),
    rows: int | None = None,
    multiprocessors: int = 132,
    accumulate: bool = False,
    generated: GeneratedCode | None = None,
    bit_tiles: bool = False,
    counted: bool = False,
) -> ForwardInstance:
    """The variant for these head dims.  Query heads of a group share row tiles where they share the mask.

    Args:
        rows: query rows over all heads and batch entries, for the last wave of row tiles; None: very many.
    """
    pair = compiled_head_dims(head_dim, v_dim)
    assert pair is not None, "objections() turns other head dims away"
    two = _TWO_WARPGROUPS[pair]
    three = _THREE_WARPGROUPS.get(pair, two)
    if score_steps or generated or bit_tiles:
        three = two  # three warpgroups have too few registers for them
    elif rows is not None:
        busy_two, busy_three = (_busy(rows / (64 * tiles.consumers * multiprocessors)) for tiles in (two, three))
        if busy_two > _GAIN_OF_THREE * busy_three:
            three = two
    *sizes, stage_out = three
    pack = packed_heads(group, mask_heads)
    return ForwardInstance(
        *(dtype, *pair, *sizes, pack, stage_out and not wide_out, wide_out, accumulate),
        score_steps=score_steps,
        generated=generated,
        bit_tiles=bit_tiles,
        counted=counted,
    )


def _busy(row_tiles: float) -> float:
    """Share of the multiprocessors' time that so many equal row tiles a multiprocessor keep busy."""
    return row_tiles / math.ceil(row_tiles)


def backward_instance(
    dtype: torch.dtype,
    head_dim: int,
    v_dim: int,
    wide: bool = False,
    wide_dq: bool = False,
    wide_out: bool = False,
    deterministic: bool = False,
    score_steps: tuple[str, ...] = (),
    generated: GeneratedCode | None = None,
    bit_tiles: bool = False,
    pack: int = 1,
) -> BackwardInstance:
    """The variant for these head dims.

    Args:
        wide, wide_dq: dk and dv, and dq, in float32.
        wide_out: the output that is given is float32.
        deterministic: sums in a fixed order.
        pack: query heads that may share a step (:func:`packed_heads`).
    """
    pair = next((pair for pair in _BACKWARD if head_dim <= pair[0] and v_dim <= pair[1]), None)
    assert pair is not None, "objections() turns other head dims away"
    rows, keys, sum_dq = _BACKWARD[pair]
    sum_dq = sum_dq and not deterministic
    if not (score_steps or generated):
        rows = _LONG_STEPS.get(pair, rows)
    if sum_dq or (generated is not None and generated.has_sums):
        pack = 1
    return BackwardInstance(
        *(dtype, *pair, rows, keys, sum_dq, wide, wide_dq, wide_out, pack, score_steps, generated, bit_tiles)
    )


def gradient_q_instance(instance: BackwardInstance, counted: bool = False) -> GradientQInstance:
    """The variant that makes dq where ``instance`` does not."""
    dims = (instance.head_dim, instance.v_dim)
    rest = (instance.wide_dq, instance.wide_out, instance.score_steps, instance.generated, instance.bit_tiles, counted)
    return GradientQInstance(instance.dtype, *dims, *_GRADIENT_Q[dims], instance.pack, *rest)


def packed_heads(group: int, mask_heads: int) -> int:
    """Query heads in a row tile: some of a group, where they share the mask."""
    return math.gcd(group, _MAX_PACK) if mask_heads == 1 else 1


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernel folds the scale into its exponentials, which takes a positive one."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def tma_ready(x: Tensor) -> Tensor:
    """``x``, or a copy whose address and strides the copy engine can take."""
    return x if is_tma_ready(x) else x.clone(memory_format=torch.contiguous_format)
