"""The kernels of native group collectives: all ranks played by one process, against indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from magi_flex.distributed.dispatch import Dispatch
from magi_flex.distributed.exchange_plan import build_exchange_plan
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.key_ranges import needed_ranges
from magi_flex.distributed.native_exchange import as_words, build_native, merge_rows, push_rows, sum_rows
from magi_flex.distributed.native_kernels import flags_kernel
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.merge import merge_lse

ROWS, PROGRAMS, OFFSET = 29, 3, 256


def plans(ranks: int, seed: int) -> list[GroupPlan]:
    """Every rank's plan of one exchange: a random mask over rows and keys with random owners."""
    generator = torch.Generator().manual_seed(seed)
    mask = RowIntervals.from_dense(torch.rand(1, 1, ROWS, ROWS, generator=generator) < 0.3)
    dispatches = []
    for _ in range(2):
        owner, row = torch.randint(0, ranks, (ROWS,), generator=generator), torch.arange(ROWS)
        dispatches.append(Dispatch.from_segments(ROWS, ranks, owner, row, row + 1))
    needed = needed_ranges(mask, dispatches[0])
    made = [build_exchange_plan(mask, *dispatches, rank, needed).stages[0].hops[0] for rank in range(ranks)]
    counts = torch.stack([plan.send_counts for plan in made])
    return [build_native(plan, counts, rank, "cpu") for rank, plan in enumerate(made)]


def pushed(tensors: list[Tensor], made: list[GroupPlan], reduce: bool) -> list[Tensor]:
    """What arrives at each rank, when every rank pushes the rows of its tensor."""
    ranks = len(made)
    rows = [len(plan.send_index) if reduce else plan.out_rows for plan in made]
    row_bytes = tensors[0].shape[1:].numel() * tensors[0].element_size()
    staging = [torch.full((OFFSET + n * row_bytes,), 0x55, dtype=torch.uint8) for n in rows]
    peers = torch.tensor([buffer.data_ptr() for buffer in staging])
    for plan, x in zip(made, tensors, strict=True):
        index = plan.recv_index if reduce else plan.send_index
        routes = plan.native.reduce_routes if reduce else plan.native.cast_routes
        push_rows(x, index, routes, peers, OFFSET, PROGRAMS)
    assert all((buffer[:OFFSET] == 0x55).all() for buffer in staging)
    assert [int(plan.native.most_rows[int(reduce)]) for plan in made] == [max(rows)] * ranks
    dtype, shape = tensors[0].dtype, tensors[0].shape[1:]
    return [buffer[OFFSET:].view(dtype).view(n, *shape) for buffer, n in zip(staging, rows, strict=True)]


def expected(tensors: list[Tensor], made: list[GroupPlan], reduce: bool) -> list[Tensor]:
    """The same by an all-to-all of lists."""
    parts = []
    for plan, x in zip(made, tensors, strict=True):
        index, counts = (plan.recv_index, plan.recv_counts) if reduce else (plan.send_index, plan.send_counts)
        parts.append(x[index].split(counts.tolist()))
    return [torch.cat([sent[rank] for sent in parts]) for rank in range(len(made))]


LAYOUTS = {
    "contiguous": lambda n: torch.randn(n, 3, 16).bfloat16(),
    "heads first": lambda n: torch.randn(2, 3, n, 8).movedim(2, 0),
    "odd": lambda n: torch.randn(n, 3).bfloat16(),
    "narrow": lambda n: torch.randn(n),
    "bytes": lambda n: torch.rand(n, 5) < 0.5,
    "columns": lambda n: torch.randn(7, n).double().T,
    "wide": lambda n: torch.randn(n, 1100),
    "sliced": lambda n: torch.randn(n, 2, 9).bfloat16()[:, :, 1:],
    "deep": lambda n: torch.randn(n, 2, 1, 2, 3, 4).transpose(1, 3),
    "empty rows": lambda n: torch.randn(n, 0),
}


@pytest.mark.parametrize("layout,reduce", [*((layout, False) for layout in LAYOUTS), ("heads first", True)])
def test_push(layout: str, reduce: bool) -> None:
    torch.manual_seed(0)
    made = plans(3, 1)
    tensors = [LAYOUTS[layout](plan.out_rows if reduce else plan.in_rows) for plan in made]
    for actual, wanted in zip(pushed(tensors, made, reduce), expected(tensors, made, reduce), strict=True):
        assert torch.equal(actual, wanted)


def test_words_are_views() -> None:
    x = torch.randn(2, 3, 5, 8).bfloat16().movedim(2, 0)
    words = as_words(x)
    assert words.data_ptr() == x.data_ptr() and words.dtype == torch.int32 and words.shape == (5, 2, 3, 4)
    assert as_words(torch.zeros(4, 6).bfloat16()[:, 1:]).dtype == torch.int16


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_join(ranks: int, dtype: torch.dtype) -> None:
    """Sums bit for bit as added one source after the other; log-sum-exp as merge_lse."""
    torch.manual_seed(2)
    made = plans(ranks, 3)
    partial = [torch.randn(plan.out_rows, 2, 5, dtype=dtype) for plan in made]
    lses = [torch.randn(plan.out_rows, 2, dtype=dtype) * 50 for plan in made]
    for x in lses:
        x[torch.rand(x.shape) < 0.3] = -torch.inf
    received, received_lse = (pushed(x, made, True) for x in (partial, lses))
    for plan, rows, rows_lse in zip(made, received, received_lse, strict=True):
        native = plan.native
        before = torch.randn(plan.in_rows, 2, 5, dtype=dtype)
        before_lse = torch.randn(plan.in_rows, 2, dtype=dtype).masked_fill(
            torch.rand(plan.in_rows, 2) < 0.5, -torch.inf
        )
        total, wanted = before.clone(), before.clone()
        largest, wanted_largest = before_lse.clone(), before_lse.clone()
        out, lse, wanted_out, wanted_lse = (x.clone() for x in (before, before_lse, before, before_lse))
        for place, row in enumerate(plan.send_index.tolist()):
            wanted[row] += rows[place]
            wanted_largest[row] = torch.maximum(wanted_largest[row], rows_lse[place])
            wanted_out[row], wanted_lse[row] = merge_lse(wanted_out[row], wanted_lse[row], rows[place], rows_lse[place])
        sum_rows(total, rows, native.copies, native.row_ptr, PROGRAMS)
        sum_rows(largest, rows_lse, native.copies, native.row_ptr, PROGRAMS, largest=True)
        merge_rows(out, lse, rows, rows_lse, native.copies, native.row_ptr, PROGRAMS)
        assert torch.equal(total, wanted) and torch.equal(largest, wanted_largest)
        torch.testing.assert_close(out, wanted_out)
        torch.testing.assert_close(lse, wanted_lse)


def test_flags() -> None:
    """A rank tells all ranks, and goes on when all have told it."""
    pads = [torch.zeros(3, dtype=torch.int32) for _ in range(3)]
    addresses = torch.tensor([pad.data_ptr() for pad in pads])
    for call in (1, 2):
        for rank in range(3):
            flags_kernel[(1,)](addresses, rank, call, RANKS=3, LANES=4, SIGNAL=True, WAIT=False)
        for rank in range(3):
            flags_kernel[(1,)](addresses, rank, call, RANKS=3, LANES=4, SIGNAL=False, WAIT=True)
        assert all((pad == call).all() for pad in pads)
