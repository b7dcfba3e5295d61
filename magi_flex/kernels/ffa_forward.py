"""Launching the Hopper forward kernel (``csrc/cuda/ffa/forward.cu``).

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import cuda_driver
from magi_flex.kernels.cuda_build import compile_cubin
from magi_flex.kernels.ffa_schedule import Schedule

# ForwardParams of the kernel after its four tensor maps.
_PARAMS = struct.Struct("<10Q3qf11i")
# Keys and values of the heads that are worked on together should stay in L2 (50 MB on an H100, 60 MB on an H200).
_L2_BYTES = 32 << 20


@dataclass(frozen=True)
class ForwardInstance:
    """One compiled variant of the kernel.

    Attributes:
        head_dim, v_dim: compiled sizes (the tensors' may be smaller: reads beyond them give zeros).
        kv_tile: keys of a key tile.
        consumers: warpgroups of 64 rows each.
        stages: buffers of K and of V.
        pack: query heads in a row tile.
    """

    dtype: torch.dtype
    head_dim: int
    v_dim: int
    kv_tile: int
    consumers: int
    stages: int
    pack: int
    wide_out: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def q_tile(self) -> int:
        """Query positions of a row tile."""
        return self.rows // self.pack

    def defines(self) -> dict[str, object]:
        return {
            "FFA_DTYPE": "bf16" if self.dtype == torch.bfloat16 else "fp16",
            "FFA_HEAD_DIM": self.head_dim,
            "FFA_V_DIM": self.v_dim,
            "FFA_KV_TILE": self.kv_tile,
            "FFA_CONSUMERS": self.consumers,
            "FFA_STAGES": self.stages,
            "FFA_PACK": self.pack,
            "FFA_WIDE_OUT": self.wide_out,
        }

    def compile(self):  # noqa: ANN201
        """Machine code, from the cache where it is there."""
        return compile_cubin("ffa/forward.cu", self.defines())


@functools.lru_cache(maxsize=256)
def load_kernel(instance: ForwardInstance, device_index: int) -> cuda_driver.Kernel:
    with torch.cuda.device(device_index):
        return cuda_driver.Kernel(instance.compile().code, "ffa_forward")


def swizzle_bytes(columns: int) -> int:
    """Width of a shared-memory panel of a tile with that many 16-bit columns."""
    return 128 if columns % 64 == 0 else 64 if columns % 32 == 0 else 32


@functools.lru_cache(maxsize=16)
def multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def launch_forward(
    instance: ForwardInstance,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    intervals: RowIntervals,
    schedule: Schedule,
    scale: float,
    out_BHQE: Tensor,
    lse_BHQ: Tensor,
    max_score_BHQ: Tensor | None,
    sm_margin: int = 0,
) -> None:
    """Fill ``out``, ``lse`` and ``max_score`` (both contiguous float32, log2 domain) on the current stream.

    All inputs are ready for TMA (:func:`cuda_driver.is_tma_ready`), none is empty, ``scale`` is positive, and
    ``schedule`` was made for ``instance.q_tile`` and ``instance.kv_tile``.
    """
    device = q_BHQD.device
    batch, heads, q_len, _ = q_BHQD.shape
    kv_heads, kv_len = k_BGKD.shape[1:3]
    mask_batch, mask_heads, slots, _ = intervals.starts.shape
    pack, rows = instance.pack, instance.rows
    replica_heads = heads // pack if mask_heads == 1 else 1
    replicas = replica_heads * (batch if mask_batch == 1 else 1)
    kv_bytes = kv_len * (k_BGKD.shape[3] + v_BGKE.shape[3]) * k_BGKD.element_size()
    group = heads // kv_heads
    section = min(replicas, max(1, _L2_BYTES * (group // pack) // kv_bytes))
    items = schedule.row_tiles * replicas
    grid = min(items, max(1, multiprocessors(device.index) - sm_margin))
    stream = torch.cuda.current_stream(device).cuda_stream
    next_item = 0
    if items > grid:
        counter = torch.empty(1, dtype=torch.int32, device=device)
        cuda_driver.fill_zero(counter, stream)
        next_item = counter.data_ptr()
    swizzle_qk, swizzle_v = swizzle_bytes(instance.head_dim), swizzle_bytes(instance.v_dim)
    params = cuda_driver.ParameterBlock(4, _PARAMS)
    by_row = (3, 1, 2, 0)  # head dim, head, row, batch
    by_key = (3, 2, 1, 0)  # head dim, key, head, batch
    tensor_map = cuda_driver.tensor_map
    params.set_map(0, tensor_map(q_BHQD, by_row, (swizzle_qk // 2, pack, rows // pack, 1), swizzle_qk))
    params.set_map(1, tensor_map(k_BGKD, by_key, (swizzle_qk // 2, instance.kv_tile, 1, 1), swizzle_qk))
    params.set_map(2, tensor_map(v_BGKE, by_key, (swizzle_v // 2, instance.kv_tile, 1, 1), swizzle_v))
    if not instance.wide_out:
        params.set_map(3, tensor_map(out_BHQE, by_row, (swizzle_v // 2, pack, 64 // pack, 1), swizzle_v))
    params.set_rest(
        intervals.starts.data_ptr(),
        intervals.ends.data_ptr(),
        schedule.tile_rows.data_ptr(),
        schedule.tile_runs.data_ptr(),
        schedule.partial_runs.data_ptr(),
        schedule.full_runs.data_ptr(),
        out_BHQE.data_ptr(),
        lse_BHQ.data_ptr(),
        0 if max_score_BHQ is None else max_score_BHQ.data_ptr(),
        next_item,
        out_BHQE.stride(0),
        out_BHQE.stride(1),
        out_BHQE.stride(2),
        scale * math.log2(math.e),
        q_len,
        heads,
        group,
        v_BGKE.shape[3],
        slots,
        mask_batch,
        mask_heads,
        schedule.row_tiles,
        replicas,
        replica_heads,
        section,
    )
    load_kernel(instance, device.index).launch(grid, 128 * (instance.consumers + 1), params, stream)
