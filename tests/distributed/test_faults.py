"""A rank that dies: every other rank gets an error within the timeout, and does not hang or go on with wrong rows."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from magi_flex.distributed.context_parallel import ContextParallel
from magi_flex.distributed.cost_model import Shape
from magi_flex.distributed.stages import StagedAttention
from magi_flex.distributed.workloads import document_mask
from tests.distributed.world import fork_context

TIMEOUT_S = 5


def _run(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timeout)
    mesh = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, document_mask([60]), forward_stages=2)
    plan = cp.masks[0].plan(Shape(2, 2, 8, 8), backward=True)
    attention = StagedAttention(plan, cp.group, 1.0)
    x = torch.randn(1, 2, len(cp.rows), 8)
    result, _ = attention.forward(x, x, x)
    if rank == 1:
        os._exit(1)
    seen = []
    for work in (
        lambda: attention.backward(x, x, x, result.out, result.lse, x, None),
        lambda: ContextParallel(mesh, document_mask([20, 40])),
    ):
        begin = time.monotonic()
        try:
            work()
            seen.append((None, time.monotonic() - begin))
        except RuntimeError as error:
            seen.append((str(error), time.monotonic() - begin))
    results.put((rank, seen))
    results.close()
    results.join_thread()
    os._exit(0)  # the group has a dead member: it cannot be taken down in order


def test_a_dead_rank_is_an_error_on_the_others() -> None:
    """In the middle of a pass, and when the next mask is planned."""
    context = fork_context()
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        processes = [context.Process(target=_run, args=(rank, f"{folder}/store", results)) for rank in range(3)]
        for process in processes:
            process.start()
        seen = dict(results.get(timeout=120) for _ in range(2))
        assert sorted(seen) == [0, 2]
        for outcomes in seen.values():
            assert len(outcomes) == 2
            for error, seconds in outcomes:
                assert error is not None and seconds < 3 * TIMEOUT_S
        for process in processes:
            process.join(20)
            assert not process.is_alive()
