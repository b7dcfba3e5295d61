"""Launching the Hopper backward kernels (``csrc/cuda/ffa/backward.cu``).

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim,
N key tiles over all mask batch entries and mask heads.
"""

from __future__ import annotations

import functools
import struct
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import cuda_driver
from magi_flex.kernels.cuda_build import Cubin, compile_cubin
from magi_flex.kernels.ffa_backward_schedule import KEY_TILE, BackwardSchedule
from magi_flex.kernels.ffa_forward import LOG2_E, multiprocessors

MAX_HEAD_DIM = 128
# BackwardParams of the kernel after its four tensor maps, PrepareParams and FinishParams.
_BACKWARD_PARAMS = struct.Struct("<10Q6i6Q6qQ8i2f")
_PREPARE_PARAMS = struct.Struct("<8Q6q4i")
_FINISH_PARAMS = struct.Struct("<2Q3q4ifi3Q6q3Q5i4x")
_THREADS, _CONVERT_THREADS, _CONVERT_ROWS = 384, 256, 32
# 50 MB on an H100, 60 MB on an H200; what is visited at a time is less than what a section holds.
_L2_BYTES = 64 << 20


@dataclass(frozen=True)
class BackwardInstance:
    """One compiled variant of the kernels.

    Attributes:
        head_dim: compiled size of D and E, 64 or 128 (the tensors' may be smaller: reads beyond them give zeros).
        rows: query rows of a step.
        wide: dq, dk and dv are float32.
        wide_out: the output that is given is float32.
    """

    dtype: torch.dtype
    head_dim: int
    rows: int = 64
    wide: bool = False
    wide_out: bool = False

    def defines(self) -> dict[str, object]:
        return {
            "FFA_DTYPE": "bf16" if self.dtype == torch.bfloat16 else "fp16",
            "FFA_HEAD_DIM": self.head_dim,
            "FFA_ROWS": self.rows,
            "FFA_WIDE": self.wide,
            "FFA_WIDE_OUT": self.wide_out,
        }

    def compile(self) -> Cubin:
        """Machine code, from the cache where it is there."""
        return compile_cubin("ffa/backward.cu", self.defines())


def backward_instance(
    dtype: torch.dtype, head_dim: int, v_dim: int, wide: bool = False, wide_out: bool = False
) -> BackwardInstance:
    """The variant for these head dims, both at most MAX_HEAD_DIM."""
    return BackwardInstance(dtype, 64 if max(head_dim, v_dim) <= 64 else 128, wide=wide, wide_out=wide_out)


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
    """What a launch needs that does not depend on addresses and masks; belongs to one thread."""

    def __init__(self, instance: BackwardInstance, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> None:
        self.prepare_kernel, self.backward_kernel, self.finish_kernel = load_kernels(instance, q.device.index)
        self.multiprocessors = multiprocessors(q.device.index)
        self.prepare = cuda_driver.ParameterBlock(0, _PREPARE_PARAMS)
        self.backward = cuda_driver.ParameterBlock(4, _BACKWARD_PARAMS)
        self.finish = cuda_driver.ParameterBlock(0, _FINISH_PARAMS)
        by_row = (3, 2, 1, 0)  # head dim, row, head, batch
        rows = (instance.rows, KEY_TILE, KEY_TILE, instance.rows)
        for index, (x, height) in enumerate(zip((q, k, v, d_out), rows, strict=True)):
            self.backward.set_map(index, cuda_driver.tensor_map(x, by_row, (64, height, 1, 1), 128))


class _Launchers(threading.local):
    """Launchers by geometry, for each thread its own (a launch writes into the launcher's parameter blocks)."""

    def __init__(self) -> None:
        self.by_geometry: dict[tuple, _Launcher] = {}

    def get(self, instance: BackwardInstance, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> _Launcher:
        tensors = (q, k, v, d_out)
        geometry = (instance, q.device.index, *(x.shape for x in tensors), *(x.stride() for x in tensors))
        launcher = self.by_geometry.get(geometry)
        if launcher is None:
            if len(self.by_geometry) >= 1024:
                self.by_geometry.clear()
            launcher = self.by_geometry[geometry] = _Launcher(instance, *tensors)
        return launcher


_launchers = _Launchers()


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
    sm_margin: int = 0,
) -> None:
    """Fill ``dq``, ``dk`` and ``dv`` on the current stream.

    All inputs are on the current device, ready for TMA (:func:`cuda_driver.is_tma_ready`) and not empty; head dims are
    multiples of 8 and at most ``instance.head_dim``; ``lse`` (log2 domain) and ``d_lse`` are contiguous float32; the
    interval tables are contiguous; the results' rows are contiguous and 16-byte aligned; ``schedule`` was made for
    ``instance.rows``.  ``sm_margin`` multiprocessors are left to others.

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
    launcher = _launchers.get(instance, q_BHQD, k_BGKD, v_BGKE, d_out_BHQE)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    # One allocation: dQ sums, shifts, deltas, work counter; then sums of dK and dV where several items share them.
    plan, entries = schedule.plan, schedule.entries.shape[0]
    parts = heads // kv_heads // schedule.heads
    tiles = plan.tile_begin.shape[0] // (mask_batch * mask_heads if mask_heads > 1 else 1)
    key_blocks = 0
    if parts > 1:
        key_blocks = tiles * kv_heads * (batch if mask_heads > 1 or mask_batch == 1 else 1)
    row_floats = head_rows * (instance.head_dim + 2) + 4
    scratch = torch.empty(
        row_floats + key_blocks * 2 * KEY_TILE * instance.head_dim, dtype=torch.float32, device=device
    )
    dq_sums = scratch.data_ptr()
    row_shift = dq_sums + 4 * head_rows * instance.head_dim
    row_delta = row_shift + 4 * head_rows
    work_counter = row_delta + 4 * head_rows
    dkv_sums = 0
    if key_blocks:
        dkv_sums = dq_sums + 4 * row_floats
        cuda_driver.fill_zero(scratch[row_floats:], stream)
    row_blocks = head_rows // _CONVERT_ROWS

    launcher.prepare.set_rest(
        out_BHQE.data_ptr(),
        d_out_BHQE.data_ptr(),
        lse_BHQ.data_ptr(),
        0 if d_lse_BHQ is None else d_lse_BHQ.data_ptr(),
        row_shift,
        row_delta,
        dq_sums,
        work_counter,
        *out_BHQE.stride()[:3],
        *d_out_BHQE.stride()[:3],
        heads,
        q_len,
        padded_rows,
        v_dim,
    )
    launcher.prepare_kernel.launch(row_blocks, _CONVERT_THREADS, launcher.prepare, stream)

    for index, x in enumerate((q_BHQD, k_BGKD, v_BGKE, d_out_BHQE)):
        launcher.backward.move_map(index, x.data_ptr())
    replicas = (kv_heads * parts if mask_heads == 1 else 1) * (batch if mask_batch == 1 else 1)
    # An item visits one query head at a time: Q, dO and the float32 sums of dQ.
    section = min(replicas, max(1, _L2_BYTES // (q_len * instance.head_dim * 8)))
    plan_pointers = (plan.head_ptr.data_ptr(), plan.tile_begin.data_ptr(), plan.tile_end.data_ptr())
    dkv_targets = (dk_BGKD.data_ptr(), dv_BGKE.data_ptr(), *dk_BGKD.stride()[:3], *dv_BGKE.stride()[:3])
    launcher.backward.set_rest(
        *plan_pointers,
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
        row_shift,
        row_delta,
        dq_sums,
        dkv_sums,
        *dkv_targets,
        work_counter,
        kv_heads,
        parts,
        schedule.heads,
        q_len,
        padded_rows,
        head_dim,
        v_dim,
        tiles,
        scale,
        scale * LOG2_E,
    )
    grid = min(entries * replicas, max(1, launcher.multiprocessors - sm_margin))
    launcher.backward_kernel.launch(grid, _THREADS, launcher.backward, stream)

    launcher.finish.set_rest(
        dq_sums,
        dq_BHQD.data_ptr(),
        *dq_BHQD.stride()[:3],
        heads,
        q_len,
        padded_rows,
        head_dim,
        scale,
        row_blocks,
        dkv_sums,
        *dkv_targets,
        *plan_pointers,
        kv_heads,
        tiles,
        mask_batch,
        mask_heads,
        v_dim,
    )
    launcher.finish_kernel.launch(row_blocks + 2 * key_blocks, _CONVERT_THREADS, launcher.finish, stream)
