"""One set of gloo processes for all distributed tests: functions are sent to the ranks and run in a group of them."""

from __future__ import annotations

import datetime
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

RANKS = 8
GROUP_SIZES = (1, 2, 3, 4, 6, 8)
TIMEOUT_S = 60
MESH_SHAPES = (*((size,) for size in GROUP_SIZES), (2, 2), (2, 2, 2))

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of the first ranks, inside of a function that World runs on just these."""
    made = _meshes[shape]
    groups = [made.get_group(i) for i in range(len(shape))]
    return DeviceMesh.from_group(groups if len(shape) > 1 else groups[0], "cpu", made.mesh, mesh_dim_names=names)


def fork_context() -> Any:
    """Processes that start from one in which torch and the package are imported already."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "magi_flex.distributed.context_parallel", "inductor_lowering.install"]
    )
    return context


def _serve(rank: int, store: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    groups = {size: dist.new_group(list(range(size))) for size in GROUP_SIZES}
    for shape in MESH_SHAPES:  # every rank has to take part in making the groups of a mesh
        size = torch.Size(shape).numel()
        _meshes[shape] = DeviceMesh("cpu", torch.arange(size).view(shape))
    while (task := tasks.get()) is not None:
        function, size, args = task
        try:
            torch.manual_seed(0)
            results.put((rank, None, function(groups[size], *args)))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))
    dist.destroy_process_group()


class World:
    """RANKS processes; :meth:`run` calls a module-level function on the first ``size`` of them."""

    def __init__(self) -> None:
        context = fork_context()
        self.folder = tempfile.TemporaryDirectory()
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(RANKS)]
        store = str(Path(self.folder.name) / "store")
        self.processes = [
            context.Process(target=_serve, args=(rank, store, self.tasks[rank], self.results), daemon=True)
            for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        """``function(group, *args)`` on ranks 0 to size - 1; their results by rank.  Raises what any rank raised."""
        for rank in range(size):
            self.tasks[rank].put((function, size, args))
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        for _ in range(size):
            rank, error, value = self.results.get(timeout=3 * TIMEOUT_S)
            values[rank] = value
            if error is not None:
                errors[rank] = error
        if errors:
            raise AssertionError("\n".join(f"rank {rank}: {errors[rank]}" for rank in sorted(errors)))
        return [values[rank] for rank in range(size)]

    def close(self) -> None:
        for tasks in self.tasks:
            tasks.put(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()
