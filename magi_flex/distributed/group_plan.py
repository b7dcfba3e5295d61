"""GroupPlan: which rows one rank sends where and where received rows go, for one group_cast (and its group_reduce).

Shape legend: P ranks, S sent rows, T received rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magi_flex.distributed.dispatch import expand_ranges


@dataclass(frozen=True)
class NativePlan:
    """What native collectives know beyond a GroupPlan (native_exchange.py): where a rank's rows go at the others.

    Attributes:
        cast_routes, reduce_routes: int64 ``[P, 4]`` on the device: a destination, the first of its rows in sending
            order, their number, and where they begin among the rows that the destination receives.
        copies: int64 ``[S]`` on the device, received rows of a reduction, by the row that they belong to and in order
            of source.
        row_ptr: int64 ``[in_rows + 1]`` on the device, where a row's copies begin.
        most_rows: int64 ``[2]`` (CPU), the largest number of rows that any rank receives in a cast and in a reduction.
    """

    cast_routes: Tensor
    reduce_routes: Tensor
    copies: Tensor
    row_ptr: Tensor
    most_rows: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.cast_routes, self.reduce_routes, self.copies, self.row_ptr, self.most_rows]


@dataclass(frozen=True)
class GroupPlan:
    """One rank's part of a cast: rows go to any number of ranks, and what arrives is put in a chosen order.

    Attributes:
        in_rows, out_rows: rows of the cast's input and output (of a reduce's output and input).
        send_index: int64 ``[S]``, input rows in sending order: by destination, then in the order that the destination
            expects.
        send_counts: int64 ``[P]`` (CPU), rows for each destination.
        recv_counts: int64 ``[P]`` (CPU), rows from each source.
        recv_index: int64 ``[T]``, output row of each received row; none occurs twice.  Output rows that do not occur
            are left as they are, or 0 where the cast makes its output (see :meth:`among`).
        native: for kernels that write into other GPUs' memory; None: rows travel by all-to-all.
    """

    in_rows: int
    out_rows: int
    send_index: Tensor
    send_counts: Tensor
    recv_counts: Tensor
    recv_index: Tensor
    native: NativePlan | None = None

    def __post_init__(self) -> None:
        if len(self.send_index) != int(self.send_counts.sum()):
            raise ValueError(
                f"send_index: has {len(self.send_index)} rows, send_counts add up to {self.send_counts.sum()}"
            )
        if not len(self.recv_index) == int(self.recv_counts.sum()) <= self.out_rows:
            raise ValueError(
                f"recv_index: has {len(self.recv_index)} rows, recv_counts add up to {int(self.recv_counts.sum())} and "
                f"out_rows is {self.out_rows}; the first two must be equal, and out_rows at least as large"
            )

    @staticmethod
    def from_splits(
        in_splits: Sequence[int],
        destinations: Sequence[Sequence[int]],
        out_splits: Sequence[int],
        sources: Sequence[int],
        ranks: int,
    ) -> GroupPlan:
        """From row blocks: input block i goes to every rank of ``destinations[i]``; output block j comes from
        ``sources[j]``.  Blocks of one (source, destination) pair keep their order, and their sizes must agree.

        Raises:
            ValueError: lists of different lengths, negative sizes, ranks out of range or named twice for a block.
        """
        if len(in_splits) != len(destinations):
            raise ValueError(
                f"destinations: {len(destinations)} lists for {len(in_splits)} in_splits; give one for each"
            )
        if len(out_splits) != len(sources):
            raise ValueError(f"sources: {len(sources)} ranks for {len(out_splits)} out_splits; give one for each")
        if min([*in_splits, *out_splits], default=0) < 0:
            raise ValueError(f"in_splits, out_splits: {list(in_splits)}, {list(out_splits)}; sizes are at least 0")
        named = [rank for ranks_of in destinations for rank in ranks_of] + list(sources)
        if named and not 0 <= min(named) <= max(named) < ranks:
            raise ValueError(f"destinations, sources: ranks {min(named)} to {max(named)}; allowed are 0 to {ranks - 1}")
        if any(len(set(ranks_of)) != len(ranks_of) for ranks_of in destinations):
            raise ValueError("destinations: a block names a rank twice; name each destination once")
        in_end = torch.tensor([0, *in_splits]).cumsum(0).tolist()
        out_end = torch.tensor([0, *out_splits]).cumsum(0).tolist()
        sends = sorted((rank, block) for block, ranks_of in enumerate(destinations) for rank in ranks_of)
        receives = sorted((rank, block) for block, rank in enumerate(sources))
        return GroupPlan.from_blocks(
            in_end[-1],
            out_end[-1],
            [(rank, in_end[block], in_end[block + 1]) for rank, block in sends],
            [(rank, out_end[block], out_end[block + 1]) for rank, block in receives],
            ranks,
        )

    @staticmethod
    def from_blocks(
        in_rows: int,
        out_rows: int,
        sends: Sequence[tuple[int, int, int]] | Tensor,
        receives: Sequence[tuple[int, int, int]] | Tensor,
        ranks: int,
    ) -> GroupPlan:
        """From (destination, begin, end) in input rows and (source, begin, end) in output rows, each sorted by rank."""
        indices, counts = [], []
        for blocks in (sends, receives):
            table = torch.as_tensor(blocks, dtype=torch.int64).reshape(-1, 3)
            indices.append(expand_ranges(table[:, 1], table[:, 2]))
            counts.append(torch.zeros(ranks, dtype=torch.int64).index_add_(0, table[:, 0], table[:, 2] - table[:, 1]))
        return GroupPlan(in_rows, out_rows, indices[0], counts[0], counts[1], indices[1])

    def among(self, positions: Tensor, out_rows: int) -> GroupPlan:
        """The same rows put among others: output row i becomes row ``positions[i]`` (int64) of ``out_rows``."""
        return replace(self, out_rows=out_rows, recv_index=positions[self.recv_index])

    def to(self, device: torch.device | str) -> GroupPlan:
        """The same plan with its index tensors on ``device``."""
        return replace(self, send_index=self.send_index.to(device), recv_index=self.recv_index.to(device))

    @functools.cached_property
    def send_splits(self) -> list[int]:
        """``send_counts``, read once."""
        return self.send_counts.tolist()

    @functools.cached_property
    def recv_splits(self) -> list[int]:
        return self.recv_counts.tolist()

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.send_index, self.send_counts, self.recv_counts, self.recv_index))
