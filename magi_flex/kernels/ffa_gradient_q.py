"""Launching the Hopper kernel for the gradient of q (``csrc/cuda/ffa/gradient_q.cu``).

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import cuda_driver
from magi_flex.kernels.cuda_build import Cubin, compile_cubin
from magi_flex.kernels.ffa_launch import BIT_TILES, SCALE, bit_tile_values, kernel_dtype, set_backward_maps
from magi_flex.kernels.ffa_schedule import Schedule, deal
from magi_flex.kernels.ffa_score import GeneratedCode, KernelScore, score_defines, score_format, score_text

# GradientQParams of the kernel between its four tensor maps and the score steps.
_PARAMS = "<15Q6q3f15i"
# Parts of it that calls set: out, lse, its gradient, the rows' statistics, dq, the work counter; a scale; score steps.
_CALL, _CALL_OFFSET = struct.Struct("<7Q"), struct.calcsize("<7Q")
_SCALE_OFFSET, _SCORE_OFFSET = struct.calcsize("<15Q6q"), struct.calcsize(_PARAMS)
_MAPS, _ROWS, _THREADS = 4, 128, 384


@dataclass(frozen=True)
class GradientQInstance:
    """One compiled variant of the kernel.

    Attributes:
        head_dim, v_dim: compiled sizes (the tensors' may be smaller: reads beyond them give zeros).
        kv_tile: keys of a key tile.
        row_stages, k_stages, v_stages: buffers of Q and dO, of K, of V.
        pack: query heads in a row tile.
        wide: float32 result.
        wide_out: the output that is given is float32.
        score_steps: kinds of the score mod's steps (:func:`magi_flex.kernels.ffa_score.kernel_score`).
        generated: code in the place of steps.
        bit_tiles: the mask may have bit tiles.
        counted: the schedule has room for more than it holds, and the kernel reads its ``count``.
    """

    dtype: torch.dtype
    head_dim: int
    v_dim: int
    kv_tile: int
    row_stages: int
    k_stages: int
    v_stages: int
    pack: int
    wide: bool = False
    wide_out: bool = False
    score_steps: tuple[str, ...] = ()
    generated: GeneratedCode | None = None
    bit_tiles: bool = False
    counted: bool = False

    narrow_tile = 0  # no short steps, see magi_flex/kernels/ffa_schedule.py

    @property
    def q_tile(self) -> int:
        """Query positions of a row tile."""
        return _ROWS // self.pack

    def defines(self) -> dict[str, object]:
        return {
            "FFA_DTYPE": kernel_dtype(self.dtype),
            "FFA_HEAD_DIM": self.head_dim,
            "FFA_V_DIM": self.v_dim,
            "FFA_KV_TILE": self.kv_tile,
            "FFA_NARROW_TILE": self.narrow_tile,
            "FFA_ROW_STAGES": self.row_stages,
            "FFA_K_STAGES": self.k_stages,
            "FFA_V_STAGES": self.v_stages,
            "FFA_PACK": self.pack,
            "FFA_WIDE": self.wide,
            "FFA_WIDE_OUT": self.wide_out,
            "FFA_BIT_TILES": self.bit_tiles,
            "FFA_COUNTED": self.counted,
            "FFA_PARAMS_BYTES": cuda_driver.ParameterBlock(_MAPS, self.params()).size,
        } | score_defines(self.score_steps, self.generated)

    def params(self) -> struct.Struct:
        """The kernel's parameters behind its tensor maps."""
        return struct.Struct(_PARAMS + score_format(self.score_steps, self.generated) + BIT_TILES + "Q")

    def compile(self) -> Cubin:
        """Machine code, from the cache where it is there."""
        return compile_cubin("ffa/gradient_q.cu", self.defines(), generated=score_text(self.generated))


@functools.lru_cache(maxsize=256)
def load_kernel(instance: GradientQInstance, device_index: int) -> cuda_driver.Kernel:
    with torch.cuda.device(device_index):
        return cuda_driver.Kernel(instance.compile().code, "ffa_gradient_q")


class GradientQLaunch:
    """The kernel with all of its arguments but the addresses of a call: kept for calls that differ in nothing else.
    One thread at a time may call it.

    Args:
        q_BHQD, k_BGKD, v_BGKE, d_out_BHQE, out_BHQE, dq_BHQD: what the calls' tensors are like, as for
            :class:`magi_flex.kernels.ffa_backward.BackwardLaunch`.
        padded_rows: see ``row_shift`` of a call.
        split: address of an int32: if it is 0 when the kernel begins, nothing is done; or null.
        schedule: made for the instance's tile sizes.
        scales: from dS K to dq; from scores (behind the score steps) to powers of two; from q k^T to what the first
            score step sees.
        score: what the calls' score mods are like; their values and factors may differ.
        sm_margin: multiprocessors that are left to others.
        bit_tiles: of the mask, where the instance has them.
    """

    def __init__(
        self,
        instance: GradientQInstance,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        d_out_BHQE: Tensor,
        out_BHQE: Tensor,
        dq_BHQD: Tensor,
        padded_rows: int,
        split: int,
        intervals: RowIntervals,
        schedule: Schedule,
        scales: tuple[float, float, float],
        score: KernelScore | None = None,
        sm_margin: int = 0,
        bit_tiles: BitTiles | None = None,
    ) -> None:
        self._tables = intervals, schedule, bit_tiles  # whose addresses the parameters hold
        self._kernel = load_kernel(instance, q_BHQD.device.index)
        self._score = struct.Struct("<" + score_format(instance.score_steps, instance.generated))
        self._params = cuda_driver.ParameterBlock(_MAPS, instance.params())
        inputs = (q_BHQD, k_BGKD, v_BGKE, d_out_BHQE)
        set_backward_maps(self._params, *inputs, instance.pack, instance.q_tile, instance.kv_tile)
        _, heads, q_len, head_dim = q_BHQD.shape
        _, kv_heads, kv_len, _ = v_BGKE.shape
        mask_batch, mask_heads, slots, _ = intervals.starts.shape
        columns, sms = instance.head_dim + instance.v_dim, cuda_driver.multiprocessors(q_BHQD.device) - sm_margin
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
            *(0,) * 7,  # see __call__
            split,
            *dq_BHQD.stride()[:3],
            *out_BHQE.stride()[:3],
            *scales,
            q_len,
            kv_len,
            padded_rows,
            heads,
            heads // kv_heads,
            head_dim,
            slots,
            mask_batch,
            mask_heads,
            schedule.row_tiles,
            shares.replicas,
            shares.replica_heads,
            shares.section,
            v_BGKE.shape[3],
            0,
            *(score.values if score else (0,) * 7),
            *bit_tile_values(bit_tiles),
            schedule.count.data_ptr(),
        )

    def __call__(
        self,
        inputs: Sequence[int],
        outputs: tuple[int, int, int],
        row_shift: int,
        row_delta: int,
        dq: int,
        work_counter: int,
        gradient_scale: float,
        score: KernelScore | None,
        stream: int,
    ) -> None:
        """Fill dq, and the rows' statistics, on ``stream``.

        Args:
            inputs: addresses of q, k, v and d_out; outputs: of out, lse and d_lse (0: none), the last two float32
                ``[B, H, Q]``; dq: address.
            row_shift, row_delta: addresses of what the kernel for dk and dv wants of the rows, which is made here,
                float32 ``[B * H / pack, padded_rows, pack]``.
            work_counter: address of an int32 that is 0 when the kernel begins.
            gradient_scale: the first of ``scales``, for this ``score``.
        """
        params = self._params
        for index, address in enumerate(inputs):
            params.move_map(index, address)
        next_item = work_counter if self._counts_items else 0
        params.set_part(_CALL_OFFSET, _CALL, *outputs, row_shift, row_delta, dq, next_item)
        if score is not None:
            params.set_part(_SCALE_OFFSET, SCALE, gradient_scale)
            params.set_part(_SCORE_OFFSET, self._score, *score.values)
        self._kernel.launch(self._grid, _THREADS, params, stream)
