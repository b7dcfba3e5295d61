"""One rank's part of attention under one mask, ready to run on a device, and what both ways to run it share.

Shape legend: B batch, H query heads, G key/value heads, Q local rows, K keys, D query/key head dim, E value head dim.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed.cost_model import PREFETCH
from magi_flex.distributed.exchange_plan import ExchangePlan
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.group_work import GroupWork
from magi_flex.distributed.mask_forms import to_plan
from magi_flex.distributed.native_exchange import MULTIPROCESSORS
from magi_flex.distributed.timeline import Timeline
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.request import AttentionGradients, AttentionOutput, AttentionRequest, Backend, ScoreProgram
from magi_flex.kernels.route import facts_of, route
from magi_flex.mask_outline import Outline
from magi_flex.mask_plan import MaskPlan

# ---- plans ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeySet:
    """Keys that are attended to together.

    Attributes:
        name: "local", or "stage 0", "stage 1", ...
        keys: int64 ``[K]``, global indices, ascending.
        mask: the rank's rows over them.
        empty: no row attends to any of them.
        hops: how they get here (none: the rank holds them).
    """

    name: str
    keys: Tensor
    mask: MaskPlan
    empty: bool
    hops: tuple[GroupPlan, ...] = ()


@dataclass(frozen=True)
class QuerySet:
    """Other ranks' rows that attend to this rank's keys here.

    Attributes:
        rows: int64 ``[N]``, global indices.
        mask: these rows over the rank's own keys.
        empty: there are none.
        hop: how they get here.
    """

    rows: Tensor
    mask: MaskPlan
    empty: bool
    hop: GroupPlan


@dataclass(frozen=True)
class JoinedKeys:
    """All keys that the rank's rows attend to, its own among those of others, in the order of the sequence.

    Attributes:
        keys: int64 ``[K]``, global indices, ascending.
        own: int64, where the rank's own keys stand among them.
        masks: the rank's rows over them, for the heads of one group after the other (one object where all are alike).
        empty: no row attends to any of them.
        hops: how those of others get here; the last one puts them in their places among all.
    """

    keys: Tensor
    own: Tensor
    masks: tuple[MaskPlan, ...]
    empty: bool
    hops: tuple[GroupPlan, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """One rank's part of attention under one mask, ready to run on a device.

    Attributes:
        rows: int64 ``[Q]``, global indices of the rank's query rows.
        keys: int64, global indices of the keys that the rank holds.
        sets: where the keys are cut (stages.py): the rank's own keys, then the stages.
        joined: where the heads are cut (head_groups.py).
        visiting: rows of others, where queries move (then all ranks have this).
    """

    rows: Tensor
    keys: Tensor
    sets: tuple[KeySet, ...] = ()
    joined: JoinedKeys | None = None
    visiting: QuerySet | None = None

    @staticmethod
    def from_exchange(plan: ExchangePlan, device: torch.device | str, head_groups: int = 1) -> AttentionPlan:
        """``head_groups``: how many groups the heads of a plan with joined keys come in."""
        rows, own_keys = plan.rows.to(device), plan.keys.to(device)
        if plan.joined is not None:
            stage = plan.joined
            assert stage.own is not None
            outline = Outline.of(stage.mask)
            joined = JoinedKeys(
                stage.keys.to(device),
                stage.own.to(device),
                _masks_of_groups(stage.mask, outline, head_groups),
                outline.area == 0,
                _on(stage.hops, device),
            )
            return AttentionPlan(rows, own_keys, joined=joined)
        assert plan.mask is not None
        sets = [KeySet("local", own_keys, *_plan_and_empty(plan.mask))]
        for i, stage in enumerate(plan.stages):
            sets.append(
                KeySet(f"stage {i}", stage.keys.to(device), *_plan_and_empty(stage.mask), _on(stage.hops, device))
            )
        visiting = None
        if plan.queries is not None:
            queries = plan.queries
            visiting = QuerySet(queries.rows.to(device), *_plan_and_empty(queries.mask), queries.hop.to(device))
        return AttentionPlan(rows, own_keys, tuple(sets), visiting=visiting)

    @property
    def hops(self) -> list[GroupPlan]:
        """Of all keys that come from others."""
        joined = [] if self.joined is None else self.joined.hops
        return [*(hop for key_set in self.sets for hop in key_set.hops), *joined]


def _on(hops: Sequence[GroupPlan], device: torch.device | str) -> tuple[GroupPlan, ...]:
    return tuple(hop.to(device) for hop in hops)


def _plan_and_empty(mask: RowIntervals) -> tuple[MaskPlan, bool]:
    """What kernels read, and whether no row attends to any key."""
    outline = Outline.of(mask)
    return to_plan(mask, outline), outline.area == 0


def _masks_of_groups(mask: RowIntervals, outline: Outline, groups: int) -> tuple[MaskPlan, ...]:
    heads = mask.starts.shape[1]
    if heads == 1:
        return (to_plan(mask, outline),) * groups
    plans = []
    for first in range(0, heads, heads // groups):
        own = slice(first, first + heads // groups)
        part = RowIntervals(mask.starts[:, own].contiguous(), mask.ends[:, own].contiguous(), mask.kv_len)
        plans.append(to_plan(part, outline.of_heads(own)))
    return tuple(plans)


# ---- running them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedAttention(ABC):
    """softmax(mod(scale * q k^T)) v of the rank's rows; every rank of the group calls it at the same time.

    Attributes:
        plan: this rank's part.
        group: the ranks that share the sequence.
        scale, score: as in AttentionRequest; score mods see global row and key indices.
        backend: "auto" or a kernel backend's name.
        timeline: records what runs when.
        prefetch: stages whose keys may be on their way (and in memory) before they are computed, at least 1.
        max_score: whether the largest scores are read.
    """

    plan: AttentionPlan
    group: dist.ProcessGroup
    scale: float
    score: ScoreProgram = ScoreProgram()
    backend: str = "auto"
    timeline: Timeline | None = None
    prefetch: int = PREFETCH
    max_score: bool = True

    @abstractmethod
    def forward(
        self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, needs_backward: bool = True, keep_keys: bool = False
    ) -> tuple[AttentionOutput, list[list[Tensor]]]:
        """The output of the rank's rows and, if ``keep_keys``, keys and values for :meth:`backward`.

        k and v hold the rank's own keys.  ``out`` has q's dtype and stride order.

        Raises:
            ValueError: shapes that do not match the plan.
        """

    @abstractmethod
    def backward(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        kept: Sequence[Sequence[Tensor]] | None = None,
    ) -> AttentionGradients:
        """Gradients of the rank's q, k, v, and this rank's part of those of the score mod's captures (to be summed
        over the group).  ``kept``: what forward kept; None fetches the keys again."""

    def _check(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> None:
        rows, keys = self.plan.rows.shape[0], self.plan.keys.shape[0]
        for name, x, length in (("q", q_BHQD, rows), ("k", k_BGKD, keys), ("v", v_BGKE, keys)):
            if x.dim() != 4 or x.shape[2] != length:
                raise ValueError(
                    f"{name}: has shape {tuple(x.shape)}; this rank's plan needs 4 dimensions and {length} rows in "
                    "dimension 2 (shard the tensor by the plan's dispatch)"
                )

    @functools.cached_property
    def _sm_margin(self) -> int:
        """Multiprocessors that attention leaves to native collectives beside it."""
        joined = self.plan.joined
        beside = joined is None or len(joined.masks) > 1
        return MULTIPROCESSORS if beside and any(hop.native is not None for hop in self.plan.hops) else 0

    def _request(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskPlan,
        rows: Tensor,
        keys: Tensor,
        wide: bool,
        first_head: int = 0,
    ) -> AttentionRequest:
        """``wide``: float32 results; ``first_head``: the place of q's first head among the rank's."""
        score = self.score
        if not score.is_identity:
            h_offset = score.index_map.h_offset + first_head
            score = replace(score, index_map=replace(score.index_map, h_offset=h_offset, q_index=rows, k_index=keys))
        return AttentionRequest(
            *(q, k, v, mask, self.scale, score),
            wide_results=wide,
            max_score=self.max_score,
            sm_margin=self._sm_margin,
        )

    def _kernel(self, request: AttentionRequest, needs_backward: bool) -> Backend:
        return route(facts_of(request, needs_backward), self.backend)

    def _span(self, name: str, lane: str) -> AbstractContextManager[None]:
        return nullcontext() if self.timeline is None else self.timeline.span(name, lane)

    def _begin(self, name: str, lane: str) -> Callable[[], None] | None:
        """Starts a span of the timeline; what ends it."""
        return None if self.timeline is None else self.timeline.begin(name, lane)


def add_captured(captured: list[Tensor | None], grads: AttentionGradients) -> list[Tensor | None]:
    """Gradients of a score mod's captures, summed over the kernel calls of a pass."""
    if not grads.captures:
        return captured
    return [_add(a, b) for a, b in zip(captured, grads.captures, strict=True)]


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if part is None:
        return total
    wide = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    return wide.clone() if total is None else total + wide


def wide_dtype(x: Tensor) -> torch.dtype:
    """Of partial results."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@functools.cache
def _communication_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: what the allocator keeps for a stream serves no other one.

    Of high priority, so that its kernels get the next free multiprocessors beside attention that leaves none.
    """
    return torch.cuda.Stream(device, priority=-1)


class Lane:
    """Where communication runs: on a GPU a stream of its own, so that both hops and the packing overlap compute.

    Not ``beside`` compute, the stream is the current one, which spares events where there is nothing to overlap.
    """

    def __init__(self, device: torch.device, beside: bool = True):
        self.device = device
        self.stream = _communication_stream(device) if beside and device.type == "cuda" else None

    def start(self, begin: Callable[[], GroupWork], inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begins and queues all that follows; the result waits (on a GPU: lets the current stream wait) and gives the
        tensors."""
        stream = self.stream
        if stream is None:
            return begin().wait
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            tensors = begin().wait()
            done = stream.record_event()  # what is begun after this is not waited for
        for x in inputs:
            x.record_stream(stream)

        def wait() -> list[Tensor]:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            for x in tensors:
                x.record_stream(current)
            return tensors

        return wait
