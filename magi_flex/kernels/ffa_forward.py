"""Launching the Hopper forward kernel (``csrc/cuda/ffa/forward.cu``).

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import cuda_driver
from magi_flex.kernels.cuda_build import Cubin, compile_cubin
from magi_flex.kernels.ffa_launch import (
    BIT_TILES,
    BY_KEY,
    BY_ROW,
    LOG2_E,
    bit_tile_values,
    kernel_dtype,
)
from magi_flex.kernels.ffa_schedule import Schedule, deal
from magi_flex.kernels.ffa_score import GeneratedCode, KernelScore, score_defines, score_format, score_text

# ForwardParams of the kernel between its four tensor maps and the score steps.
_PARAMS = "<11Q3q2f13i4x"
_RESULTS, _RESULTS_OFFSET = struct.Struct("<4Q"), 7 * 8  # of these: out, lse, max_score, the work counter
_SCORE_OFFSET = struct.calcsize(_PARAMS)
_MAPS = 4


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


class ForwardLaunch:
    """The kernel with all of its arguments but the memory of q, k, v and of the results: kept for calls that differ in
    nothing else.

    Args:
        q_BHQD, k_BGKD, v_BGKE, out_BHQE: what the calls' tensors are like; on the current device, ready for TMA
            (:func:`cuda_driver.is_tma_ready`), none empty.
        intervals, bit_tiles: of the mask, contiguous; schedule: made for the instance's tile sizes.
        scale: positive (any where there is a score mod).
        score: what the calls' score mods are like; their values may differ.
        sm_margin: multiprocessors that are left to others.
    """

    def __init__(
        self,
        instance: ForwardInstance,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        out_BHQE: Tensor,
        intervals: RowIntervals,
        schedule: Schedule,
        scale: float,
        score: KernelScore | None = None,
        sm_margin: int = 0,
        bit_tiles: BitTiles | None = None,
    ) -> None:
        self._device = q_BHQD.device
        self._kernel = load_kernel(instance, self._device.index)
        self._threads = 128 * (instance.consumers + 1)
        self._tables = intervals, schedule, bit_tiles  # whose addresses the parameters hold
        self._score = struct.Struct("<" + score_format(instance.score_steps, instance.generated))
        self._lock = threading.Lock()  # calls write into the parameters
        self._params = cuda_driver.ParameterBlock(_MAPS, instance.params())
        boxes = _boxes(instance, q_BHQD, k_BGKD, v_BGKE, out_BHQE)
        self._maps = len(boxes)
        for index, box in enumerate(boxes):
            self._params.set_map(index, cuda_driver.tensor_map(*box))
        _, heads, q_len, _ = q_BHQD.shape
        kv_batch, kv_heads, kv_len, v_dim = v_BGKE.shape
        mask_batch, mask_heads, slots, _ = intervals.starts.shape
        columns, sms = instance.head_dim + instance.v_dim, cuda_driver.multiprocessors(self._device) - sm_margin
        shares = deal(schedule, q_BHQD, v_BGKE, intervals.starts, instance.pack, columns, sms)
        self._grid = shares.grid
        self._counts_items = shares.items > shares.grid
        self._params.set_rest(
            intervals.starts.data_ptr(),
            intervals.ends.data_ptr(),
            schedule.tile_rows.data_ptr(),
            schedule.tile_runs.data_ptr(),
            schedule.tile_heads.data_ptr(),
            schedule.partial_runs.data_ptr(),
            schedule.full_runs.data_ptr(),
            *(0, 0, 0, 0),  # see __call__
            *out_BHQE.stride()[:3],
            LOG2_E if score else scale * LOG2_E,
            scale,
            q_len,
            kv_len,
            heads,
            heads // kv_heads,
            v_dim,
            slots,
            mask_batch,
            mask_heads,
            schedule.row_tiles,
            shares.replicas,
            shares.replica_heads,
            shares.section,
            kv_batch,
            *(score.values if score else (0,) * 7),
            *bit_tile_values(bit_tiles),
            schedule.count.data_ptr(),
        )

    def __call__(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        out_BHQE: Tensor,
        lse_BHQ: Tensor,
        max_score_BHQ: Tensor | None,
        score: KernelScore | None = None,
    ) -> None:
        """Fill ``out``, ``lse`` and ``max_score`` (both contiguous float32, log2 domain) on the current stream, or
        merge into them (``instance.accumulate``)."""
        stream = cuda_driver.current_stream(self._device)
        next_item = 0
        if self._counts_items:
            counter = lse_BHQ.new_empty(1, dtype=torch.int32)
            cuda_driver.fill_zero(counter, stream)
            next_item = counter.data_ptr()
        out = out_BHQE.data_ptr()
        addresses = (q_BHQD.data_ptr(), k_BGKD.data_ptr(), v_BGKE.data_ptr(), out)
        max_score = 0 if max_score_BHQ is None else max_score_BHQ.data_ptr()
        params = self._params
        with self._lock:
            for index in range(self._maps):
                params.move_map(index, addresses[index])
            params.set_part(_RESULTS_OFFSET, _RESULTS, out, lse_BHQ.data_ptr(), max_score, next_item)
            if score is not None:
                params.set_part(_SCORE_OFFSET, self._score, *score.values)
            self._kernel.launch(self._grid, self._threads, params, stream)


def _boxes(
    instance: ForwardInstance, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> Sequence[tuple[Tensor, tuple[int, ...], tuple[int, ...], int]]:
    """Arguments of the tensor maps; float32 output is stored without one."""
    swizzle_qk, swizzle_v = swizzle_bytes(instance.head_dim), swizzle_bytes(instance.v_dim)
    pack = instance.pack
    boxes = (
        (q, BY_ROW, (swizzle_qk // 2, pack, instance.q_tile, 1), swizzle_qk),
        (k, BY_KEY, (swizzle_qk // 2, instance.kv_tile, 1, 1), swizzle_qk),
        (v, BY_KEY, (swizzle_v // 2, instance.kv_tile, 1, 1), swizzle_v),
        (out, BY_ROW, (swizzle_v // 2, pack, 64 // pack, 1), swizzle_v),
    )
    return boxes[: len(boxes) - instance.wide_out]
