"""Launching the Hopper backward kernels (``csrc/cuda/ffa/backward.cu``).

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim,
N key tiles over all mask batch entries and mask heads.
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
from magi_flex.kernels.cuda_build import Cubin, compile_cubin
from magi_flex.tiles import TilePlan

KEY_TILE = 128
# BackwardParams of the kernel after its four tensor maps, PrepareParams and FinishParams.
_BACKWARD_PARAMS = struct.Struct("<10Q6i6Q6qQ7i2f4x")
_PREPARE_PARAMS = struct.Struct("<8Q6q4i")
_FINISH_PARAMS = struct.Struct("<2Q3q4ifi3Q6q3Q4i")
_THREADS, _CONVERT_THREADS, _CONVERT_ROWS = 384, 256, 32
_L2_BYTES = 64 << 20  # 50 MB on an H100, 60 MB on an H200; not all rows are visited at once
_ROW_GROUP = 8  # rows of a group of the dQ buffer: steps begin at multiples of it


@dataclass(frozen=True)
class BackwardInstance:
    """One compiled variant of the kernels.

    Attributes:
        head_dim: compiled size, 64 or 128 (the tensors' may be smaller: reads beyond them give zeros).
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


@dataclass(frozen=True)
class BackwardSchedule:
    """A transposed tile plan with what the kernel's scheduler reads.

    Attributes:
        plan: key tiles and their query runs.
        heads: query heads that a work item walks, a divisor of the query heads per key/value head.  If it is less than
            these, the parts of dK and dV are summed in float32 in memory: more, smaller items.
        entries: int32 ``[*, 4]``, key tiles in working order, most steps first: the mask (b * H + h) of an item's first
            query head, the tile counted inside that mask, the steps of ``plan.q_tile`` query rows that the tile takes
            over all heads of the item, 0.
    """

    plan: TilePlan
    heads: int
    entries: Tensor


def make_backward_schedule(plan: TilePlan, mask_heads: int, heads: int) -> BackwardSchedule:
    """Order the key tiles of ``plan`` for items of ``heads`` query heads (all on the plan's device).

    Where the mask depends on the query head and several heads share a key/value head, these must have the same key
    tiles (a fixed grid).
    """
    if not plan.transposed:
        raise ValueError("plan: has row tiles of queries; the backward needs the transposed plan (key tiles)")
    steps = sum(_steps(runs, ptr, plan.q_tile) for runs, ptr in _run_lists(plan))
    counts = plan.head_ptr.diff().long()
    masks = torch.arange(len(counts), device=counts.device)
    if mask_heads == 1 or heads == 1:
        mask = torch.repeat_interleave(masks, counts, output_size=plan.tile_begin.shape[0])
        tile = torch.arange(len(mask), device=mask.device) - plan.head_ptr[mask]
        steps = steps * heads
    else:
        tiles = plan.tile_begin.shape[0] // len(counts)
        steps = steps.view(-1, heads, tiles).sum(1).flatten()
        mask = masks[::heads].repeat_interleave(tiles)
        tile = torch.arange(tiles, device=masks.device).repeat(len(counts) // heads)
    order = torch.argsort(steps, descending=True, stable=True)
    entries = torch.stack((mask, tile, steps, torch.zeros_like(steps)), 1)[order]
    return BackwardSchedule(plan, heads, entries.to(torch.int32).contiguous())


def _run_lists(plan: TilePlan) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (plan.full_runs, plan.full_ptr), (plan.partial_runs, plan.partial_ptr)


def _steps(runs: Tensor, ptr: Tensor, rows: int) -> Tensor:
    """Steps of each tile, int64: a run's first step begins at a multiple of the row group."""
    first = runs[:, 0].long() // _ROW_GROUP * _ROW_GROUP
    steps = (runs[:, 1] - first + rows - 1) // rows
    return torch.nn.functional.pad(steps.cumsum(0), (1, 0))[ptr.long()].diff()


@functools.lru_cache(maxsize=16)
def multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


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


def launch_backward(
    instance: BackwardInstance,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
    d_out_BHQD: Tensor,
    d_lse_BHQ: Tensor | None,
    intervals: RowIntervals,
    schedule: BackwardSchedule,
    scale: float,
    dq_BHQD: Tensor,
    dk_BGKD: Tensor,
    dv_BGKD: Tensor,
    sm_margin: int = 0,
) -> None:
    """Fill ``dq``, ``dk`` and ``dv`` on the current stream.

    All inputs are ready for TMA (:func:`cuda_driver.is_tma_ready`) and not empty; head dims are equal, a multiple of 8
    and at most ``instance.head_dim``; ``lse`` (log2 domain) and ``d_lse`` are contiguous float32; the results' rows are
    contiguous and 16-byte aligned; ``schedule`` was made for ``instance.rows`` and KEY_TILE.
    """
    device = q_BHQD.device
    batch, heads, q_len, head_dim = q_BHQD.shape
    kv_heads = k_BGKD.shape[1]
    mask_batch, mask_heads, slots, _ = intervals.starts.shape
    padded_rows = -(-(q_len + instance.rows) // _CONVERT_ROWS) * _CONVERT_ROWS
    head_rows = batch * heads * padded_rows
    # One allocation: dQ buffer, shifts, deltas, work counter.
    scratch = torch.empty(head_rows * (instance.head_dim + 2) + 4, dtype=torch.float32, device=device)
    dq_buffer = scratch.data_ptr()
    row_shift = dq_buffer + 4 * head_rows * instance.head_dim
    row_delta = row_shift + 4 * head_rows
    work_counter = row_delta + 4 * head_rows
    stream = torch.cuda.current_stream(device).cuda_stream
    prepare_kernel, backward_kernel, finish_kernel = load_kernels(instance, device.index)
    convert_grid = head_rows // _CONVERT_ROWS

    prepare = cuda_driver.ParameterBlock(0, _PREPARE_PARAMS)
    prepare.set_rest(
        out_BHQD.data_ptr(),
        d_out_BHQD.data_ptr(),
        lse_BHQ.data_ptr(),
        0 if d_lse_BHQ is None else d_lse_BHQ.data_ptr(),
        row_shift,
        row_delta,
        dq_buffer,
        work_counter,
        *out_BHQD.stride()[:3],
        *d_out_BHQD.stride()[:3],
        heads,
        q_len,
        padded_rows,
        head_dim,
    )
    prepare_kernel.launch(convert_grid, _CONVERT_THREADS, prepare, stream)

    params = cuda_driver.ParameterBlock(4, _BACKWARD_PARAMS)
    by_row = (3, 2, 1, 0)  # head dim, row, head, batch
    for slot, x, rows in ((0, q_BHQD, instance.rows), (1, k_BGKD, KEY_TILE), (2, v_BGKD, KEY_TILE)):
        params.set_map(slot, cuda_driver.tensor_map(x, by_row, (64, rows, 1, 1), 128))
    params.set_map(3, cuda_driver.tensor_map(d_out_BHQD, by_row, (64, instance.rows, 1, 1), 128))
    plan = schedule.plan
    entries = schedule.entries.shape[0]
    parts = heads // kv_heads // schedule.heads
    replicas = (kv_heads * parts if mask_heads == 1 else 1) * (batch if mask_batch == 1 else 1)
    tiles = plan.tile_begin.shape[0] // (mask_batch * mask_heads if mask_heads > 1 else 1)
    planes = kv_heads * (batch if mask_heads > 1 or mask_batch == 1 else 1)
    dkv_buffer, key_blocks = 0, 0
    if parts > 1:
        key_blocks = planes * tiles
        dkv_sums = torch.empty(key_blocks * 2 * KEY_TILE * instance.head_dim, dtype=torch.float32, device=device)
        cuda_driver.fill_zero(dkv_sums, stream)
        dkv_buffer = dkv_sums.data_ptr()
    # Of one query head at a time: Q, dO and the float32 sums.
    bytes_in_flight = q_len * instance.head_dim * 8
    section = min(replicas, max(1, _L2_BYTES // bytes_in_flight))
    params.set_rest(
        plan.head_ptr.data_ptr(),
        plan.tile_begin.data_ptr(),
        plan.tile_end.data_ptr(),
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
        dq_buffer,
        dkv_buffer,
        dk_BGKD.data_ptr(),
        dv_BGKD.data_ptr(),
        *dk_BGKD.stride()[:3],
        *dv_BGKD.stride()[:3],
        work_counter,
        kv_heads,
        parts,
        schedule.heads,
        q_len,
        padded_rows,
        head_dim,
        tiles,
        scale,
        scale * math.log2(math.e),
    )
    grid = min(entries * replicas, max(1, multiprocessors(device.index) - sm_margin))
    backward_kernel.launch(grid, _THREADS, params, stream)

    finish = cuda_driver.ParameterBlock(0, _FINISH_PARAMS)
    finish.set_rest(
        dq_buffer,
        dq_BHQD.data_ptr(),
        *dq_BHQD.stride()[:3],
        heads,
        q_len,
        padded_rows,
        head_dim,
        scale,
        convert_grid,
        dkv_buffer,
        dk_BGKD.data_ptr(),
        dv_BGKD.data_ptr(),
        *dk_BGKD.stride()[:3],
        *dv_BGKD.stride()[:3],
        plan.head_ptr.data_ptr(),
        plan.tile_begin.data_ptr(),
        plan.tile_end.data_ptr(),
        kv_heads,
        tiles,
        mask_batch,
        mask_heads,
    )
    finish_kernel.launch(convert_grid + 2 * key_blocks, _CONVERT_THREADS, finish, stream)
