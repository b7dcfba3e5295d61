"""Compile the Hopper kernels ahead of time, e.g. when an image is made:

    python -m magi_flex.kernels.ffa_ahead [--jobs 4] [--groups 1,8]

No GPU is needed.  The kernels are those for the plans that are built here by themselves: on the device where Triton is
installed.  What is not built ahead (score mods, bit tiles, float32 results, fixed order of sums, other group sizes) is
compiled at first use.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from magi_flex.kernels import device_plans
from magi_flex.kernels.cuda_build import cache_directory, find_compiler
from magi_flex.kernels.ffa import HEAD_DIMS, backward_instance, forward_instance, gradient_q_instance, packed_heads
from magi_flex.kernels.ffa_backward import BackwardInstance
from magi_flex.kernels.ffa_forward import ForwardInstance
from magi_flex.kernels.ffa_gradient_q import GradientQInstance

FEW_ROWS = 1  # for the variant with small row tiles; None: the one with large ones


def forward_instances(groups: Sequence[int]) -> list[ForwardInstance]:
    """Every head dim, bfloat16 and float16, for query heads that come in these groups, with a mask for all heads."""
    options = itertools.product((torch.bfloat16, torch.float16), HEAD_DIMS, groups, (FEW_ROWS, None))
    counted = device_plans.missing() is None
    return list(
        dict.fromkeys(
            forward_instance(dtype, *dims, group, 1, rows=rows, counted=counted) for dtype, dims, group, rows in options
        )
    )


def backward_instances(groups: Sequence[int]) -> list[BackwardInstance]:
    """Every head dim, bfloat16 and float16, for query heads that come in these groups, with a mask for all heads."""
    options = itertools.product((torch.bfloat16, torch.float16), HEAD_DIMS, groups)
    counted = device_plans.missing() is None
    return list(
        dict.fromkeys(
            replace(backward_instance(dtype, *dims, pack=packed_heads(group, 1)), counted=counted)
            for dtype, dims, group in options
        )
    )


def gradient_q_instances(groups: Sequence[int]) -> list[GradientQInstance]:
    """What the backward instances that do not sum dq need beside them."""
    return [gradient_q_instance(x, x.counted) for x in backward_instances(groups) if not x.sum_dq]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at a time")
    parser.add_argument("--groups", default="1,8", help="query heads a key/value head, comma separated")
    options = parser.parse_args(arguments)
    groups = [int(group) for group in options.groups.split(",")]
    instances: list[ForwardInstance | BackwardInstance | GradientQInstance] = [
        *forward_instances(groups),
        *backward_instances(groups),
        *gradient_q_instances(groups),
    ]
    start = time.perf_counter()
    find_compiler()
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, cubin in enumerate(pool.map(lambda instance: instance.compile(), instances), 1):
            print(f"\r{number} of {len(instances)} kernels, {cubin.registers} registers", end="", flush=True)
    print(f"\n{cache_directory()}: {len(instances)} kernels in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
