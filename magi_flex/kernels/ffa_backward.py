"""Launching the Hopper backward kernels (``csrc/cuda/ffa/backward.cu``, ``gradient_q.cu``).

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim,
N key tiles over all mask batch entries and mask heads.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import cuda_driver
from magi_flex.kernels.cuda_build import Cubin, compile_cubin
from magi_flex.kernels.ffa_backward_schedule import L2_BYTES, ROW_GROUP, BackwardSchedule
from magi_flex.kernels.ffa_gradient_q import GradientQInstance, GradientQLaunch
from magi_flex.kernels.ffa_launch import (
    BIT_TILES,
    LOG2_E,
    SCALE,
    bit_tile_values,
    kernel_dtype,
    set_backward_maps,
)
from magi_flex.kernels.ffa_schedule import Schedule
from magi_flex.kernels.ffa_score import GeneratedCode, KernelScore, score_defines, score_format, score_text
from magi_flex.tiles import TilePlan

# BackwardParams of the kernel between its four tensor maps and the score steps, PrepareParams and FinishParams.
_BACKWARD_PARAMS = "<10Q6i6Q6q2Q8i3fi"
_PREPARE_PARAMS = struct.Struct("<9Q6q4i")
_FINISH_PARAMS = struct.Struct("<3Q3q4ifi3Q6q3Q5i4x")
# Parts of them that calls set.  Of BackwardParams: what prepare made, sums, results; the work counter; a scale; steps.
_CALL, _CALL_OFFSET = struct.Struct("<6Q"), struct.calcsize("<10Q6i")
_COUNTER, _COUNTER_OFFSET = struct.Struct("<Q"), struct.calcsize("<10Q6i6Q6q")
_SCALE_OFFSET, _SCORE_OFFSET = struct.calcsize("<10Q6i6Q6q2Q8i"), struct.calcsize(_BACKWARD_PARAMS)
# Of PrepareParams: inputs and what it makes; of FinishParams: sums of dq, dq; a scale; sums of keys, dk, dv.
_PREPARE_CALL = struct.Struct("<8Q")
_SUMS, _SUMS_OFFSET = struct.Struct("<2Q"), struct.calcsize("<Q")
_FINISH_SCALE_OFFSET = struct.calcsize("<3Q3q4i")
_KEY_SUMS, _KEY_SUMS_OFFSET = struct.Struct("<3Q"), struct.calcsize("<3Q3q4ifi")
_MAPS, _THREADS, _CONVERT_THREADS, _CONVERT_ROWS = 4, 384, 256, 32


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
    def row_bytes(self) -> int:
        """Bytes that an item visits for a query position: Q, dO and the float32 sums of dQ."""
        return 2 * self.pack * (self.head_dim + self.v_dim) + 4 * self.head_dim * self.sum_dq

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
    """The kernel that makes dq where the backward's own does not (``not BackwardInstance.sum_dq``), and before that one
    what it wants to know of the rows."""

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


class BackwardLaunch:
    """The kernels of a backward pass with all of their arguments but the memory of a call's tensors: kept for calls
    that differ in nothing else.

    Args:
        q_BHQD, k_BGKD, v_BGKE, out_BHQE, d_out_BHQE, dq_BHQD, dk_BGKD, dv_BGKE: what the calls' tensors are like, on
            the current device and not empty; head dims are multiples of 8 and at most the instance's; inputs are ready
            for TMA (:func:`cuda_driver.is_tma_ready`), the results' rows are contiguous and 16-byte aligned.
        intervals, bit_tiles: of the mask, contiguous.
        schedule: made for the instance's ``rows``, ``pack`` and ``keys``.
        score: what the calls' score mods are like (the instance's steps); their values and factors may differ.
        gradient_q: given unless the instance sums dq.
        sm_margin: multiprocessors that are left to others.
        two_kernels: only if the instance sums dq; of instances with the same ``rows``, whose items walk all heads of a
            group.

    Raises ValueError where there are 2^31 or more query rows, counted over batch entries and heads.
    """

    def __init__(
        self,
        instance: BackwardInstance,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        out_BHQE: Tensor,
        d_out_BHQE: Tensor,
        dq_BHQD: Tensor,
        dk_BGKD: Tensor,
        dv_BGKE: Tensor,
        intervals: RowIntervals,
        schedule: BackwardSchedule,
        scale: float,
        score: KernelScore | None = None,
        gradient_q: GradientQ | None = None,
        sm_margin: int = 0,
        bit_tiles: BitTiles | None = None,
        two_kernels: TwoKernels | None = None,
    ) -> None:
        self._device = q_BHQD.device
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
        plan = schedule.plan
        tiles = _tiles_of_a_mask(plan, intervals)
        key_blocks = 0
        if heads // kv_heads > schedule.heads:
            key_blocks = tiles * kv_heads * (batch if mask_heads > 1 or mask_batch == 1 else 1)
        # One allocation: shifts, deltas, work counters, dQ sums; then sums of dK and dV where several items share them.
        dq_floats = head_rows * instance.head_dim if instance.sum_dq else 0
        self._head_rows, self._row_floats, self._sums_dq = head_rows, 2 * head_rows + 4 + dq_floats, instance.sum_dq
        self._block_floats = key_blocks * instance.keys * (instance.head_dim + instance.v_dim)
        self._row_blocks = head_rows // _CONVERT_ROWS
        self._finish_blocks = (self._row_blocks if instance.sum_dq else 0) + 2 * key_blocks
        self._split = two_kernels.taken if two_kernels else None
        split = two_kernels.taken.data_ptr() if two_kernels else 0
        self._scale = scale
        gradient_scale = self._gradient_scale(score)
        scales = (gradient_scale, LOG2_E if score else scale * LOG2_E, scale)
        self._lock = threading.Lock()  # calls write into the parameters

        prepare, _, finish = load_kernels(instance, self._device.index)
        self._prepare_kernel, self._finish_kernel = prepare, finish
        self._prepare = cuda_driver.ParameterBlock(0, _PREPARE_PARAMS)
        self._prepare.set_rest(
            *(0,) * 8,  # see __call__
            split,
            *out_BHQE.stride()[:3],
            *d_out_BHQE.stride()[:3],
            heads,
            q_len,
            padded_rows,
            v_dim,
        )
        self._finish = cuda_driver.ParameterBlock(0, _FINISH_PARAMS)
        self._finish.set_rest(
            split,
            *(0, 0),  # see __call__
            *dq_BHQD.stride()[:3],
            heads,
            q_len,
            padded_rows,
            head_dim,
            gradient_scale,
            self._row_blocks if instance.sum_dq else 0,
            *(0, 0, 0),  # see __call__
            *dk_BGKD.stride()[:3],
            *dv_BGKE.stride()[:3],
            *_plan_pointers(plan),
            kv_heads,
            tiles,
            mask_batch,
            mask_heads,
            v_dim,
        )
        inputs = (q_BHQD, k_BGKD, v_BGKE, d_out_BHQE)
        rest = (scales, score, sm_margin, bit_tiles)
        self._ways = []
        for way, keys, of_q in ((instance, schedule, gradient_q), *([two_kernels[:3]] if two_kernels else [])):
            main = _MainLaunch(way, *inputs, dk_BGKD, dv_BGKE, padded_rows, split, intervals, keys, *rest)
            launch_q = None
            if of_q is not None:
                like = (*inputs, out_BHQE, dq_BHQD, padded_rows, split)
                launch_q = GradientQLaunch(of_q.instance, *like, intervals, of_q.schedule, *rest)
            self._ways.append((main, launch_q))

    def _gradient_scale(self, score: KernelScore | None) -> float:
        return self._scale * score.factor if score else self._scale

    def __call__(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        out_BHQE: Tensor,
        lse_BHQ: Tensor,
        d_out_BHQE: Tensor,
        d_lse_BHQ: Tensor | None,
        dq_BHQD: Tensor,
        dk_BGKD: Tensor,
        dv_BGKE: Tensor,
        score: KernelScore | None = None,
    ) -> None:
        """Fill ``dq``, ``dk`` and ``dv`` on the current stream; ``lse`` (log2 domain) and ``d_lse`` are contiguous
        float32."""
        stream = cuda_driver.current_stream(self._device)
        floats = torch.empty(self._row_floats + self._block_floats, dtype=torch.float32, device=self._device)
        row_shift = floats.data_ptr()
        row_delta, work_counters = row_shift + 4 * self._head_rows, row_shift + 8 * self._head_rows
        dq_sums = work_counters + 16 if self._sums_dq else 0
        dkv_sums = row_shift + 4 * self._row_floats if self._block_floats else 0
        # What prepare does not clear: all of it but the statistics where it is not launched.
        first_zero = self._row_floats if self._sums_dq else 2 * self._head_rows
        if first_zero < floats.numel():
            cuda_driver.fill_zero(floats[first_zero:], stream)
        d_out, dq, dk, dv = d_out_BHQE.data_ptr(), dq_BHQD.data_ptr(), dk_BGKD.data_ptr(), dv_BGKE.data_ptr()
        inputs = (q_BHQD.data_ptr(), k_BGKD.data_ptr(), v_BGKE.data_ptr(), d_out)
        d_lse = 0 if d_lse_BHQ is None else d_lse_BHQ.data_ptr()
        scaled = (self._gradient_scale(score), score, stream)
        with self._lock:
            out, lse = out_BHQE.data_ptr(), lse_BHQ.data_ptr()
            if self._sums_dq:
                given = (out, d_out, lse, d_lse, row_shift, row_delta, dq_sums, work_counters)
                self._prepare.set_part(0, _PREPARE_CALL, *given)
                self._prepare_kernel.launch(self._row_blocks, _CONVERT_THREADS, self._prepare, stream)
            for main, gradient_q in self._ways:
                if gradient_q is not None:
                    gradient_q(inputs, (out, lse, d_lse), row_shift, row_delta, dq, work_counters + 4, *scaled)
                main(inputs, (row_shift, row_delta, dq_sums), dkv_sums, dk, dv, work_counters, *scaled)
            if self._finish_blocks:
                self._finish.set_part(_SUMS_OFFSET, _SUMS, dq_sums, dq)
                self._finish.set_part(_KEY_SUMS_OFFSET, _KEY_SUMS, dkv_sums, dk, dv)
                if score is not None:
                    self._finish.set_part(_FINISH_SCALE_OFFSET, SCALE, scaled[0])
                self._finish_kernel.launch(self._finish_blocks, _CONVERT_THREADS, self._finish, stream)


def _tiles_of_a_mask(plan: TilePlan, intervals: RowIntervals) -> int:
    """Key tiles of one batch entry and head where heads have masks of their own, else all of them."""
    mask_batch, mask_heads = intervals.starts.shape[:2]
    return plan.tile_begin.shape[0] // (mask_batch * mask_heads if mask_heads > 1 else 1)


def _plan_pointers(plan: TilePlan) -> tuple[int, int, int]:
    return plan.head_ptr.data_ptr(), plan.tile_begin.data_ptr(), plan.tile_end.data_ptr()


class _MainLaunch:
    """The kernel for dK and dV, and sums of dQ where the instance has them; arguments as of :class:`BackwardLaunch`."""

    def __init__(
        self,
        instance: BackwardInstance,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        d_out_BHQE: Tensor,
        dk_BGKD: Tensor,
        dv_BGKE: Tensor,
        padded_rows: int,
        split: int,
        intervals: RowIntervals,
        schedule: BackwardSchedule,
        scales: tuple[float, float, float],
        score: KernelScore | None,
        sm_margin: int,
        bit_tiles: BitTiles | None,
    ) -> None:
        self._tables = intervals, schedule, bit_tiles  # whose addresses the parameters hold
        _, self._kernel, _ = load_kernels(instance, q_BHQD.device.index)
        self._score = struct.Struct("<" + score_format(instance.score_steps, instance.generated))
        self._params = cuda_driver.ParameterBlock(_MAPS, instance.params())
        inputs = (q_BHQD, k_BGKD, v_BGKE, d_out_BHQE)
        set_backward_maps(self._params, *inputs, instance.pack, instance.positions, instance.keys)
        batch, heads, q_len, head_dim = q_BHQD.shape
        _, kv_heads, _, v_dim = v_BGKE.shape
        mask_batch, mask_heads, slots, _ = intervals.starts.shape
        plan, entries = schedule.plan, schedule.entries.shape[0]
        parts = heads // kv_heads // schedule.heads
        replicas = (kv_heads * parts if mask_heads == 1 else 1) * (batch if mask_batch == 1 else 1)
        section = min(replicas, max(1, L2_BYTES // (q_len * instance.row_bytes)))
        self._shares_keys = parts > 1
        self._grid = min(entries * replicas, max(1, cuda_driver.multiprocessors(q_BHQD.device) - sm_margin))
        self._params.set_rest(
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
            *(0,) * 6,  # see __call__
            *dk_BGKD.stride()[:3],
            *dv_BGKE.stride()[:3],
            0,  # see __call__
            split,
            kv_heads,
            parts,
            schedule.heads,
            q_len,
            padded_rows,
            head_dim,
            v_dim,
            _tiles_of_a_mask(plan, intervals),
            *scales,
            batch * heads * padded_rows // ROW_GROUP,
            *(score.values if score else (0,) * 7),
            *bit_tile_values(bit_tiles),
            0 if schedule.count is None else schedule.count.data_ptr(),
        )

    def __call__(
        self,
        inputs: Sequence[int],
        rows: tuple[int, int, int],
        dkv_sums: int,
        dk: int,
        dv: int,
        work_counter: int,
        gradient_scale: float,
        score: KernelScore | None,
        stream: int,
    ) -> None:
        """``inputs``: addresses of q, k, v, d_out; ``rows``: of shifts, deltas and sums of dq; others are addresses."""
        params = self._params
        for index, address in enumerate(inputs):
            params.move_map(index, address)
        params.set_part(_CALL_OFFSET, _CALL, *rows, dkv_sums if self._shares_keys else 0, dk, dv)
        params.set_part(_COUNTER_OFFSET, _COUNTER, work_counter)
        if score is not None:
            params.set_part(_SCALE_OFFSET, SCALE, gradient_scale)
            params.set_part(_SCORE_OFFSET, self._score, *score.values)
        self._kernel.launch(self._grid, _THREADS, params, stream)
