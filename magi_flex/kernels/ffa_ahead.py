"""Compile the Hopper kernels ahead of time, e.g. when an image is made:

    python -m magi_flex.kernels.ffa_ahead [--jobs 4] [--groups 1,8]

No GPU is needed.  What is not built ahead (score mods, float32 results, other group sizes) is compiled at first use.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from magi_flex.kernels.cuda_build import cache_directory, find_compiler
from magi_flex.kernels.ffa import HEAD_DIMS, forward_instance
from magi_flex.kernels.ffa_backward import MAX_HEAD_DIM, BackwardInstance, backward_instance
from magi_flex.kernels.ffa_forward import ForwardInstance

FEW_ROWS = 1  # for the variant with small row tiles; None: the one with large ones


def forward_instances(groups: Sequence[int]) -> list[ForwardInstance]:
    """Every head dim, bfloat16 and float16, for query heads that come in these groups, with a mask for all heads."""
    options = itertools.product((torch.bfloat16, torch.float16), HEAD_DIMS, groups, (FEW_ROWS, None))
    return list(
        dict.fromkeys(forward_instance(dtype, *dims, group, 1, rows=rows) for dtype, dims, group, rows in options)
    )


def backward_instances() -> list[BackwardInstance]:
    """Every head dim that the backward serves, bfloat16 and float16; they serve every group and mask."""
    options = itertools.product((torch.bfloat16, torch.float16), HEAD_DIMS)
    return list(dict.fromkeys(backward_instance(dtype, *dims) for dtype, dims in options if max(dims) <= MAX_HEAD_DIM))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at a time")
    parser.add_argument("--groups", default="1,8", help="query heads a key/value head, comma separated")
    options = parser.parse_args(arguments)
    instances: list[ForwardInstance | BackwardInstance] = [
        *forward_instances([int(group) for group in options.groups.split(",")]),
        *backward_instances(),
    ]
    start = time.perf_counter()
    find_compiler()
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, cubin in enumerate(pool.map(lambda instance: instance.compile(), instances), 1):
            print(f"\r{number} of {len(instances)} kernels, {cubin.registers} registers", end="", flush=True)
    print(f"\n{cache_directory()}: {len(instances)} kernels in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
