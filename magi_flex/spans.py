"""Spans: half-open integer ranges in numbered groups, the working form behind tile plans.

A set of spans is three int64 tensors ``[N]`` (group, begin, end).  *Sorted* means by group and begin, disjoint, and not
adjacent inside a group.  All positions are in [0, length].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spans:
    group: Tensor
    begin: Tensor
    end: Tensor

    @staticmethod
    def concat(parts: list[Spans]) -> Spans:
        return Spans(*(torch.cat([getattr(part, name) for part in parts]) for name in ("group", "begin", "end")))

    def select(self, which: Tensor) -> Spans:
        return Spans(self.group[which], self.begin[which], self.end[which])

    def nonempty(self) -> Spans:
        return self.select(self.end > self.begin)

    def size(self) -> Tensor:
        return self.end - self.begin

    def members(self) -> tuple[Tensor, Tensor]:
        """Every position of every span: (index of the span, position)."""
        size = self.size()
        which = torch.repeat_interleave(torch.arange(len(size), device=size.device), size)
        first = size.cumsum(0) - size
        return which, self.begin[which] + torch.arange(len(which), device=size.device) - first[which]


def union(spans: Spans, length: int) -> Spans:
    """The union of (unsorted, overlapping) spans inside each group, sorted."""
    spans = spans.nonempty()
    stride = length + 2  # so that spans of neighbouring groups never touch
    key, order = (spans.group * stride + spans.begin).sort()
    reach = (spans.group * stride + spans.end)[order].cummax(0).values
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = key[1:] > reach[:-1]
    last = torch.ones_like(first)
    last[:-1] = first[1:]
    group = key[first] // stride
    return Spans(group, key[first] % stride, reach[last] - group * stride)


def coverage(spans: Spans, weight: Tensor, length: int) -> tuple[Spans, Tensor]:
    """Sum of the weights of the spans over each position: maximal pieces of equal sum, and their sums (0 left out)."""
    stride = length + 1
    base = spans.group * stride
    key, order = torch.cat((base + spans.begin, base + spans.end)).sort()
    total = torch.cat((weight, -weight))[order].cumsum(0)
    last = torch.ones_like(key, dtype=torch.bool)
    last[:-1] = key[1:] != key[:-1]
    key, total = key[last], total[last]
    changes = torch.ones_like(key, dtype=torch.bool)
    changes[1:] = total[1:] != total[:-1]
    key, total = key[changes], total[changes]
    covered = (total != 0).nonzero().squeeze(1)
    begin = key[covered]
    end = key[covered + 1] if covered.numel() else begin
    group = begin // stride
    return Spans(group, begin - group * stride, end - group * stride), total[covered]


def difference(spans: Spans, subset: Spans, length: int) -> Spans:
    """``spans`` without ``subset``; both sorted, and ``subset`` inside ``spans``."""
    weight = torch.cat((torch.ones_like(spans.begin), -torch.ones_like(subset.begin)))
    return coverage(Spans.concat([spans, subset]), weight, length)[0]


def transpose(spans: Spans, heads: int, rows: int, length: int) -> Spans:
    """Swap groups and positions: for every position, the runs of consecutive groups that hold it.

    Group ``head * rows + row`` at position p becomes group ``head * length + p`` at position row.  ``spans`` must be
    sorted.  The work is in the number of spans plus the number of runs of the result: where neighbouring groups hold
    the same positions nothing happens, so only the differences between a group and the one before are expanded.
    Positions that appear begin a run, positions that vanish end one.
    """
    here = spans.group + spans.group // max(1, rows)  # one more group a head, for the runs that end with the last row
    both = Spans(torch.cat((here, here + 1)), spans.begin.repeat(2), spans.end.repeat(2))
    weight = torch.cat((torch.ones_like(here), -torch.ones_like(here)))
    changed, sign = coverage(both, weight, length)
    bounds = []
    for kind in (1, -1):
        part = changed.select(sign == kind)
        which, position = part.members()
        group = part.group[which]
        head, row = group // (rows + 1), group % (rows + 1)
        bounds.append(((head * length + position) * (rows + 1) + row).sort().values)
    begin, end = bounds
    group = begin // (rows + 1)
    return Spans(group, begin % (rows + 1), end - group * (rows + 1))
