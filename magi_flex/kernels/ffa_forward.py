"""Launching the Hopper forward kernel (``csrc/cuda/ffa/forward.cu``).

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import cuda_driver
from magi_flex.kernels.cuda_build import Cubin, compile_cubin
from magi_flex.kernels.ffa_launch import (
    BIT_TILES,
    LOG2_E,
    LauncherCache,
    bit_tile_values,
    kernel_dtype,
    multiprocessors,
)
from magi_flex.kernels.ffa_schedule import Schedule
from magi_flex.kernels.ffa_score import GeneratedCode, KernelScore, score_defines, score_format, score_text

# ForwardParams of the kernel between its four tensor maps and the score steps.
_PARAMS = "<11Q3q2f13i4x"
_MAPS = 4
# Keys and values of the heads that are worked on together should stay in L2 (50 MB on an H100, 60 MB on an H200).
_L2_BYTES = 32 << 20


@dataclass(frozen=True)
class ForwardInstance:
    """One compiled variant of the kernel.

    Attributes:
        head_dim, v_dim: compiled sizes (the tensors' may be smaller: reads beyond them give zeros).
        kv_tile: keys of a key tile; narrow_tile: of the short step that a row tile may begin with (0: none).
        consumers: warpgroups of 64 rows each.
        k_stages, v_stages: buffers of K and of V.
        pack: query heads in a row tile.
        stage_out: the output goes through shared memory (not for ``wide_out``).
        wide_out: float32 output.
        accumulate: out, lse and max_score are merged with what they hold, of other keys (only with ``wide_out``).
        split_keys: batch entries of q are parts of the keys of k's and v's batch entries, part by part.
        score_steps: kinds of the score mod's steps (:func:`magi_flex.kernels.ffa_score.kernel_score`).
        generated: code in the place of steps.
        bit_tiles: the mask may have bit tiles.
        counted: the schedule has room for more than it holds, and the kernel reads its ``count``.
    """

    dtype: torch.dtype
    head_dim: int
    v_dim: int
    kv_tile: int
    narrow_tile: int
    consumers: int
    k_stages: int
    v_stages: int
    pack: int
    stage_out: bool = True
    wide_out: bool = False
    accumulate: bool = False
    split_keys: bool = False
    score_steps: tuple[str, ...] = ()
    generated: GeneratedCode | None = None
    bit_tiles: bool = False
    counted: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def q_tile(self) -> int:
        """Query positions of a row tile."""
        return self.rows // self.pack

    def defines(self) -> dict[str, object]:
        return {
            "FFA_DTYPE": kernel_dtype(self.dtype),
            "FFA_HEAD_DIM": self.head_dim,
            "FFA_V_DIM": self.v_dim,
            "FFA_KV_TILE": self.kv_tile,
            "FFA_NARROW_TILE": self.narrow_tile,
            "FFA_CONSUMERS": self.consumers,
            "FFA_K_STAGES": self.k_stages,
            "FFA_V_STAGES": self.v_stages,
            "FFA_PACK": self.pack,
            "FFA_STAGE_OUT": self.stage_out,
            "FFA_WIDE_OUT": self.wide_out,
            "FFA_ACCUMULATE": self.accumulate,
            "FFA_SPLIT_KEYS": self.split_keys,
            "FFA_BIT_TILES": self.bit_tiles,
            "FFA_COUNTED": self.counted,
            "FFA_PARAMS_BYTES": cuda_driver.ParameterBlock(_MAPS, self.params()).size,
        } | score_defines(self.score_steps, self.generated)

    def params(self) -> struct.Struct:
        """The kernel's parameters behind its tensor maps."""
        return struct.Struct(_PARAMS + score_format(self.score_steps, self.generated) + BIT_TILES + "Q")

    def compile(self) -> Cubin:
        """Machine code, from the cache where it is there."""
        return compile_cubin("ffa/forward.cu", self.defines(), generated=score_text(self.generated))


@functools.lru_cache(maxsize=256)
def load_kernel(instance: ForwardInstance, device_index: int) -> cuda_driver.Kernel:
    with torch.cuda.device(device_index):
        return cuda_driver.Kernel(instance.compile().code, "ffa_forward")


def swizzle_bytes(columns: int) -> int:
    """Width of a shared-memory panel of a tile with that many 16-bit columns."""
    return 128 if columns % 64 == 0 else 64 if columns % 32 == 0 else 32


class _Launcher:
    def __init__(self, instance: ForwardInstance, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self.kernel = load_kernel(instance, q.device.index)
        self.multiprocessors = multiprocessors(q.device.index)
        self.threads = 128 * (instance.consumers + 1)
        self.no_steps = () if instance.score_steps else (0,) * 7
        self.params = cuda_driver.ParameterBlock(_MAPS, instance.params())
        swizzle_qk, swizzle_v = swizzle_bytes(instance.head_dim), swizzle_bytes(instance.v_dim)
        by_row = (3, 1, 2, 0)  # head dim, head, row, batch
        by_key = (3, 2, 1, 0)  # head dim, key, head, batch
        pack = instance.pack
        boxes = (
            (q, by_row, (swizzle_qk // 2, pack, instance.q_tile, 1), swizzle_qk),
            (k, by_key, (swizzle_qk // 2, instance.kv_tile, 1, 1), swizzle_qk),
            (v, by_key, (swizzle_v // 2, instance.kv_tile, 1, 1), swizzle_v),
            (out, by_row, (swizzle_v // 2, pack, 64 // pack, 1), swizzle_v),
        )
        self.maps = len(boxes) - instance.wide_out  # float32 output is stored without a map
        for index, box in enumerate(boxes[: self.maps]):
            self.params.set_map(index, cuda_driver.tensor_map(*box))


_launchers = LauncherCache(_Launcher)


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
    score: KernelScore | None = None,
    sm_margin: int = 0,
    bit_tiles: BitTiles | None = None,
) -> None:
    """Fill ``out``, ``lse`` and ``max_score`` (both contiguous float32, log2 domain) on the current stream, or merge
    into them (``instance.accumulate``).

    All inputs are on the current device and ready for TMA (:func:`cuda_driver.is_tma_ready`), none is empty, ``scale``
    is positive (any where there are score steps), the tables of the mask are contiguous, and ``schedule`` was made for
    the instance's tile sizes.  ``sm_margin`` multiprocessors are left to others.
    """
    device_index = q_BHQD.device.index
    batch, heads, q_len, _ = q_BHQD.shape
    kv_batch, kv_heads, kv_len, v_dim = v_BGKE.shape
    mask_batch, mask_heads, slots, _ = intervals.starts.shape
    launcher = _launchers.get(instance, q_BHQD, k_BGKD, v_BGKE, out_BHQE)
    replica_heads = heads // instance.pack if mask_heads == 1 else 1
    replicas = replica_heads * (batch if mask_batch == 1 else 1)
    group = heads // kv_heads
    kv_bytes = kv_len * (instance.head_dim + instance.v_dim) * 2
    section = min(replicas, max(1, _L2_BYTES // kv_bytes) * (group // instance.pack))
    items = schedule.row_tiles * replicas
    grid = min(items, max(1, launcher.multiprocessors - sm_margin))
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    next_item = 0
    if items > grid:
        counter = torch.empty(1, dtype=torch.int32, device=q_BHQD.device)
        cuda_driver.fill_zero(counter, stream)
        next_item = counter.data_ptr()
    params = launcher.params
    for index, x in enumerate((q_BHQD, k_BGKD, v_BGKE, out_BHQE)[: launcher.maps]):
        params.move_map(index, x.data_ptr())
    params.set_rest(
        intervals.starts.data_ptr(),
        intervals.ends.data_ptr(),
        schedule.tile_rows.data_ptr(),
        schedule.tile_runs.data_ptr(),
        schedule.tile_heads.data_ptr(),
        schedule.partial_runs.data_ptr(),
        schedule.full_runs.data_ptr(),
        out_BHQE.data_ptr(),
        lse_BHQ.data_ptr(),
        0 if max_score_BHQ is None else max_score_BHQ.data_ptr(),
        next_item,
        *out_BHQE.stride()[:3],
        LOG2_E if score else scale * LOG2_E,
        scale,
        q_len,
        kv_len,
        heads,
        group,
        v_dim,
        slots,
        mask_batch,
        mask_heads,
        schedule.row_tiles,
        replicas,
        replica_heads,
        section,
        kv_batch,
        *(score.values if score else launcher.no_steps),
        *bit_tile_values(bit_tiles),
        schedule.count.data_ptr(),
    )
    launcher.kernel.launch(grid, launcher.threads, params, stream)
