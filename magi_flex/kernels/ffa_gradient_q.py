"""Launching the Hopper kernel for the gradient of q (``csrc/cuda/ffa/gradient_q.cu``).

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
from magi_flex.kernels.ffa_launch import BIT_TILES, LauncherCache, bit_tile_values, kernel_dtype, multiprocessors
from magi_flex.kernels.ffa_schedule import Schedule, deal
from magi_flex.kernels.ffa_score import GeneratedCode, score_defines, score_format, score_text

# GradientQParams of the kernel between its four tensor maps and the score steps.
_PARAMS = "<12Q3q3f13i"
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


class _Launcher:
    def __init__(self, instance: GradientQInstance, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> None:
        self.kernel = load_kernel(instance, q.device.index)
        self.multiprocessors = multiprocessors(q.device.index)
        self.no_steps = () if instance.score_steps else (0,) * 7
        self.params = cuda_driver.ParameterBlock(_MAPS, instance.params())
        by_row = (3, 1, 2, 0)  # head dim, head, row, batch
        by_key = (3, 2, 1, 0)  # head dim, key, head, batch
        rows, keys = (64, instance.pack, instance.q_tile, 1), (64, instance.kv_tile, 1, 1)
        for index, (x, axes, box) in enumerate(
            ((q, by_row, rows), (k, by_key, keys), (v, by_key, keys), (d_out, by_row, rows))
        ):
            self.params.set_map(index, cuda_driver.tensor_map(x, axes, box, 128))


_launchers = LauncherCache(_Launcher)


def launch_gradient_q(
    instance: GradientQInstance,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    d_out_BHQE: Tensor,
    row_shift: int,
    row_delta: int,
    padded_rows: int,
    work_counter: int,
    split: int,
    intervals: RowIntervals,
    schedule: Schedule,
    scales: tuple[float, float, float],
    dq_BHQD: Tensor,
    score_values: tuple[int | float, ...] = (),
    sm_margin: int = 0,
    bit_tiles: BitTiles | None = None,
) -> None:
    """Fill ``dq`` on the current stream; tensors as in :func:`magi_flex.kernels.ffa_backward.launch_backward`.

    Args:
        row_shift, row_delta: addresses of the statistics that the backward's ``prepare`` made, float32
            ``[B * H / pack, padded_rows, pack]``.
        work_counter: address of an int32 that is 0 when the kernel begins.
        split: address of an int32: if it is 0 then, nothing is done; or null.
        schedule: made for the instance's tile sizes.
        scales: from dS K to dq; from scores (behind the score steps) to powers of two; from q k^T to what the first
            score step sees.
        score_values: of the score steps, see :class:`magi_flex.kernels.ffa_score.KernelScore`.
        sm_margin: multiprocessors that are left to others.
        bit_tiles: of the mask, where the instance has them.
    """
    _, heads, q_len, head_dim = q_BHQD.shape
    _, kv_heads, kv_len, _ = v_BGKE.shape
    mask_batch, mask_heads, slots, _ = intervals.starts.shape
    launcher = _launchers.get(instance, q_BHQD, k_BGKD, v_BGKE, d_out_BHQE)
    columns, sms = instance.head_dim + instance.v_dim, launcher.multiprocessors - sm_margin
    shares = deal(schedule, q_BHQD, v_BGKE, intervals.starts, instance.pack, columns, sms)
    stream = torch._C._cuda_getCurrentRawStream(q_BHQD.device.index)
    params = launcher.params
    for index, x in enumerate((q_BHQD, k_BGKD, v_BGKE, d_out_BHQE)):
        params.move_map(index, x.data_ptr())
    params.set_rest(
        intervals.starts.data_ptr(),
        intervals.ends.data_ptr(),
        schedule.tile_rows.data_ptr(),
        schedule.tile_runs.data_ptr(),
        schedule.tile_heads.data_ptr(),
        schedule.partial_runs.data_ptr(),
        schedule.full_runs.data_ptr(),
        row_shift,
        row_delta,
        dq_BHQD.data_ptr(),
        work_counter if shares.items > shares.grid else 0,
        split,
        *dq_BHQD.stride()[:3],
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
        *(score_values or launcher.no_steps),
        *bit_tile_values(bit_tiles),
        schedule.count.data_ptr(),
    )
    launcher.kernel.launch(shares.grid, _THREADS, params, stream)
