"""Native group collectives against all-to-all: several processes that share one GPU, or a GPU each.

Skipped without a GPU.  On one GPU the processes take turns, so this is about results and not about time.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from magi_flex.distributed import group_work
from magi_flex.distributed.dispatch import Dispatch
from magi_flex.distributed.exchange_plan import build_exchange_plan
from magi_flex.distributed.group_collective import group_cast, group_reduce, native_plan
from magi_flex.distributed.key_ranges import needed_ranges
from magi_flex.distributed.native_exchange import NativeExchange
from magi_flex.intervals import RowIntervals

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Check = Callable[[], None]


def _serve(rank: int, ranks: int, port: int, check: Check) -> None:
    # Multicast is neither needed nor asked for; processes that share a GPU are a test's business only.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    own_gpu = torch.cuda.device_count() >= ranks
    options = {"device_id": device} if own_gpu else {}
    dist.init_process_group(
        "nccl" if own_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
        **options,
    )
    torch.manual_seed(rank)
    check()
    dist.destroy_process_group()


def run(check: Check, ranks: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_serve, (ranks, port, check), ranks)


def plans(rows: int, seed: int, per_node: int = 1):
    """(plain plan, native plan) of an exchange with random rows, keys and owners."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    mask = RowIntervals.from_dense(torch.rand(1, 1, rows, rows, generator=generator) < 0.02)
    dispatches = []
    for _ in range(2):
        owner, row = torch.randint(0, ranks, (rows,), generator=generator), torch.arange(rows)
        dispatches.append(Dispatch.from_segments(rows, ranks, owner, row, row + 1))
    needed = needed_ranges(mask, dispatches[0])
    hops = build_exchange_plan(mask, *dispatches, rank, needed, 1, per_node).stages[0].hops
    device = torch.device("cuda", torch.cuda.current_device())
    return tuple(hop.to(device) for hop in hops), native_plan(hops, device)


def compare(plain, native) -> None:
    """Casts of several dtypes and layouts, and all reductions, both ways."""
    rows, copies = plain[0].in_rows, plain[-1].out_rows
    tensors = [
        torch.randn(2, 3, rows, 64, device="cuda").bfloat16().movedim(2, 0),
        torch.randn(rows, 3, device="cuda").bfloat16(),
        torch.rand(rows, device="cuda") < 0.5,
        torch.randn(rows, 5, device="cuda", dtype=torch.float64),
    ]
    for ours, theirs in zip(group_cast(tensors, native), group_cast(tensors, plain), strict=True):
        assert torch.equal(ours, theirs)
    parts = [torch.randn(copies, 2, 64, device="cuda"), torch.randn(copies, 3, device="cuda").bfloat16()]
    for op in ("sum", "mean"):
        for ours, theirs in zip(group_reduce(parts, native, op=op), group_reduce(parts, plain, op=op), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    lse = torch.randn(copies, 2, device="cuda") * 20
    lse[torch.rand(lse.shape, device="cuda") < 0.3] = -torch.inf
    for ours, theirs in zip(
        group_reduce([parts[0], lse], native, op="lse"), group_reduce([parts[0], lse], plain, op="lse"), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def check_against_all_to_all() -> None:
    started = []

    class Counting(NativeExchange):
        def __init__(self, *args) -> None:
            started.append(self)
            super().__init__(*args)

    with mock.patch.object(group_work, "NativeExchange", Counting):
        for seed, rows in enumerate((40, 300, 129, 1500)):  # the last one lets the buffers grow
            compare(*plans(rows, seed))
    assert len(started) == 4 * 4


def check_two_levels() -> None:
    compare(*plans(300, 5, per_node=2))


def check_many_calls() -> None:
    """Ranks that are late in turn, calls that follow one another without a wait, on changing streams."""
    plain, native = plans(400, 7)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    x = torch.randn(plain[0].in_rows, 8, 64, device="cuda")
    torch.cuda.synchronize()
    results, wanted = [], []
    for i in range(60):
        if i % dist.get_world_size() == dist.get_rank():
            torch.cuda._sleep(1_000_000)
        with torch.cuda.stream(streams[i % 3]):
            results.append(group_cast([x + i], native)[0])
    torch.cuda.synchronize()
    for i in range(60):
        wanted.append(group_cast([x + i], plain)[0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, wanted, strict=True))


def check_gradients() -> None:
    plain, native = plans(200, 9)
    own, copies = plain[0].in_rows, plain[-1].out_rows
    sizes = ((own, 3), (copies, 2, 4), (copies, 2))
    leaves = [torch.randn(size, device="cuda") for size in sizes]
    weights = [torch.randn(copies, 3, device="cuda"), torch.randn(own, 2, 4, device="cuda")]

    def grads(plan) -> list[Tensor]:
        x = [leaf.clone().requires_grad_() for leaf in leaves]
        (rows,) = group_cast(x[:1], plan)
        out, lse = group_reduce(x[1:], plan, op="lse")
        loss = (rows.sin() * weights[0]).sum() + (out * weights[1]).sum() + lse[lse > -torch.inf].sum()
        return list(torch.autograd.grad(loss, x))

    for ours, theirs in zip(grads(native), grads(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


def check_all() -> None:
    for check in (check_against_all_to_all, check_many_calls, check_gradients):
        check()
        print(check.__name__, "passed", flush=True)
    if dist.get_world_size() == 4:
        check_two_levels()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(ranks: int) -> None:
    run(check_all, ranks)
