"""Attention of one rank's rows over keys that other ranks hold, in stages.

The rank's own keys come first; remote keys arrive stage by stage.  While stage i is computed, the keys of the next
stages and, in the backward pass, the gradients of stage i - 1 are on their way.  Partial outputs are float32 and are
joined by log-sum-exp; partial gradients are float32 and are added up.

Shape legend: B batch, H query heads, G key/value heads, Q local rows, K keys (local, or of a stage), D query/key head
dim, E value head dim.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed.cost_model import PREFETCH
from magi_flex.distributed.exchange_plan import ExchangePlan
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.group_work import GroupWork, start_group_cast, start_group_reduce
from magi_flex.distributed.mask_forms import to_plan
from magi_flex.distributed.native_exchange import MULTIPROCESSORS
from magi_flex.distributed.timeline import COMPUTE, NETWORK, REDUCTION, Timeline
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.layout import empty_in_order, fill_order
from magi_flex.kernels.merge import merge_lse
from magi_flex.kernels.request import (
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Backend,
    ScoreProgram,
)
from magi_flex.kernels.route import facts_of, route
from magi_flex.mask_plan import MaskPlan


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
class AttentionPlan:
    """One rank's part of attention under one mask, ready to run on a device.

    Attributes:
        rows: int64 ``[Q]``, global indices of the rank's query rows.
        local: the keys that the rank holds.
        remote: the stages.
        visiting: rows of others, where queries move (then all ranks have this).
    """

    rows: Tensor
    local: KeySet
    remote: tuple[KeySet, ...]
    visiting: QuerySet | None = None

    @staticmethod
    def from_exchange(plan: ExchangePlan, device: torch.device | str) -> AttentionPlan:
        def key_set(name: str, keys: Tensor, mask: RowIntervals, hops: tuple[GroupPlan, ...]) -> KeySet:
            hops = tuple(hop.to(device) for hop in hops)
            return KeySet(name, keys.to(device), to_plan(mask), mask.area() == 0, hops)

        local = key_set("local", plan.keys, plan.mask, ())
        remote = [key_set(f"stage {i}", stage.keys, stage.mask, stage.hops) for i, stage in enumerate(plan.stages)]
        visiting = None
        if plan.queries is not None:
            queries = plan.queries
            empty = queries.mask.area() == 0
            visiting = QuerySet(queries.rows.to(device), to_plan(queries.mask), empty, queries.hop.to(device))
        return AttentionPlan(plan.rows.to(device), local, tuple(remote), visiting)


@dataclass(frozen=True)
class StagedAttention:
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

    # ---- forward ------------------------------------------------------------------------------------------------

    def forward(
        self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, needs_backward: bool = True, keep_keys: bool = False
    ) -> tuple[AttentionOutput, list[list[Tensor]]]:
        """The output of the rank's rows and, if ``keep_keys``, the remote keys and values for :meth:`backward`.

        k and v hold the rank's own keys.  ``out`` has q's dtype and stride order.

        Raises:
            ValueError: shapes that do not match the plan.
        """
        self._check(q_BHQD, k_BGKD, v_BGKE)
        batch, heads, q_len, _ = q_BHQD.shape
        wide = torch.float64 if q_BHQD.dtype == torch.float64 else torch.float32
        lse = q_BHQD.new_full((batch, heads, q_len), -torch.inf, dtype=wide)
        total = AttentionOutput(lse.new_zeros((batch, heads, q_len, v_BGKE.shape[3])), lse, lse.clone())
        kept: list[list[Tensor]] = []
        lane = _Lane(q_BHQD.device)
        visitors = self._send_queries(lane, [q_BHQD])
        returning: Callable[[], list[Tensor]] | None = None
        for key_set, k, v in self._key_sets(k_BGKD, v_BGKE, None):
            if keep_keys and key_set.hops:
                kept.append([k, v])
            if not key_set.empty:
                request = self._request(q_BHQD, k, v, key_set.mask, self.plan.rows, key_set.keys)
                with self._span("forward", key_set.name, COMPUTE):
                    total = self._kernel(request, needs_backward).accumulate(request, total)
            if visitors is not None and not key_set.hops:
                returning = self._serve_forward(lane, visitors()[0], k, v, wide, needs_backward)
        out, lse, max_score = total.out, total.lse, total.max_score
        if returning is not None:
            out_q, lse_q, max_q = (x.movedim(0, 2) for x in returning())
            out, lse = merge_lse(out, lse, out_q, lse_q)
            max_score = torch.maximum(max_score, max_q)
        result = empty_in_order(q_BHQD, out.shape, fill_order(q_BHQD)).copy_(out)
        return AttentionOutput(result, lse, max_score), kept

    def _check(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> None:
        rows, keys = len(self.plan.rows), len(self.plan.local.keys)
        for name, x, length in (("q", q_BHQD, rows), ("k", k_BGKD, keys), ("v", v_BGKE, keys)):
            if x.dim() != 4 or x.shape[2] != length:
                raise ValueError(
                    f"{name}: has shape {tuple(x.shape)}; this rank's plan needs 4 dimensions and {length} rows in "
                    "dimension 2 (shard the tensor by the plan's dispatch)"
                )

    @functools.cached_property
    def _sm_margin(self) -> int:
        """Multiprocessors that attention leaves to native collectives beside it."""
        hops = [hop for key_set in self.plan.remote for hop in key_set.hops]
        return MULTIPROCESSORS if any(hop.native is not None for hop in hops) else 0

    def _request(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskPlan, rows: Tensor, keys: Tensor) -> AttentionRequest:
        score = self.score
        if not score.is_identity:
            score = replace(score, index_map=replace(score.index_map, q_index=rows, k_index=keys))
        return AttentionRequest(
            *(q, k, v, mask, self.scale, score),
            wide_results=True,
            max_score=self.max_score,
            sm_margin=self._sm_margin,
        )

    def _kernel(self, request: AttentionRequest, needs_backward: bool) -> Backend:
        return route(facts_of(request, needs_backward), self.backend)

    def _span(self, name: str, what: str, lane: str) -> AbstractContextManager[None]:
        if self.timeline is None:
            return nullcontext()
        return self.timeline.span(f"{name} {what}", lane)

    # ---- keys on their way ----------------------------------------------------------------------------------------

    def _key_sets(
        self, k: Tensor, v: Tensor, kept: Sequence[Sequence[Tensor]] | None
    ) -> Iterator[tuple[KeySet, Tensor, Tensor]]:
        """(key set, k, v) in turn; the keys of the next ones are sent for before the current one is handed out."""
        remote = self.plan.remote
        lane = _Lane(k.device)
        rows = [x.movedim(2, 0) for x in (k, v)]
        if kept is not None:
            yield self.plan.local, k, v
            for key_set, pair in zip(remote, kept, strict=True):
                yield key_set, pair[0], pair[1]
            return
        waiting = deque(remote)
        arriving = deque(self._cast(lane, rows, waiting.popleft()) for _ in range(min(self.prefetch, len(remote))))
        yield self.plan.local, k, v
        for key_set in remote:
            k_i, v_i = (x.movedim(0, 2) for x in arriving.popleft()())
            if waiting:
                arriving.append(self._cast(lane, rows, waiting.popleft()))
            yield key_set, k_i, v_i

    def _cast(self, lane: _Lane, rows: list[Tensor], key_set: KeySet) -> Callable[[], list[Tensor]]:
        ended = None if self.timeline is None else self.timeline.begin(f"keys of {key_set.name}", NETWORK)
        return lane.start(lambda: start_group_cast(rows, key_set.hops, self.group, ended), rows)

    # ---- queries on their way -------------------------------------------------------------------------------------

    def _send_queries(self, lane: _Lane, tensors: list[Tensor]) -> Callable[[], list[Tensor]] | None:
        """Rows (dimension 2) of the tensors go to the ranks that hold their keys, where queries move."""
        visiting = self.plan.visiting
        if visiting is None:
            return None
        rows = [x.movedim(2, 0) for x in tensors]
        ended = None if self.timeline is None else self.timeline.begin("queries", NETWORK)
        return lane.start(lambda: start_group_cast(rows, visiting.hop, self.group, ended), rows)

    def _serve_forward(
        self, lane: _Lane, q_NBHD: Tensor, k: Tensor, v: Tensor, wide: torch.dtype, needs_backward: bool
    ) -> Callable[[], list[Tensor]]:
        """Attention of visiting rows over this rank's keys; (out, lse, max_score) travel back, rows first."""
        visiting = self.plan.visiting
        assert visiting is not None
        shape = q_NBHD.shape[:3]
        parts = [q_NBHD.new_zeros((*shape, v.shape[3]), dtype=wide)]
        parts += [q_NBHD.new_full(shape, -torch.inf, dtype=wide) for _ in range(2)]
        if not visiting.empty:
            request = self._request(q_NBHD.movedim(0, 2), k, v, visiting.mask, visiting.rows, self.plan.local.keys)
            with self._span("forward", "visiting rows", COMPUTE):
                result = self._kernel(request, needs_backward).forward(request)
            parts = [x.to(wide).movedim(2, 0) for x in (result.out, result.lse, result.max_score)]
        ended = None if self.timeline is None else self.timeline.begin("outputs of visiting rows", REDUCTION)
        return lane.start(lambda: start_group_reduce(parts, visiting.hop, self.group, "lse", None, ended), parts)

    def _serve_backward(
        self, lane: _Lane, visitors: list[Tensor], k: Tensor, v: Tensor, wide: torch.dtype
    ) -> tuple[AttentionGradients | None, Callable[[], list[Tensor]]]:
        """Gradients of visiting rows over this rank's keys; dq travels back, rows first."""
        visiting = self.plan.visiting
        assert visiting is not None
        q, out, lse, d_out, *d_lse = (x.movedim(0, 2) for x in visitors)
        grads, dq_NBHD = None, visitors[0].new_zeros(visitors[0].shape, dtype=wide)
        if not visiting.empty:
            request = self._request(q, k, v, visiting.mask, visiting.rows, self.plan.local.keys)
            with self._span("backward", "visiting rows", COMPUTE):
                kernel = self._kernel(request, True)
                grads = kernel.backward(request, out, lse, d_out, d_lse[0] if d_lse else None)
            dq_NBHD = grads.dq.to(wide).movedim(2, 0)
        ended = None if self.timeline is None else self.timeline.begin("gradients of visiting rows", REDUCTION)
        parts = [dq_NBHD]
        return grads, lane.start(lambda: start_group_reduce(parts, visiting.hop, self.group, "sum", None, ended), parts)

    # ---- backward -------------------------------------------------------------------------------------------------

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
        self._check(q_BHQD, k_BGKD, v_BGKE)
        wide = torch.float64 if q_BHQD.dtype == torch.float64 else torch.float32
        dq = torch.zeros_like(q_BHQD, dtype=wide)
        # rows first, as they travel
        dk, dv = (x.new_zeros((x.shape[2], *x.shape[:2], x.shape[3]), dtype=wide) for x in (k_BGKD, v_BGKE))
        captured: list[Tensor | None] = [None] * len(self.score.captures)
        lane = _Lane(q_BHQD.device)
        sent = [q_BHQD, out, lse, d_out] + ([] if d_lse is None else [d_lse])
        visitors = self._send_queries(lane, sent)
        returning: Callable[[], list[Tensor]] | None = None
        leaving: Callable[[], list[Tensor]] | None = None
        for key_set, k, v in self._key_sets(k_BGKD, v_BGKE, kept):
            if key_set.empty:
                parts = [x.new_zeros((x.shape[2], *x.shape[:2], x.shape[3]), dtype=wide) for x in (k, v)]
            else:
                request = self._request(q_BHQD, k, v, key_set.mask, self.plan.rows, key_set.keys)
                with self._span("backward", key_set.name, COMPUTE):
                    grads = self._kernel(request, True).backward(request, out, lse, d_out, d_lse)
                    dq += grads.dq
                    captured = _add_captured(captured, grads)
                parts = [x.to(wide).movedim(2, 0) for x in (grads.dk, grads.dv)]
            if not key_set.hops:
                dk += parts[0]
                dv += parts[1]
                if visitors is not None:
                    grads, returning = self._serve_backward(lane, visitors(), k, v, wide)
                    if grads is not None:
                        dk += grads.dk.movedim(2, 0)
                        dv += grads.dv.movedim(2, 0)
                        captured = _add_captured(captured, grads)
                continue
            if leaving is not None:
                leaving()
            leaving = self._reduce(lane, parts, key_set, [dk, dv])
        if leaving is not None:
            leaving()
        if returning is not None:
            dq += returning()[0].movedim(0, 2)
        dq = empty_in_order(q_BHQD, q_BHQD.shape, fill_order(q_BHQD)).copy_(dq)
        dk, dv = (
            empty_in_order(x, x.shape, fill_order(x)).copy_(grad.movedim(0, 2))
            for x, grad in ((k_BGKD, dk), (v_BGKE, dv))
        )
        return AttentionGradients(dq, dk, dv, tuple(captured))

    def _reduce(
        self, lane: _Lane, parts: list[Tensor], key_set: KeySet, totals: list[Tensor]
    ) -> Callable[[], list[Tensor]]:
        ended = None if self.timeline is None else self.timeline.begin(f"gradients of {key_set.name}", REDUCTION)
        return lane.start(
            lambda: start_group_reduce(parts, key_set.hops, self.group, "sum", totals, ended), [*parts, *totals]
        )


def _add_captured(captured: list[Tensor | None], grads: AttentionGradients) -> list[Tensor | None]:
    if not grads.captures:
        return captured
    return [_add(a, b) for a, b in zip(captured, grads.captures, strict=True)]


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if part is None:
        return total
    wide = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    return wide.clone() if total is None else total + wide


@functools.cache
def _communication_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: what the allocator keeps for a stream serves no other one.

    Of high priority, so that its kernels get the next free multiprocessors beside attention that leaves none.
    """
    return torch.cuda.Stream(device, priority=-1)


class _Lane:
    """Where communication runs: on a GPU a stream of its own, so that both hops and the packing overlap compute."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = _communication_stream(device) if device.type == "cuda" else None

    def start(self, begin: Callable[[], GroupWork], inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begins; the result waits (on a GPU: lets the current stream wait) and gives the tensors."""
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
