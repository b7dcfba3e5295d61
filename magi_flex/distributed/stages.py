"""Attention of one rank's rows over keys that other ranks hold, where the keys are cut into stages.

The rank's own keys come first; remote keys arrive stage by stage.  While stage i is computed, the keys of the next
stages and, in the backward pass, the gradients of stage i - 1 are on their way.  Partial outputs are float32 and are
joined by log-sum-exp; partial gradients are float32 and are added up.

Shape legend: B batch, H query heads, G key/value heads, Q local rows, K keys (local, or of a stage), D query/key head
dim, E value head dim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.distributed.attention_plan import KeySet, Lane, SharedAttention, add_captured, wide_dtype
from magi_flex.distributed.group_work import start_group_cast, start_group_reduce
from magi_flex.distributed.timeline import COMPUTE, NETWORK, REDUCTION
from magi_flex.kernels.layout import empty_in_order, fill_order
from magi_flex.kernels.merge import merge_lse
from magi_flex.kernels.request import AttentionGradients, AttentionOutput


@dataclass(frozen=True)
class StagedAttention(SharedAttention):
    """Attention over a plan's sets of keys, one after the other."""

    # ---- forward ------------------------------------------------------------------------------------------------

    def forward(
        self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, needs_backward: bool = True, keep_keys: bool = False
    ) -> tuple[AttentionOutput, list[list[Tensor]]]:
        self._check(q_BHQD, k_BGKD, v_BGKE)
        batch, heads, q_len, _ = q_BHQD.shape
        wide = wide_dtype(q_BHQD)
        total: AttentionOutput | None = None
        partial = self.plan.visiting is not None or sum(not key_set.empty for key_set in self.plan.sets) > 1
        kept: list[list[Tensor]] = []
        lane = Lane(q_BHQD.device)
        visitors = self._send_queries(lane, [q_BHQD])
        returning: Callable[[], list[Tensor]] | None = None
        for key_set, k, v in self._key_sets(k_BGKD, v_BGKE, None):
            if keep_keys and key_set.hops:
                kept.append([k, v])
            if not key_set.empty:
                request = self._request(q_BHQD, k, v, key_set.mask, self.plan.rows, key_set.keys, wide=partial)
                with self._span(f"forward {key_set.name}", COMPUTE):
                    kernel = self._kernel(request, needs_backward)
                    total = kernel.forward(request) if total is None else kernel.accumulate(request, total)
            if visitors is not None and not key_set.hops:
                returning = self._serve_forward(lane, visitors()[0], k, v, wide, needs_backward)
        if total is not None and not partial:
            return total, kept
        if total is None:
            lse = q_BHQD.new_full((batch, heads, q_len), -torch.inf, dtype=wide)
            total = AttentionOutput(lse.new_zeros((batch, heads, q_len, v_BGKE.shape[3])), lse, lse.clone())
        out, lse, max_score = total.out, total.lse, total.max_score
        if returning is not None:
            out_q, lse_q, max_q = (x.movedim(0, 2) for x in returning())
            out, lse = merge_lse(out, lse, out_q, lse_q)
            max_score = torch.maximum(max_score, max_q)
        result = empty_in_order(q_BHQD, out.shape, fill_order(q_BHQD)).copy_(out)
        return AttentionOutput(result, lse, max_score), kept

    # ---- keys on their way ----------------------------------------------------------------------------------------

    def _key_sets(
        self, k: Tensor, v: Tensor, kept: Sequence[Sequence[Tensor]] | None
    ) -> Iterator[tuple[KeySet, Tensor, Tensor]]:
        """(key set, k, v) in turn; the keys of the next ones are sent for before the current one is handed out."""
        local, *remote = self.plan.sets
        lane = Lane(k.device)
        rows = [x.movedim(2, 0) for x in (k, v)]
        if kept is not None:
            yield local, k, v
            for key_set, pair in zip(remote, kept, strict=True):
                yield key_set, pair[0], pair[1]
            return
        waiting = deque(remote)
        arriving = deque(self._cast(lane, rows, waiting.popleft()) for _ in range(min(self.prefetch, len(remote))))
        yield local, k, v
        for key_set in remote:
            k_i, v_i = (x.movedim(0, 2) for x in arriving.popleft()())
            if waiting:
                arriving.append(self._cast(lane, rows, waiting.popleft()))
            yield key_set, k_i, v_i

    def _cast(self, lane: Lane, rows: list[Tensor], key_set: KeySet) -> Callable[[], list[Tensor]]:
        ended = self._begin(f"keys of {key_set.name}", NETWORK)
        return lane.start(lambda: start_group_cast(rows, key_set.hops, self.group, ended), rows)

    # ---- queries on their way -------------------------------------------------------------------------------------

    def _send_queries(self, lane: Lane, tensors: list[Tensor]) -> Callable[[], list[Tensor]] | None:
        """Rows (dimension 2) of the tensors go to the ranks that hold their keys, where queries move."""
        visiting = self.plan.visiting
        if visiting is None:
            return None
        rows = [x.movedim(2, 0) for x in tensors]
        ended = self._begin("queries", NETWORK)
        return lane.start(lambda: start_group_cast(rows, visiting.hop, self.group, ended), rows)

    def _serve_forward(
        self, lane: Lane, q_NBHD: Tensor, k: Tensor, v: Tensor, wide: torch.dtype, needs_backward: bool
    ) -> Callable[[], list[Tensor]]:
        """Attention of visiting rows over this rank's keys; (out, lse, max_score) travel back, rows first."""
        visiting = self.plan.visiting
        assert visiting is not None
        shape = q_NBHD.shape[:3]
        parts = [q_NBHD.new_zeros((*shape, v.shape[3]), dtype=wide)]
        parts += [q_NBHD.new_full(shape, -torch.inf, dtype=wide) for _ in range(2)]
        if not visiting.empty:
            rows, keys = visiting.rows, self.plan.keys
            request = self._request(q_NBHD.movedim(0, 2), k, v, visiting.mask, rows, keys, wide=True)
            with self._span("forward visiting rows", COMPUTE):
                result = self._kernel(request, needs_backward).forward(request)
            parts = [x.to(wide).movedim(2, 0) for x in (result.out, result.lse, result.max_score)]
        ended = self._begin("outputs of visiting rows", REDUCTION)
        return lane.start(lambda: start_group_reduce(parts, visiting.hop, self.group, "lse", None, ended), parts)

    def _serve_backward(
        self, lane: Lane, visitors: list[Tensor], k: Tensor, v: Tensor, wide: torch.dtype
    ) -> tuple[AttentionGradients | None, Callable[[], list[Tensor]]]:
        """Gradients of visiting rows over this rank's keys; dq travels back, rows first."""
        visiting = self.plan.visiting
        assert visiting is not None
        q, out, lse, d_out, *d_lse = (x.movedim(0, 2) for x in visitors)
        grads, dq_NBHD = None, visitors[0].new_zeros(visitors[0].shape, dtype=wide)
        if not visiting.empty:
            request = self._request(q, k, v, visiting.mask, visiting.rows, self.plan.keys, wide=True)
            with self._span("backward visiting rows", COMPUTE):
                kernel = self._kernel(request, True)
                grads = kernel.backward(request, out, lse, d_out, d_lse[0] if d_lse else None)
            dq_NBHD = grads.dq.to(wide).movedim(2, 0)
        ended = self._begin("gradients of visiting rows", REDUCTION)
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
        self._check(q_BHQD, k_BGKD, v_BGKE)
        wide = wide_dtype(q_BHQD)
        dq: Tensor | None = None
        totals: list[Tensor] = []  # dk and dv of the rank's own keys, rows first, as they travel
        captured: list[Tensor | None] = [None] * len(self.score.captures)
        lane = Lane(q_BHQD.device)
        sent = [q_BHQD, out, lse, d_out] + ([] if d_lse is None else [d_lse])
        visitors = self._send_queries(lane, sent)
        returning: Callable[[], list[Tensor]] | None = None
        leaving: Callable[[], list[Tensor]] | None = None
        for key_set, k, v in self._key_sets(k_BGKD, v_BGKE, kept):
            if key_set.empty:
                parts = [x.new_zeros((x.shape[2], *x.shape[:2], x.shape[3]), dtype=wide) for x in (k, v)]
            else:
                request = self._request(q_BHQD, k, v, key_set.mask, self.plan.rows, key_set.keys, wide=True)
                with self._span(f"backward {key_set.name}", COMPUTE):
                    grads = self._kernel(request, True).backward(request, out, lse, d_out, d_lse)
                    dq = grads.dq if dq is None else dq.add_(grads.dq)
                    captured = add_captured(captured, grads)
                parts = [x.to(wide).movedim(2, 0) for x in (grads.dk, grads.dv)]
            if not key_set.hops:
                totals = [x.contiguous() for x in parts]
                if visitors is not None:
                    grads, returning = self._serve_backward(lane, visitors(), k, v, wide)
                    if grads is not None:
                        for total, part in zip(totals, (grads.dk, grads.dv), strict=True):
                            total += part.movedim(2, 0)
                        captured = add_captured(captured, grads)
                continue
            if leaving is not None:
                leaving()
            leaving = self._reduce(lane, parts, key_set, totals)
        if leaving is not None:
            leaving()
        if dq is None:
            dq = torch.zeros_like(q_BHQD, dtype=wide)
        if returning is not None:
            dq += returning()[0].movedim(0, 2)
        dq = empty_in_order(q_BHQD, q_BHQD.shape, fill_order(q_BHQD)).copy_(dq)
        dk, dv = (
            empty_in_order(x, x.shape, fill_order(x)).copy_(grad.movedim(0, 2))
            for x, grad in zip((k_BGKD, v_BGKE), totals, strict=True)
        )
        return AttentionGradients(dq, dk, dv, tuple(captured))

    def _reduce(
        self, lane: Lane, parts: list[Tensor], key_set: KeySet, totals: list[Tensor]
    ) -> Callable[[], list[Tensor]]:
        ended = self._begin(f"gradients of {key_set.name}", REDUCTION)
        return lane.start(
            lambda: start_group_reduce(parts, key_set.hops, self.group, "sum", totals, ended), [*parts, *totals]
        )
