"""Masks of a simple shape, found from their intervals: bands along the diagonal (full, causal, sliding windows) and
packed documents.  Libraries have flags and entry points of their own for these.

Shape legend: B mask batch, H mask heads (1 = shared), R intervals of a row, Q query rows, K keys, N documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals


@dataclass(frozen=True)
class Band:
    """Row q attends to the keys from p - left to p + right, where p = q + K - Q: the last row is at the last key.

    None: no bound on that side; the others are not negative.  Every row attends to some key.
    """

    left: int | None
    right: int | None

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0

    def area(self, q_len: int, kv_len: int) -> int:
        """Attended (query, key) pairs."""
        own = torch.arange(kv_len - q_len, kv_len)
        first = torch.zeros_like(own) if self.left is None else (own - self.left).clamp(min=0)
        end = torch.full_like(own, kv_len) if self.right is None else (own + self.right + 1).clamp(max=kv_len)
        return int((end - first).clamp(min=0).sum())


@dataclass(frozen=True, eq=False)
class Documents:
    """Rows are keys, cut into documents; a row attends to its own document, up to itself if ``causal``.

    Attributes:
        bounds: int32 ``[N + 1]``, where documents begin and end, counted on over the mask's batch (row q of batch entry
            b is b * Q + q).
        longest: rows of the longest document.
    """

    bounds: Tensor
    causal: bool
    longest: int

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def repeated(self, batch: int, q_len: int) -> Documents:
        """Of one batch entry, for ``batch`` equal ones of ``q_len`` rows."""
        first_row = torch.arange(batch, device=self.bounds.device, dtype=torch.int32)[:, None] * q_len
        bounds = torch.cat(((self.bounds[:-1] + first_row).flatten(), self.bounds.new_tensor([batch * q_len])))
        return Documents(bounds, self.causal, self.longest)


Structure = Band | Documents


def find_structure(intervals: RowIntervals) -> Structure | None:
    """The mask's structure, or None where it has none of these; the same for all heads.

    Reads the data: one transfer from the mask's device, and two more where there are documents.
    """
    q_len, kv_len = intervals.q_len, intervals.kv_len
    if 0 in intervals.starts.shape or kv_len == 0:
        return None
    starts_BHQ, ends_BHQ = intervals.starts[:, :, 0], intervals.ends[:, :, 0]
    single = (intervals.ends[:, :, 1:] <= intervals.starts[:, :, 1:]).all()
    left, right = kv_len - 1 - starts_BHQ[0, 0, -1].long(), ends_BHQ[0, 0, 0].long() - 1 - (kv_len - q_len)
    is_band = single & _is_band(starts_BHQ, ends_BHQ, kv_len, left, right)
    documents = causal = torch.zeros_like(is_band)
    if q_len == kv_len and starts_BHQ.shape[1] == 1:
        documents, causal = (single & x for x in _is_packed(starts_BHQ[:, 0], ends_BHQ[:, 0]))
    found = torch.stack((is_band.long(), documents.long(), causal.long(), left, right)).tolist()
    if found[0]:
        return Band(found[3] if found[3] < kv_len - 1 else None, found[4] if found[4] < q_len - 1 else None)
    if not found[1] and not found[2]:
        return None
    batch = starts_BHQ.shape[0]
    row_Q = torch.arange(q_len, device=starts_BHQ.device)
    begins = (starts_BHQ[:, 0] == row_Q).flatten().nonzero().squeeze(1)
    bounds = torch.cat((begins, begins.new_tensor([batch * q_len])))
    return Documents(bounds.to(torch.int32), bool(found[2]), int(bounds.diff().max()))


def _is_band(starts_BHQ: Tensor, ends_BHQ: Tensor, kv_len: int, left: Tensor, right: Tensor) -> Tensor:
    """Whether these are the bounds of Band(left, right), a 0-d bool tensor."""
    q_len = starts_BHQ.shape[2]
    place_Q = torch.arange(q_len, device=starts_BHQ.device) + (kv_len - q_len)
    same = (starts_BHQ == (place_Q - left).clamp(min=0)) & (ends_BHQ == (place_Q + right + 1).clamp(max=kv_len))
    return same.all() & (left >= 0) & (right >= 0) & (ends_BHQ > starts_BHQ).all()


def _is_packed(starts_BQ: Tensor, ends_BQ: Tensor) -> tuple[Tensor, Tensor]:
    """Whether rows attend to their whole document, and whether to its keys up to themselves."""
    q_len = starts_BQ.shape[1]
    row_Q = torch.arange(q_len, device=starts_BQ.device, dtype=starts_BQ.dtype)
    begins_BQ = starts_BQ == row_Q
    goes_on_BQ = begins_BQ[:, 1:] | (starts_BQ[:, 1:] == starts_BQ[:, :-1])
    cut = goes_on_BQ.all() & begins_BQ[:, 0].all()
    # The last row of a document ends it; the others end where the next row does.
    next_end_BQ = torch.where(begins_BQ[:, 1:], row_Q[1:], ends_BQ[:, 1:])
    whole = (ends_BQ[:, :-1] == next_end_BQ).all() & (ends_BQ[:, -1] == q_len).all()
    return cut & whole, cut & (ends_BQ == row_Q + 1).all()
