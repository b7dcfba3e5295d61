"""What every attention kernel is asked, and what it answers.

Shape legend: B batch, H query heads, G key/value heads (H = G * group), Q query rows, K keys, D query/key head dim,
E value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram
from magi_flex.kernels.checks import Layout, check_plan
from magi_flex.kernels.merge import merge_lse
from magi_flex.mask_plan import MaskPlan


@dataclass(frozen=True)
class Multiply:
    """score * factor."""

    factor: float


@dataclass(frozen=True)
class Softcap:
    """cap * tanh(score / cap)."""

    cap: float


@dataclass(frozen=True)
class Distance:
    """score + slopes[h] * (k - q), or slopes[h] * |k - q| if ``absolute`` (ALiBi: slopes = -m, absolute)."""

    slopes_H: Tensor  # float32 [H], or [1] for all heads
    absolute: bool


@dataclass(frozen=True)
class Bias:
    """score + factor * table.flat[offset + b * sb + h * sh + q * sq + k * sk]: pair bias, key bias, relative tables."""

    table: Tensor
    strides_bhqk: tuple[int, int, int, int]
    offset: int
    factor: float = 1.0


ScoreStep = Multiply | Softcap | Distance | Bias


@dataclass(frozen=True)
class IndexMap:
    """How local indices become the ones a score mod sees (the identity where nothing is sharded)."""

    b_offset: int = 0
    h_offset: int = 0
    q_index: Tensor | None = None  # int [Q]
    k_index: Tensor | None = None  # int [K]


@dataclass(frozen=True)
class ScoreProgram:
    """A score_mod.

    Attributes:
        steps: the same function as a sequence of simple steps applied in order, where it could be recognised (the
            empty tuple is the identity), else None.  Kernels without native support for a step use the graphs.
        forward: the mod's graph, (score, b, h, q, k, *captures) -> score; None only for the identity.
        joint: (score, b, h, q, k, grad_score, *captures) -> (d score, None, None, None, None, *d captures); None where
            only the forward pass is wanted.
        captures: tensors and ints the mod reads, in the graph's order.
        needs_grad: for each capture, whether its gradient is wanted.
    """

    steps: tuple[ScoreStep, ...] | None = ()
    forward: FxProgram | None = None
    joint: FxProgram | None = None
    captures: tuple[Any, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    index_map: IndexMap = field(default_factory=IndexMap)

    @property
    def is_identity(self) -> bool:
        return self.steps == ()


IDENTITY = ScoreProgram()


@dataclass(frozen=True)
class AttentionRequest:
    """softmax(mod(scale * q k^T)) v over the pairs of ``plan``.

    q ``[B, H, Q, D]``, k ``[B, G, K, D]``, v ``[B, G, K, E]``, any strides; plan's B and H are 1 or equal to q's.

    ``layout`` follows from q, k and v.

    Raises ValueError where these do not fit together (``checks.py``): kernels index by them unchecked.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    plan: MaskPlan
    scale: float
    score: ScoreProgram = IDENTITY
    deterministic: bool = False
    wide_results: bool = False  # out, dq, dk, dv in float32 (float64 inputs: float64): partial results, merged later
    max_score: bool = True  # whether anybody reads AttentionOutput.max_score; else it may hold anything
    sm_margin: int = 0  # multiprocessors of a GPU that are left to others (communication), where the backend can
    layout: Layout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout = Layout.of(self.q, self.k, self.v)
        object.__setattr__(self, "layout", layout)
        check_plan(self.plan, layout)

    @property
    def launch_key(self) -> tuple[Hashable, ...]:
        """Equal for requests of which q, k and v differ in nothing but what they hold and where they lie."""
        misaligned = (self.q.data_ptr() % 16, self.k.data_ptr() % 16, self.v.data_ptr() % 16)
        return self.layout, misaligned, self.sm_margin


@dataclass(frozen=True)
class AttentionOutput:
    """out ``[B, H, Q, E]`` in q's dtype (see ``wide_results``) and stride order; lse and max_score float32
    ``[B, H, Q]`` (float64 for float64 inputs) in the log2 domain (natural values times log2(e)).  An empty row has
    out 0, lse -inf, max_score -inf."""

    out: Tensor
    lse: Tensor
    max_score: Tensor


@dataclass(frozen=True)
class AttentionGradients:
    """Gradients of q, k, v (their dtypes and stride orders) and of the score program's captures (None: not wanted)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    captures: tuple[Tensor | None, ...] = ()


PreparedForward = Callable[[Tensor, Tensor, Tensor], AttentionOutput]  # of q, k, v
PreparedBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], AttentionGradients]
"""Of q, k, v, out, lse, d_out."""


class Backend:
    """One way to compute attention.  Subclasses are stateless.

    ``never_waits``: with plans that are built on the device, forward and backward only enqueue work, so that a CUDA
    graph can hold them.
    """

    name: str = ""
    never_waits: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why this backend cannot run on ``device`` at all (not built, wrong chip), or None."""
        raise NotImplementedError

    def objections(self, facts: RequestFacts) -> list[str]:
        """Reasons why it does not serve such a request; empty where it does."""
        raise NotImplementedError

    def reservations(self, facts: RequestFacts) -> list[str]:
        """What of this request has not run yet on the hardware that it is for, so that ``auto`` leaves it to others."""
        return []

    def behind_stock(self, facts: RequestFacts) -> str | None:
        """Why PyTorch's own kernels for GPUs may well be faster than this backend for such a request, or None."""
        return None

    def forward(self, request: AttentionRequest) -> AttentionOutput:
        raise NotImplementedError

    def prepare_forward(self, request: AttentionRequest) -> PreparedForward | None:
        """:meth:`forward` for tensors like those of this request, which has no score mod (``prepared.py``), or None
        where a call of its own does no more.  It must not hold the request's tensors or its plan."""
        return None

    def prepare_backward(
        self, request: AttentionRequest, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> PreparedBackward | None:
        """As :meth:`prepare_forward`, without a gradient with respect to ``lse``."""
        return None

    def forward_into(self, request: AttentionRequest, result: AttentionOutput) -> None:
        """:meth:`forward`, written to the given tensors (of any strides)."""
        given = self.forward(request)
        for target, x in zip(vars(result).values(), vars(given).values(), strict=True):
            target.copy_(x)

    def accumulate(self, request: AttentionRequest, earlier: AttentionOutput) -> AttentionOutput:
        """Attention over the request's keys and those that ``earlier`` (float32, or float64 for float64 inputs) counts.

        The memory of ``earlier`` may be written to and be that of the result, which has its dtype.
        """
        part = self.forward(replace(request, wide_results=True))
        wide = earlier.out.dtype
        out, lse = merge_lse(earlier.out, earlier.lse, part.out.to(wide), part.lse.to(wide))
        return AttentionOutput(out, lse, torch.maximum(earlier.max_score, part.max_score.to(wide)))

    def backward(
        self,
        request: AttentionRequest,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
    ) -> AttentionGradients:
        """``lse`` as forward gave it (log2 domain); ``d_lse`` is the gradient with respect to it."""
        raise NotImplementedError

    def backward_into(
        self, request: AttentionRequest, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, dq: Tensor
    ) -> AttentionGradients:
        """:meth:`backward`, its dq written to the given tensor (of any strides and floating point dtype)."""
        grads = self.backward(request, out, lse, d_out, d_lse)
        dq.copy_(grads.dq)
        return replace(grads, dq=dq)


@dataclass(frozen=True)
class RequestFacts:
    """What routing may look at: known when the graph is compiled, without any tensor's contents."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    q_heads: int | None
    kv_heads: int | None
    score_steps: Sequence[type] | None  # step classes, () identity, None general
    score_grads: bool  # a capture of the score mod wants a gradient
    needs_backward: bool
    has_bit_tiles: bool
    deterministic: bool = False
    wide_results: bool = False
    mixed_dtypes: bool = False  # k or v have another dtype than q
    index_map: bool = False  # the score mod sees other indices than the local ones
    max_score: bool = False  # the largest scores are asked for
    score_ops: frozenset[str] = frozenset()  # what a general score mod does to single scores, see score_split.py
    linear_gradient: bool = True  # of a general score mod: see has_linear_gradient there
