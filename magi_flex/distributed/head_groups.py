"""Attention of one rank's rows over keys that other ranks hold, where the heads are cut into groups.

The keys of others are put among the rank's own, in the order of the sequence, and each group of heads attends to all
of them in one kernel call: there are no partial results to join, which costs more than moving the keys where links are
fast.  While one group is computed, the keys of the next ones and, in the backward pass, the gradients of the last one
are on their way.  Gradients of keys travel and are added up in float32.

Shape legend: B batch, H query heads (h of a group), G key/value heads (g of a group), Q local rows, K keys (own and
remote), D query/key head dim, E value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.distributed.attention_plan import JoinedKeys, Lane, SharedAttention, add_captured, wide_dtype
from magi_flex.distributed.group_work import GroupWork, start_group_cast, start_group_reduce
from magi_flex.distributed.row_copies import copy_rows
from magi_flex.distributed.timeline import COMPUTE, NETWORK, REDUCTION
from magi_flex.kernels.layout import empty_in_order, fill_order
from magi_flex.kernels.request import AttentionGradients, AttentionOutput, AttentionRequest
from magi_flex.mask_plan import MaskPlan


class _Group(NamedTuple):
    """Heads that are worked on together.

    Attributes:
        name: for the timeline.
        query, key: its query heads and key heads.
        mask: the rank's rows over all keys.
    """

    name: str
    query: slice
    key: slice
    mask: MaskPlan


@dataclass(frozen=True)
class GroupedAttention(SharedAttention):
    """Attention over a plan's joined keys, one group of heads after the other."""

    def forward(
        self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, needs_backward: bool = True, keep_keys: bool = False
    ) -> tuple[AttentionOutput, list[list[Tensor]]]:
        self._check(q_BHQD, k_BGKD, v_BGKE)
        shape = (*q_BHQD.shape[:3], v_BGKE.shape[3])
        out = empty_in_order(q_BHQD, shape, fill_order(q_BHQD))
        lse, max_score = (q_BHQD.new_empty(shape[:3], dtype=wide_dtype(q_BHQD)) for _ in range(2))
        kept: list[list[Tensor]] = []
        for group, k, v in self._groups(q_BHQD.shape[1], k_BGKD, v_BGKE, None):
            if keep_keys:
                kept.append([k, v])
            part = AttentionOutput(*(x[:, group.query] for x in (out, lse, max_score)))
            if self._joined.empty:
                part.out.zero_()
                part.lse.fill_(-torch.inf)
                part.max_score.fill_(-torch.inf)
                continue
            request = self._request_of(group, q_BHQD, k, v, wide=False)
            with self._span(f"forward {group.name}", COMPUTE):
                self._kernel(request, needs_backward).forward_into(request, part)
        return AttentionOutput(out, lse, max_score), kept

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
        dq, dk, dv = (empty_in_order(x, x.shape, fill_order(x)) for x in (q_BHQD, k_BGKD, v_BGKE))
        captured: list[Tensor | None] = [None] * len(self.score.captures)
        lane = self._lane(q_BHQD)
        leaving: list[tuple[_Group, Callable[[], list[Tensor]]]] = []
        for group, k, v in self._groups(q_BHQD.shape[1], k_BGKD, v_BGKE, kept):
            if self._joined.empty:
                dq[:, group.query] = 0
                parts = [torch.zeros_like(x.movedim(2, 0), dtype=wide_dtype(x)) for x in (k, v)]
            else:
                request = self._request_of(group, q_BHQD, k, v, wide=True)
                of_rows = [x[:, group.query] for x in (out, lse, d_out)]
                d_lse_of_rows = None if d_lse is None else d_lse[:, group.query]
                with self._span(f"backward {group.name}", COMPUTE):
                    kernel = self._kernel(request, True)
                    grads = kernel.backward_into(request, *of_rows, d_lse_of_rows, dq[:, group.query])
                captured = add_captured(captured, grads)
                parts = [x.movedim(2, 0) for x in (grads.dk, grads.dv)]
            leaving.append((group, self._reduce(lane, parts, group)))
        for group, arrived in leaving:
            copy_rows(arrived(), [x[:, group.key].movedim(2, 0) for x in (dk, dv)])
        return AttentionGradients(dq, dk, dv, tuple(captured))

    @property
    def _joined(self) -> JoinedKeys:
        assert self.plan.joined is not None
        return self.plan.joined

    def _request_of(
        self, group: _Group, q_BHQD: Tensor, k_BgKD: Tensor, v_BgKE: Tensor, wide: bool
    ) -> AttentionRequest:
        tensors = (q_BHQD[:, group.query], k_BgKD, v_BgKE)
        return self._request(*tensors, group.mask, self.plan.rows, self._joined.keys, wide, group.query.start)

    def _lane(self, like: Tensor) -> Lane:
        return Lane(like.device, beside=len(self._joined.masks) > 1)

    # ---- keys on their way, and their gradients -------------------------------------------------------------------

    def _groups(
        self, q_heads: int, k_BGKD: Tensor, v_BGKE: Tensor, kept: Sequence[Sequence[Tensor]] | None
    ) -> Iterator[tuple[_Group, Tensor, Tensor]]:
        """(group, its k, its v, of all keys) in turn; the keys of all groups are sent for before the first is handed
        out."""
        groups = self._cut(q_heads, k_BGKD.shape[1])
        if kept is not None:
            for group, (k, v) in zip(groups, kept, strict=True):
                yield group, k, v
            return
        own = [[x[:, group.key].movedim(2, 0) for x in (k_BGKD, v_BGKE)] for group in groups]
        every = [[x.new_empty((self._joined.keys.shape[0], *x.shape[1:])) for x in rows] for rows in own]
        casts = [self._cast(*of_group) for of_group in zip(groups, own, every, strict=True)]
        if len(self._joined.hops) == 1 and self._joined.hops[0].native is None:
            # All-to-alls run beside the current stream by themselves.  They begin before any attention, whose kernels
            # hold their multiprocessors to the end; what follows an arrival comes where it is waited for.
            arriving = [work.wait for work in [cast() for cast in casts]]
        else:
            lane, used = self._lane(k_BGKD), [k_BGKD, v_BGKE, *(x for keys in every for x in keys)]
            arriving = [lane.start(cast, used) for cast in casts]
        for group, rows, keys, arrived in zip(groups, own, every, arriving, strict=True):
            copy_rows(rows, keys, target_index=self._joined.own)
            arrived()
            yield group, *(x.movedim(0, 2) for x in keys)

    def _cut(self, q_heads: int, kv_heads: int) -> list[_Group]:
        masks = self._joined.masks
        of_query, of_key = q_heads // len(masks), kv_heads // len(masks)
        groups = []
        for i, mask in enumerate(masks):
            query, key = (slice(i * size, (i + 1) * size) for size in (of_query, of_key))
            groups.append(_Group(f"heads {query.start}:{query.stop}", query, key, mask))
        return groups

    def _cast(self, group: _Group, rows: list[Tensor], into: list[Tensor]) -> Callable[[], GroupWork]:
        ended = self._begin(f"keys of {group.name}", NETWORK)
        return lambda: start_group_cast(rows, self._joined.hops, self.group, ended, into)

    def _reduce(self, lane: Lane, parts: list[Tensor], group: _Group) -> Callable[[], list[Tensor]]:
        """Sums of the gradients (rows first) of the rank's own keys over the ranks."""
        totals = [x.new_empty(self._joined.own.shape[0], *x.shape[1:]) for x in parts]
        copy_rows(parts, totals, self._joined.own)
        ended = self._begin(f"gradients of {group.name}", REDUCTION)
        return lane.start(
            lambda: start_group_reduce(parts, self._joined.hops, self.group, "sum", totals, ended), [*parts, *totals]
        )
