"""Search tile sizes of the Triton kernels for the GPU at hand; the result goes into the user's cache folder.

python -m magi_flex.kernels.triton_search        # takes minutes
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import triton_launch
from magi_flex.kernels.request import AttentionRequest
from magi_flex.kernels.triton_configs import DIRECTIONS, Tiles, key_of, results_file, shared_bytes, shared_limit
from magi_flex.kernels.triton_score import KernelScore
from magi_flex.mask_plan import MaskPlan

logger = logging.getLogger("magi_flex")

LENGTH, HEADS, KV_HEADS = 4096, 32, 8
HEAD_DIMS = (64, 128, 256)
_ROUNDS = 5

TimeKernel = Callable[[str, torch.dtype, int, Tiles], float]


def candidates(direction: str, head_dim: int, element_size: int, limit: int) -> Iterator[Tiles]:
    """Tiles worth timing that fit into ``limit`` bytes of shared memory."""
    sizes = (32, 64, 128) if element_size == 2 else (16, 32, 64)
    for rows, keys, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3, 4)):
        tiles = Tiles(rows, keys, warps, stages)
        if rows * keys >= 256 * warps and shared_bytes(direction, tiles, head_dim, head_dim, element_size) <= limit:
            yield tiles


def search(time_ms: TimeKernel, limit: int) -> dict[str, Tiles]:
    """The fastest tiles of every direction, element size and head dim; candidates that fail are left out."""
    best: dict[str, Tiles] = {}
    for direction, dtype, head_dim in itertools.product(DIRECTIONS, (torch.bfloat16, torch.float32), HEAD_DIMS):
        fastest = float("inf")
        for tiles in candidates(direction, head_dim, dtype.itemsize, limit):
            try:
                ms = time_ms(direction, dtype, head_dim, tiles)
            except Exception as error:  # one that does not compile or launch is no candidate
                logger.debug("%s %s %d %s: %s", direction, dtype, head_dim, tiles, error)
                continue
            if ms < fastest:
                fastest, best[key_of(direction, dtype.itemsize, head_dim)] = ms, tiles
    return best


def time_kernel(device: torch.device, direction: str, dtype: torch.dtype, head_dim: int, tiles: Tiles) -> float:
    """Milliseconds of one launch for a causal mask."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, LENGTH, head_dim, generator=generator, device=device).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    end = torch.arange(1, LENGTH + 1, dtype=torch.int32, device=device).view(1, 1, 1, -1)
    plan = MaskPlan(RowIntervals(torch.zeros_like(end), end, LENGTH))
    request = AttentionRequest(q, k, v, plan, head_dim**-0.5)
    stats = torch.zeros(q.shape[:3], device=device)
    score = KernelScore()

    def launch() -> None:
        if direction == "forward":
            triton_launch.forward(request, score, request.scale, tiles)
        elif direction == "kv":
            triton_launch.backward_kv(request, score, request.scale, q, stats, stats, tiles)
        else:
            triton_launch.backward_q(request, score, request.scale, q, stats, stats, tiles)

    launch()
    times = []
    for _ in range(_ROUNDS):
        begin, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end_event.record()
        end_event.synchronize()
        times.append(begin.elapsed_time(end_event))
    return statistics.median(times)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    start = time.perf_counter()
    best = search(functools.partial(time_kernel, device), shared_limit(device))
    path = results_file(device.index)
    path.write_text(json.dumps({key: asdict(tiles) for key, tiles in best.items()}, indent=1) + "\n")
    for key, tiles in best.items():
        print(f"{key:16} {tiles}")
    print(f"{path}: {len(best)} entries in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
