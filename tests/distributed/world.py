"""One set of gloo processes for all distributed tests: functions are sent to the ranks and run in a group of them."""

from __future__ import annotations

import datetime
import faulthandler
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

RANKS = 8
GROUP_SIZES = (1, 2, 3, 4, 6, 8)
TIMEOUT_S = 60
GRACE_S = 10  # for the other ranks, once one has failed
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


def _serve(rank: int, store: str, tasks: Any, results: Any, stacks: Path) -> None:
    faulthandler.register(signal.SIGUSR1, stacks.open("w"))
    torch.set_num_threads(1)
    inductor_config.compile_threads = 1  # no pool of compilers beside each rank
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
        self._start()

    def _start(self) -> None:
        context = fork_context()
        self.folder = tempfile.TemporaryDirectory()
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(RANKS)]
        store = str(Path(self.folder.name) / "store")
        self.processes = [
            context.Process(
                target=_serve, args=(rank, store, self.tasks[rank], self.results, self._stacks(rank)), daemon=True
            )
            for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def _stacks(self, rank: int) -> Path:
        return Path(self.folder.name) / f"stacks{rank}"

    def run(self, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        """``function(group, *args)`` on ranks 0 to size - 1; their results by rank.

        Raises what any rank raised, or where the ranks that gave no answer are; these are replaced by new processes.
        """
        for rank in range(size):
            self.tasks[rank].put((function, size, args))
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(values) < size:
            try:
                rank, error, value = self.results.get(timeout=GRACE_S if errors else 3 * TIMEOUT_S)
            except queue.Empty:
                silent = [rank for rank in range(size) if rank not in values]
                errors |= {rank: f"no answer; it is at\n{self._stack(rank)}" for rank in silent}
                self._stop(kill=True)
                self._start()
                break
            values[rank] = value
            if error is not None:
                errors[rank] = error
        if errors:
            raise AssertionError("\n".join(f"rank {rank}: {errors[rank]}" for rank in sorted(errors)))
        return [values[rank] for rank in range(size)]

    def _stack(self, rank: int) -> str:
        """What a rank is doing."""
        process = self.processes[rank]
        if process.pid is None or not process.is_alive():
            return f"its end (exit code {process.exitcode})"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._stacks(rank).read_text()

    def _stop(self, kill: bool) -> None:
        for process, tasks in zip(self.processes, self.tasks, strict=True):
            if not kill:
                tasks.put(None)
                process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()

    def close(self) -> None:
        self._stop(kill=False)
