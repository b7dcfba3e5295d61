"""Rows written straight into other GPUs' memory, with the interface of transport.RowExchange.

A Triton kernel on a few multiprocessors reads rows where they lie and stores them in the staging buffers of their
destinations; a flag a rank says that they are there.  What arrives is read in place by the caller, or joined to
accumulators by one kernel.  Everything is queued on the current stream when the exchange starts.

Shape legend: S sent rows, T received rows, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed.agreement import all_gather
from magi_flex.distributed.exchange_plan import ExchangePlan
from magi_flex.distributed.group_plan import GroupPlan, NativePlan
from magi_flex.distributed.native_buffers import ALIGNMENT, StagingBuffers, buffers

MULTIPROCESSORS = 16  # that an exchange takes
_BLOCK_WORDS = 1 << 14  # in flight on each of them, to keep a link busy from so few
_WARPS = 16
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


def serves(tensors: Sequence[Tensor]) -> bool:
    """Whether an exchange of these tensors can be a native one; the same on every rank."""
    # a replay of a captured call would repeat its number
    return all(x.is_cuda for x in tensors) and not torch.cuda.is_current_stream_capturing()


def with_native(plan: GroupPlan, group: dist.ProcessGroup, device: torch.device) -> GroupPlan:
    """The plan with what native collectives need, on the device.  A collective.

    Raises:
        ValueError: on every rank, if the counts of some pair of ranks do not agree.
    """
    return build_native(plan, gather_counts(plan, group), group.rank(), device)


def with_native_hops(plan: ExchangePlan, group: dist.ProcessGroup, device: torch.device) -> ExchangePlan:
    """An exchange plan whose hops all are :func:`with_native`.  A collective."""
    stages = tuple(
        replace(stage, hops=tuple(with_native(hop, group, device) for hop in stage.hops)) for stage in plan.stages
    )
    queries = plan.queries
    if queries is not None:
        queries = replace(queries, hop=with_native(queries.hop, group, device))
    return replace(plan, stages=stages, queries=queries)


def build_native(plan: GroupPlan, counts: Tensor, rank: int, device: torch.device | str) -> GroupPlan:
    """:func:`with_native` from the rows that each rank sends to each, int64 ``[source, destination]``."""
    ranks = len(counts)
    order = torch.tensor([(rank + 1 + i) % ranks for i in range(ranks)])  # not all ranks begin with the same one

    def routes(rows: Tensor, base: Tensor) -> Tensor:
        table = torch.stack((torch.arange(ranks), rows.cumsum(0) - rows, rows, base), 1)
        return table[order].to(device)

    copies = torch.argsort(plan.send_index, stable=True)
    row_ptr = torch.zeros(plan.in_rows + 1, dtype=torch.int64, device=plan.send_index.device)
    row_ptr[1:] = torch.bincount(plan.send_index, minlength=plan.in_rows).cumsum(0)
    native = NativePlan(
        routes(counts[rank], counts[:rank].sum(0)),
        routes(counts[:, rank], counts[:, :rank].sum(1)),
        copies.to(device),
        row_ptr.to(device),
        torch.stack((counts.sum(0).max(), counts.sum(1).max())),
    )
    return replace(plan.to(device), native=native)


def gather_counts(plan: GroupPlan, group: dist.ProcessGroup) -> Tensor:
    """How many rows each rank sends to each, int64 ``[source, destination]`` on the CPU.

    A collective.  Raises ValueError on every rank unless the counts of each pair agree.
    """
    sent, wanted = all_gather(torch.stack((plan.send_counts, plan.recv_counts)), group).unbind(1)
    wrong = (sent != wanted.T).nonzero()
    if len(wrong):
        source, destination = wrong[0].tolist()
        raise ValueError(
            f"plan: rank {source} sends {int(sent[source, destination])} rows to rank {destination}, which expects "
            f"{int(wanted[destination, source])} ({len(wrong)} pairs differ); build the plan from the same input on "
            "every rank"
        )
    return sent


class NativeExchange:
    """Rows on their way; :meth:`wait` gives the received rows of each tensor, which the next but one exchange
    overwrites: take them out, and call :meth:`done`, before another exchange begins."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        index: Tensor,
        routes: Tensor,
        received_rows: int,
        most_rows: int,
        group: dist.ProcessGroup,
    ):
        """Sends rows ``index`` (int64 ``[S]``, in order of destination) of every tensor.

        Args:
            routes: int64 ``[P, 4]`` on the device: see :func:`native_kernels.push_rows_kernel`.
            received_rows: T.
            most_rows: the largest T of any rank.
        """
        self.shapes = [(x.dtype, x.shape[1:]) for x in tensors]
        self.received_rows = received_rows
        self.offsets, total = [], 0
        for dtype, shape in self.shapes:
            self.offsets.append(total)
            total += -(-most_rows * shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.buffers = buffers(group, tensors[0].device, total)
        self.which = self.buffers.begin_call()
        with torch.cuda.device(tensors[0].device):
            for x, offset in zip(tensors, self.offsets, strict=True):
                push_rows(x, index, routes, self.buffers.peers[self.which], offset, MULTIPROCESSORS)
            signal_and_wait(self.buffers)

    def notify(self, on_done: Callable[[], None]) -> None:
        """Call ``on_done`` now: on a GPU it records the moment in stream order."""
        on_done()

    def wait(self) -> list[Tensor]:
        """``[T, ...]`` for each tensor, in order of source; views of the staging buffer."""
        half, out = self.buffers.half(self.which), []
        for (dtype, shape), offset in zip(self.shapes, self.offsets, strict=True):
            size = self.received_rows * shape.numel() * dtype.itemsize
            out.append(half[offset : offset + size].view(dtype).view(self.received_rows, *shape))
        return out

    def done(self) -> None:
        self.buffers.end_call()


def as_words(x: Tensor) -> Tensor:
    """``x`` as integers ``[rows, A, B, words of a row's innermost part]``; a copy only where that is no view."""
    rows = x.shape[0]
    if x.dim() == 1:
        x = x[:, None]
    inner = [1]
    for size in reversed(x.shape[2:]):
        inner.insert(0, inner[0] * size)
    if x.dim() > 4 or list(x.stride()[1:]) == inner:
        x = x.reshape(rows, x.shape[1:].numel())
    while x.dim() < 4:
        x = x[:, None]
    if x.stride(3) != 1:
        x = x.contiguous()
    size = x.element_size()
    bytes_ = [x.shape[3] * size, *(step * size for step in x.stride()[:3]), x.storage_offset() * size, x.data_ptr()]
    width = next(width for width in _WORDS if all(b % width == 0 for b in bytes_))
    return x.view(_WORDS[width])


def _power_of_two(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


def push_rows(x: Tensor, index: Tensor, routes: Tensor, peers: Tensor, offset: int, programs: int) -> None:
    """One tensor's rows to all destinations; ``offset``: bytes from the beginning of a staging buffer."""
    from magi_flex.distributed.native_kernels import push_rows_kernel

    words = as_words(x)
    columns = words.shape[1:].numel()
    if columns == 0 or len(index) == 0:
        return
    block_columns = min(_power_of_two(columns), 2048)
    push_rows_kernel[(programs,)](
        words,
        index,
        routes,
        peers,
        offset // words.element_size(),
        *words.stride()[:3],
        ROUTES=len(routes),
        LANES=_power_of_two(len(routes)),
        SIZE_B=words.shape[2],
        WORDS=words.shape[3],
        COLUMNS=columns,
        BLOCK_ROWS=_BLOCK_WORDS // block_columns,
        BLOCK_COLUMNS=block_columns,
        num_warps=_WARPS,
    )


def signal_and_wait(staging: StagingBuffers) -> None:
    """What this rank pushed is there; returns (in stream order) when that of all others is, too."""
    from magi_flex.distributed.native_kernels import flags_kernel

    ranks = len(staging.pads)
    flags_kernel[(1,)](
        staging.pads,
        staging.group.rank(),
        staging.calls,
        RANKS=ranks,
        LANES=_power_of_two(ranks),
        SIGNAL=True,
        WAIT=True,
        num_warps=1,
    )


def can_join(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels below serve these accumulators and received rows."""
    return all(x.is_cuda and x.is_contiguous() for x in tensors)


def join_rows(accumulators: Sequence[Tensor], received: Sequence[Tensor], plan: NativePlan, op: str) -> None:
    """What came back, joined to the accumulators in place; a third tensor of ``op="lse"`` is joined by maximum."""
    with torch.cuda.device(accumulators[0].device):
        rest = list(zip(accumulators, received, strict=True))
        if op == "lse":
            (out, new_out), (lse, new_lse), *rest = rest
            merge_rows(out, lse, new_out, new_lse, plan.copies, plan.row_ptr, MULTIPROCESSORS)
        for total, rows in rest:
            sum_rows(total, rows, plan.copies, plan.row_ptr, MULTIPROCESSORS, largest=op == "lse")


def sum_rows(
    total: Tensor, received: Tensor, copies: Tensor, row_ptr: Tensor, programs: int, largest: bool = False
) -> None:
    """Adds the copies of each row of ``total`` (contiguous) to it, or takes the largest, in place."""
    from magi_flex.distributed.native_kernels import sum_rows_kernel

    columns = total.shape[1:].numel()
    if columns and len(copies):
        block = min(_power_of_two(columns), 2048)
        sum_rows_kernel[(programs,)](
            total,
            received,
            copies,
            row_ptr,
            len(total),
            COLUMNS=columns,
            BLOCK_ROWS=_BLOCK_WORDS // total.element_size() * 4 // block,
            BLOCK_COLUMNS=block,
            LARGEST=largest,
            num_warps=_WARPS,
        )


def merge_rows(
    out: Tensor,
    lse: Tensor,
    received_out: Tensor,
    received_lse: Tensor,
    copies: Tensor,
    row_ptr: Tensor,
    programs: int,
) -> None:
    """Joins the copies of each row to ``out`` and ``lse`` (contiguous) by their log-sum-exp, in place."""
    from magi_flex.distributed.native_kernels import merge_rows_kernel

    heads, dim = lse.shape[1:].numel(), out.shape[-1]
    if heads and len(copies):
        block_dim = _power_of_two(dim)
        merge_rows_kernel[(programs,)](
            out,
            lse,
            received_out,
            received_lse,
            copies,
            row_ptr,
            len(out),
            HEADS=heads,
            DIM=dim,
            BLOCK_HEADS=min(_power_of_two(heads), max(1, 4096 // block_dim)),
            BLOCK_DIM=block_dim,
            num_warps=8,
        )
