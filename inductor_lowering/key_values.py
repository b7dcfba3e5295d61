"""Values of the keys, and which keys compare as asked with a value of the row.

A comparison with a monotone sequence is a binary search.  A sequence that is not monotone as a whole is cut into
monotone segments; inside a row's key intervals few of them matter (a position inside documents is monotone in each).

Shape legend: B batch, H query heads (1 where it does not matter), G = B * H, Q query rows, K keys, N runs or segments.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_INT64_MAX = torch.iinfo(torch.int64).max


class KeyValues:
    """Whole numbers of the keys, int64 ``[B, H, 1, K]``, with what is known about their order."""

    def __init__(self, values_BH1K: Tensor) -> None:
        self.shape_BH = tuple(values_BH1K.shape[:2])
        self.values_GK = values_BH1K.flatten(0, 2)
        self.length = values_BH1K.shape[3]
        self._expanded: KeyValues | None = None

    @functools.cached_property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value (there is at least one key)."""
        low, high = torch.aminmax(self.values_GK)
        return int(low), int(high)

    @functools.cached_property
    def negated(self) -> KeyValues:
        return KeyValues((-self.values_GK).view(*self.shape_BH, 1, self.length))

    def expand(self, batch: int, heads: int) -> KeyValues:
        """For this many batch entries and heads, unless the values are the same for all of them."""
        if self.shape_BH in ((1, 1), (batch, heads)):
            return self
        if self._expanded is None or self._expanded.shape_BH != (batch, heads):
            values = self.values_GK.view(*self.shape_BH, 1, self.length)
            self._expanded = KeyValues(values.expand(batch, heads, 1, self.length))
        return self._expanded

    @functools.cached_property
    def first_if_consecutive(self) -> int | None:
        """The first value if the values are v, v + 1, v + 2, ... in every batch entry and head."""
        first = self.values_GK[:, 0]
        if bool((first != first[0]).any()) or bool((self.values_GK.diff(dim=1) != 1).any()):
            return None
        return int(first[0])

    @functools.cached_property
    def is_ascending(self) -> bool:
        return bool((self.values_GK[:, 1:] >= self.values_GK[:, :-1]).all())

    @functools.cached_property
    def is_descending(self) -> bool:
        return bool((self.values_GK[:, 1:] <= self.values_GK[:, :-1]).all())

    # ---- binary search ------------------------------------------------------------------------------------------

    def count_below(self, rows_GQ: Tensor, or_equal: bool) -> Tensor:
        """Of an ascending sequence: how many keys are < (or <=) each row's value, int64 ``[G, Q]``."""
        first = self.first_if_consecutive
        if first is not None:
            return (rows_GQ.clamp(first - 1, first + self.length) - first + int(or_equal)).clamp(0, self.length)
        return _search(self.values_GK, rows_GQ, right=or_equal)

    # ---- segments -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def drops_GK(self) -> Tensor:
        """How many times the value has dropped up to and including key k, int64 ``[G, K]``."""
        drops = torch.nn.functional.pad(self.values_GK[:, 1:] < self.values_GK[:, :-1], (1, 0))
        return drops.cumsum(1)

    @functools.cached_property
    def drop_keys_GN(self) -> Tensor:
        """The keys at which a new ascending segment begins (0 is the first), padded with K, int64 ``[G, N + 1]``."""
        count = int(self.drops_GK[:, -1].max()) + 1
        out = torch.full((len(self.values_GK), count + 1), self.length, device=self.values_GK.device)
        out[:, 0] = 0
        head, key = (self.drops_GK.diff(dim=1, prepend=self.drops_GK[:, :1] * 0) > 0).nonzero(as_tuple=True)
        out[head, self.drops_GK[head, key]] = key
        return out

    @functools.cached_property
    def segments(self) -> int:
        """Ascending segments of the sequence, the most of any batch entry and head."""
        return self.drop_keys_GN.shape[1] - 1

    @functools.cached_property
    def _ladder(self) -> tuple[Tensor, int]:
        """The values with each segment lifted above the one before, so that one search serves all segments."""
        low, high = self.bounds
        height = high - low + 3
        if self.segments * height >= _INT64_MAX // 2:
            raise OverflowError("the values of the keys are too far apart")
        return self.values_GK - low + 1 + self.drops_GK * height, height

    def count_in_segment(self, rows: Tensor, segment: Tensor, or_equal: bool) -> Tensor:
        """Like count_below inside one segment: the first key (counted from 0) of the segment that is not below.

        rows, segment: int64 ``[G, ...]``.
        """
        ladder_GK, height = self._ladder
        low, high = self.bounds
        target = rows.clamp(low - 1, high + 1) - low + 1 + segment * height
        return _search(ladder_GK, target.flatten(1), right=or_equal).view(target.shape)

    # ---- runs of equal values -------------------------------------------------------------------------------------

    @functools.cached_property
    def _runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Maximal runs of equal values, sorted by value and then by key: value, begin, end, int64 ``[G, N]``."""
        changes = torch.nn.functional.pad(self.values_GK[:, 1:] != self.values_GK[:, :-1], (1, 0), value=True)
        number_GK = changes.cumsum(1) - 1
        most = int(number_GK[:, -1].max()) + 1
        head, begin_key = changes.nonzero(as_tuple=True)
        run = number_GK[head, begin_key]
        size = (len(self.values_GK), most)
        value = torch.full(size, _INT64_MAX, device=changes.device)
        begin = torch.full((size[0], most + 1), self.length, device=changes.device)
        value[head, run] = self.values_GK[head, begin_key]
        begin[head, run] = begin_key
        end = begin[:, 1:]
        value, order = value.sort(dim=1, stable=True)
        return value, begin[:, :-1].gather(1, order), end.gather(1, order)

    def equal_run_range(self, rows_GQ: Tensor) -> tuple[Tensor, Tensor]:
        """First and one past the last of the runs whose value is the row's, int64 ``[G, Q]``."""
        value, _, _ = self._runs
        rows_GQ = rows_GQ.clamp(max=_INT64_MAX - 1)
        return _search(value, rows_GQ, right=False), _search(value, rows_GQ, right=True)

    def runs_at(self, run: Tensor) -> tuple[Tensor, Tensor]:
        """Begin and end of runs ``[G, ...]`` (numbers past the last give an empty run)."""
        _, begin, end = self._runs
        flat = run.flatten(1).clamp(max=begin.shape[1] - 1)
        valid = run.flatten(1) < begin.shape[1]
        begin = begin.expand(len(flat), -1).gather(1, flat)
        end = torch.where(valid, end.expand(len(flat), -1).gather(1, flat), 0)
        return begin.view(run.shape), end.view(run.shape)


def _search(sorted_GN: Tensor, rows_GQ: Tensor, right: bool) -> Tensor:
    """torch.searchsorted with either G broadcast."""
    if len(sorted_GN) == 1:
        return torch.searchsorted(sorted_GN[0], rows_GQ.contiguous(), right=right)
    groups = max(len(sorted_GN), len(rows_GQ))
    sorted_GN = sorted_GN.expand(groups, -1).contiguous()
    return torch.searchsorted(sorted_GN, rows_GQ.expand(groups, -1).contiguous(), right=right)
