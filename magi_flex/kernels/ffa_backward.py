"""Launching the Hopper backward kernels (``csrc/cuda/ffa/backward.cu``, ``gradient_q.cu``).

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim,
N key tiles over all mask batch entries and mask heads.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import cuda_driver
from magi_flex.kernels.cuda_build import Cubin, compile_cubin
from magi_flex.kernels.ffa_backward_schedule import ROW_GROUP, BackwardSchedule
from magi_flex.kernels.ffa_gradient_q import GradientQInstance, launch_gradient_q
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
from magi_flex.tiles import TilePlan

# BackwardParams of the kernel between its four tensor maps and the score steps, PrepareParams and FinishParams.
_BACKWARD_PARAMS = "<10Q6i6Q6q2Q8i3fi"
_PREPARE_PARAMS = struct.Struct("<9Q6q6i")
_FINISH_PARAMS = struct.Struct("<3Q3q4ifi3Q6q3Q5i4x")
_MAPS, _THREADS, _CONVERT_THREADS, _CONVERT_ROWS = 4, 384, 256, 32
# 50 MB on an H100, 60 MB on an H200; what is visited at a time is less than what a section holds.
_L2_BYTES = 64 << 20


@dataclass(frozen=True)
class BackwardInstance:
    """One compiled variant of the kernels.

    Attributes:
        head_dim, v_dim: compiled sizes (the tensors' may be smaller: reads beyond them give zeros).
        rows: query rows of a step, (position, head) pairs.
        keys: of a key tile: 128, or 64 where the head is too wide for that.
        sum_dq: dq is summed (in no fixed order) beside dk and dv; else the gradient_q kernel makes it.
        wide: dk and dv are float32.
        wide_dq: dq is float32.
        wide_out: the output that is given is float32.
        pack: query heads of a step, that share a key/value head and the mask; 1 where ``sum_dq``.
        score_steps: kinds of the score mod's steps (:func:`magi_flex.kernels.ffa_score.kernel_score`).
        generated: code in the place of steps.
        bit_tiles: the mask may have bit tiles.
        counted: the schedule has room for more than it holds, and the kernel reads its ``count``.
    """

    dtype: torch.dtype
    head_dim: int
    v_dim: int
    rows: int = 64
    keys: int = 128
    sum_dq: bool = True
    wide: bool = False
    wide_dq: bool = False
    wide_out: bool = False
    pack: int = 1
    score_steps: tuple[str, ...] = ()
    generated: GeneratedCode | None = None
    bit_tiles: bool = False
    counted: bool = False

    @property
    def positions(self) -> int:
        """Query positions of a step."""
        return self.rows // self.pack

    @property
    def kv_stages(self) -> int:
        """Buffers of K and V: two where they fit, so that an item's are there when the one before is done."""
        return 2 if self.keys == 128 and not self.sum_dq else 1

    def defines(self) -> dict[str, object]:
        return {
            "FFA_DTYPE": kernel_dtype(self.dtype),
            "FFA_HEAD_DIM": self.head_dim,
            "FFA_V_DIM": self.v_dim,
            "FFA_ROWS": self.rows,
            "FFA_PACK": self.pack,
            "FFA_KEYS": self.keys,
            "FFA_KV_STAGES": self.kv_stages,
            "FFA_SUM_DQ": self.sum_dq,
            "FFA_WIDE": self.wide,
            "FFA_WIDE_DQ": self.wide_dq,
            "FFA_WIDE_OUT": self.wide_out,
            "FFA_BIT_TILES": self.bit_tiles,
            "FFA_COUNTED": self.counted,
            "FFA_PARAMS_BYTES": cuda_driver.ParameterBlock(_MAPS, self.params()).size,
        } | score_defines(self.score_steps, self.generated)

    def params(self) -> struct.Struct:
        """The backward kernel's parameters behind its tensor maps."""
        return struct.Struct(_BACKWARD_PARAMS + score_format(self.score_steps, self.generated) + BIT_TILES + "Q")

    def compile(self) -> Cubin:
        """Machine code, from the cache where it is there."""
        return compile_cubin("ffa/backward.cu", self.defines(), generated=score_text(self.generated))


class GradientQ(NamedTuple):
    """The kernel that makes dq where the backward's own does not (``not BackwardInstance.sum_dq``)."""

    instance: GradientQInstance
    schedule: Schedule


class TwoKernels(NamedTuple):
    """Kernels that may run in the place of the one that sums dq, which is decided on the device.

    Attributes:
        instance, schedule: for dk and dv.
        taken: int32 ``[1]``: 0, or these run.
    """

    instance: BackwardInstance
    schedule: BackwardSchedule
    gradient_q: GradientQ
    taken: Tensor


@functools.lru_cache(maxsize=256)
def load_kernels(
    instance: BackwardInstance, device_index: int
) -> tuple[cuda_driver.Kernel, cuda_driver.Kernel, cuda_driver.Kernel]:
    """The kernels prepare, backward and finish."""
    with torch.cuda.device(device_index):
        code = instance.compile().code
        return (
            cuda_driver.Kernel(code, "ffa_backward_prepare", 0),
            cuda_driver.Kernel(code, "ffa_backward"),
            cuda_driver.Kernel(code, "ffa_backward_finish", 0),
        )


class _Launcher:
    def __init__(self, instance: BackwardInstance, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> None:
        self.prepare_kernel, self.backward_kernel, self.finish_kernel = load_kernels(instance, q.device.index)
        self.multiprocessors = multiprocessors(q.device.index)
        self.no_steps = () if instance.score_steps else (0,) * 7
        self.prepare = cuda_driver.ParameterBlock(0, _PREPARE_PARAMS)
        self.backward = cuda_driver.ParameterBlock(_MAPS, instance.params())
        self.finish = cuda_driver.ParameterBlock(0, _FINISH_PARAMS)
        by_row = (3, 1, 2, 0)  # head dim, head, row, batch
        by_key = (3, 2, 1, 0)  # head dim, key, head, batch
        rows, keys = (64, instance.pack, instance.positions, 1), (64, instance.keys, 1, 1)
        boxes = ((q, by_row, rows), (k, by_key, keys), (v, by_key, keys), (d_out, by_row, rows))
        for index, (x, axes, box) in enumerate(boxes):
            self.backward.set_map(index, cuda_driver.tensor_map(x, axes, box, 128))


_launchers = LauncherCache(_Launcher)


class _Scratch(NamedTuple):
    """Addresses of what the kernels of a backward pass hand on to one another (null: not there)."""

    row_shift: int
    row_delta: int
    dq_sums: int
    dkv_sums: int
    work_counters: int  # of the backward's own kernel and of gradient_q
    split: int  # whether TwoKernels are taken
    padded_rows: int


def launch_backward(
    instance: BackwardInstance,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    out_BHQE: Tensor,
    lse_BHQ: Tensor,
    d_out_BHQE: Tensor,
    d_lse_BHQ: Tensor | None,
    intervals: RowIntervals,
    schedule: BackwardSchedule,
    scale: float,
    dq_BHQD: Tensor,
    dk_BGKD: Tensor,
    dv_BGKE: Tensor,
    score: KernelScore | None = None,
    gradient_q: GradientQ | None = None,
    sm_margin: int = 0,
    bit_tiles: BitTiles | None = None,
    two_kernels: TwoKernels | None = None,
) -> None:
    """Fill ``dq``, ``dk`` and ``dv`` on the current stream.

    All inputs are on the current device, ready for TMA (:func:`cuda_driver.is_tma_ready`) and not empty; head dims are
    multiples of 8 and at most the instance's; ``lse`` (log2 domain) and ``d_lse`` are contiguous float32; the tables
    of the mask are contiguous; the results' rows are contiguous and 16-byte aligned; ``schedule`` was made for the
    instance's ``rows``, ``pack`` and ``keys``; ``score`` has the instance's steps; ``gradient_q`` is given unless the
    instance sums dq, ``two_kernels`` (of instances with the same ``rows``, whose items walk all heads of a group) only
    if it does.  ``sm_margin`` multiprocessors are left to others.

    Raises ValueError where there are 2^31 or more query rows, counted over batch entries and heads.
    """
    device = q_BHQD.device
    batch, heads, q_len, head_dim = q_BHQD.shape
    _, kv_heads, _, v_dim = v_BGKE.shape
    mask_batch, mask_heads, slots, _ = intervals.starts.shape
    padded_rows = -(-(q_len + instance.rows) // _CONVERT_ROWS) * _CONVERT_ROWS
    head_rows = batch * heads * padded_rows
    if head_rows >= 1 << 31 or intervals.starts.numel() >= 1 << 31:
        raise ValueError(
            f"q: {batch} x {heads} heads of {q_len} rows with {slots} intervals are more than 2^31 - 1 rows or "
            "intervals, the most that the ffa backward indexes; split the batch or the heads"
        )
    inputs = (q_BHQD, k_BGKD, v_BGKE, d_out_BHQE)
    launcher = _launchers.get(instance, *inputs)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    plan = schedule.plan
    parts = heads // kv_heads // schedule.heads
    tiles = plan.tile_begin.shape[0] // (mask_batch * mask_heads if mask_heads > 1 else 1)
    key_blocks = 0
    if parts > 1:
        key_blocks = tiles * kv_heads * (batch if mask_heads > 1 or mask_batch == 1 else 1)
    # One allocation: shifts, deltas, work counters, dQ sums; then sums of dK and dV where several items share them.
    dq_floats = head_rows * instance.head_dim if instance.sum_dq else 0
    row_floats = 2 * head_rows + 4 + dq_floats
    block_floats = instance.keys * (instance.head_dim + instance.v_dim)
    floats = torch.empty(row_floats + key_blocks * block_floats, dtype=torch.float32, device=device)
    row_shift = floats.data_ptr()
    work_counters = row_shift + 8 * head_rows
    scratch = _Scratch(
        row_shift,
        row_shift + 4 * head_rows,
        work_counters + 16 if instance.sum_dq else 0,
        row_shift + 4 * row_floats if key_blocks else 0,
        work_counters,
        two_kernels.taken.data_ptr() if two_kernels else 0,
        padded_rows,
    )
    if key_blocks:
        cuda_driver.fill_zero(floats[row_floats:], stream)
    row_blocks = head_rows // _CONVERT_ROWS
    gradient_scale = scale * (score.factor if score else 1.0)
    scales = (gradient_scale, LOG2_E if score else scale * LOG2_E, scale)

    launcher.prepare.set_rest(
        out_BHQE.data_ptr(),
        d_out_BHQE.data_ptr(),
        lse_BHQ.data_ptr(),
        0 if d_lse_BHQ is None else d_lse_BHQ.data_ptr(),
        scratch.row_shift,
        scratch.row_delta,
        scratch.dq_sums,
        scratch.work_counters,
        scratch.split,
        *out_BHQE.stride()[:3],
        *d_out_BHQE.stride()[:3],
        heads,
        q_len,
        padded_rows,
        v_dim,
        two_kernels.instance.pack if two_kernels else instance.pack,
        0,
    )
    launcher.prepare_kernel.launch(row_blocks, _CONVERT_THREADS, launcher.prepare, stream)

    ways = [(instance, schedule, gradient_q)]
    if two_kernels:
        ways.append(two_kernels[:3])
    for way, keys, of_q in ways:
        _launch_main(
            way, inputs, intervals, keys, scratch, scales, dk_BGKD, dv_BGKE, score, sm_margin, bit_tiles, stream
        )
        if of_q is not None:
            launch_gradient_q(
                of_q.instance,
                *inputs,
                scratch.row_shift,
                scratch.row_delta,
                padded_rows,
                scratch.work_counters + 4,
                scratch.split,
                intervals,
                of_q.schedule,
                scales,
                dq_BHQD,
                score.values if score else (),
                sm_margin,
                bit_tiles,
            )
    dq_blocks = row_blocks if instance.sum_dq else 0
    if dq_blocks + key_blocks == 0:
        return
    launcher.finish.set_rest(
        scratch.split,
        scratch.dq_sums,
        dq_BHQD.data_ptr(),
        *dq_BHQD.stride()[:3],
        heads,
        q_len,
        padded_rows,
        head_dim,
        gradient_scale,
        dq_blocks,
        scratch.dkv_sums,
        dk_BGKD.data_ptr(),
        dv_BGKE.data_ptr(),
        *dk_BGKD.stride()[:3],
        *dv_BGKE.stride()[:3],
        *_plan_pointers(plan),
        kv_heads,
        tiles,
        mask_batch,
        mask_heads,
        v_dim,
    )
    launcher.finish_kernel.launch(dq_blocks + 2 * key_blocks, _CONVERT_THREADS, launcher.finish, stream)


def _plan_pointers(plan: TilePlan) -> tuple[int, int, int]:
    return plan.head_ptr.data_ptr(), plan.tile_begin.data_ptr(), plan.tile_end.data_ptr()


def _launch_main(
    instance: BackwardInstance,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    intervals: RowIntervals,
    schedule: BackwardSchedule,
    scratch: _Scratch,
    scales: tuple[float, float, float],
    dk_BGKD: Tensor,
    dv_BGKE: Tensor,
    score: KernelScore | None,
    sm_margin: int,
    bit_tiles: BitTiles | None,
    stream: int,
) -> None:
    """The kernel for dK and dV, and sums of dQ where the instance has them."""
    batch, heads, q_len, head_dim = inputs[0].shape
    _, kv_heads, _, v_dim = inputs[2].shape
    mask_batch, mask_heads, slots, _ = intervals.starts.shape
    launcher = _launchers.get(instance, *inputs)
    for index, x in enumerate(inputs):
        launcher.backward.move_map(index, x.data_ptr())
    plan, entries = schedule.plan, schedule.entries.shape[0]
    parts = heads // kv_heads // schedule.heads
    replicas = (kv_heads * parts if mask_heads == 1 else 1) * (batch if mask_batch == 1 else 1)
    # What an item visits at a time: Q, dO and the float32 sums of dQ.
    visited = 2 * instance.pack * (instance.head_dim + instance.v_dim) + 4 * instance.head_dim * instance.sum_dq
    section = min(replicas, max(1, _L2_BYTES // (q_len * visited)))
    launcher.backward.set_rest(
        *_plan_pointers(plan),
        plan.full_ptr.data_ptr(),
        plan.full_runs.data_ptr(),
        plan.partial_ptr.data_ptr(),
        plan.partial_runs.data_ptr(),
        schedule.entries.data_ptr(),
        intervals.starts.data_ptr(),
        intervals.ends.data_ptr(),
        mask_batch,
        mask_heads,
        slots,
        entries,
        replicas,
        section,
        scratch.row_shift,
        scratch.row_delta,
        scratch.dq_sums,
        scratch.dkv_sums if parts > 1 else 0,
        dk_BGKD.data_ptr(),
        dv_BGKE.data_ptr(),
        *dk_BGKD.stride()[:3],
        *dv_BGKE.stride()[:3],
        scratch.work_counters,
        scratch.split,
        kv_heads,
        parts,
        schedule.heads,
        q_len,
        scratch.padded_rows,
        head_dim,
        v_dim,
        plan.tile_begin.shape[0] // (mask_batch * mask_heads if mask_heads > 1 else 1),
        *scales,
        batch * heads * scratch.padded_rows // ROW_GROUP,
        *(score.values if score else launcher.no_steps),
        *bit_tile_values(bit_tiles),
        0 if schedule.count is None else schedule.count.data_ptr(),
    )
    grid = min(entries * replicas, max(1, launcher.multiprocessors - sm_margin))
    launcher.backward_kernel.launch(grid, _THREADS, launcher.backward, stream)
