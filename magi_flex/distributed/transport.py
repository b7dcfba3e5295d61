"""Rows over the wire: one variable-size all-to-all for any number of tensors.

The rows of all tensors are packed side by side as bytes, so that a pair of ranks exchanges one message per call.

Shape legend: S sent rows, T received rows, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed.row_copies import copy_rows

ALIGNMENT = 16  # bytes; the start of every tensor inside a packed row


@dataclass(frozen=True)
class RowFormat:
    """Shape and dtype of one tensor's rows, and where they lie in a packed row."""

    shape: torch.Size
    dtype: torch.dtype
    begin: int
    end: int


def row_formats(tensors: Sequence[Tensor]) -> tuple[list[RowFormat], int]:
    """Formats of the tensors' rows (first dimension) and the bytes of a packed row."""
    formats, position = [], 0
    for x in tensors:
        size = x.shape[1:].numel() * x.element_size()
        formats.append(RowFormat(x.shape[1:], x.dtype, position, position + size))
        position += -(-size // ALIGNMENT) * ALIGNMENT
    return formats, formats[-1].end if len(tensors) == 1 else position


class RowExchange:
    """Rows on their way; :meth:`wait` gives the received rows of each tensor."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        index: Tensor,
        send_splits: list[int],
        recv_splits: list[int],
        group: dist.ProcessGroup,
    ):
        """Starts to send rows ``index`` (int64 ``[S]``, in order of destination) of every tensor; splits: rows to and
        from each rank."""
        self.formats, row_bytes = row_formats(tensors)
        packed = torch.empty((index.shape[0], row_bytes), dtype=torch.uint8, device=tensors[0].device)
        copy_rows(tensors, [self._column(packed, form) for form in self.formats], index)
        self.received = packed.new_empty((sum(recv_splits), row_bytes))
        self.packed = packed  # kept alive until it has been sent
        self.work = dist.all_to_all_single(self.received, packed, recv_splits, send_splits, group=group, async_op=True)

    @staticmethod
    def _column(packed: Tensor, form: RowFormat) -> Tensor:
        """One tensor's rows inside of packed ones, a view."""
        rows, row_bytes = packed.shape
        steps = [1]
        for size in reversed(form.shape[1:]):
            steps.insert(0, steps[0] * size)
        size = form.dtype.itemsize
        strides = (row_bytes // size, *steps[: len(form.shape)])
        return packed.view(form.dtype).as_strided((rows, *form.shape), strides, form.begin // size)

    def notify(self, on_done: Callable[[], None]) -> None:
        """Call ``on_done`` once the rows have arrived."""
        self.work.get_future().then(lambda _: on_done())

    def wait(self) -> list[Tensor]:
        """``[T, ...]`` for each tensor, in order of source; views of one buffer."""
        self.work.wait()
        return [self._column(self.received, form) for form in self.formats]
