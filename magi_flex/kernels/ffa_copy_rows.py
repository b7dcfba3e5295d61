"""Launching the kernel that copies rows (``csrc/cuda/ffa/copy_rows.cu``).

Shape legend: N rows that are copied; tensors are ``[rows, A, B, inner]``.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from magi_flex.kernels import cuda_driver
from magi_flex.kernels.cuda_build import compile_cubin

COPIES = 4  # of a launch
_COPY = "4Q6q4i"
_PARAMS = struct.Struct(f"<{COPIES * _COPY}{COPIES}i")
_THREADS, _BLOCK = 256, 1024  # vectors of 16 bytes that a block copies
_MOST_VECTORS = 1 << 30
_NOTHING = (0,) * 14


@functools.lru_cache(maxsize=16)
def _kernel(device_index: int) -> cuda_driver.Kernel:
    with torch.cuda.device(device_index):
        return cuda_driver.Kernel(compile_cubin("ffa/copy_rows.cu", {}).code, "ffa_copy_rows", 0)


def can_copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Whether the kernel serves these pairs: four dimensions, one dtype, strides and addresses of whole vectors."""
    return len(sources) <= COPIES and all(
        a.dim() == b.dim() == 4
        and a.dtype == b.dtype
        and a.shape[1:] == b.shape[1:]
        and b.numel() * b.element_size() < _MOST_VECTORS * 16
        and cuda_driver.is_tma_ready(a)
        and cuda_driver.is_tma_ready(b)
        and a.shape[3] * a.element_size() % 16 == 0
        for a, b in zip(sources, targets, strict=True)
    )


def launch_copy_rows(
    sources: Sequence[Tensor], targets: Sequence[Tensor], source_index: Tensor | None, target_index: Tensor | None
) -> None:
    """``target[target_index[i]] = source[source_index[i]]`` for each pair and each of N rows, on the current stream.

    :func:`can_copy` holds; indices are int64 ``[N]`` and contiguous, None means row i; no row is written twice.
    """
    given = source_index if target_index is None else target_index
    rows = sources[0].shape[0] if given is None else given.shape[0]
    indices = [0 if index is None else index.data_ptr() for index in (source_index, target_index)]
    values: list[int] = []
    first_block, blocks = [], 0
    for source, target in zip(sources, targets, strict=True):
        _, planes_a, planes_b, inner = target.shape
        per_vector = 16 // target.element_size()
        inner //= per_vector
        vectors = rows * planes_a * planes_b * inner
        strides = [step // per_vector for x in (source, target) for step in x.stride()[:3]]
        values += (source.data_ptr(), target.data_ptr(), *indices, *strides, rows, planes_b, inner, vectors)
        first_block.append(blocks)
        blocks += -(-vectors // _BLOCK)
    if blocks == 0:
        return
    missing = COPIES - len(sources)
    params = cuda_driver.ParameterBlock(0, _PARAMS)
    params.set_rest(*values, *_NOTHING * missing, *first_block, *(blocks,) * missing)
    device = targets[0].device
    with cuda_driver.on_device(device):
        _kernel(device.index).launch(blocks, _THREADS, params, cuda_driver.current_stream(device))
