"""Forward passes with few query rows and many keys: parts of the keys as work of their own, then joined.

The forward kernel runs with a batch entry for each part (``FFA_SPLIT_KEYS``: all of them read the same keys and
values), its mask being the plan's within the part's keys; ``csrc/cuda/ffa/combine.cu`` joins the results.

Shape legend: P parts of the keys, B batch, H query heads, R intervals a row, Q query rows, E value head dim.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import cuda_driver
from magi_flex.kernels.cuda_build import compile_cubin
from magi_flex.kernels.ffa_forward import ForwardInstance, ForwardLaunch
from magi_flex.kernels.ffa_launch import kernel_dtype
from magi_flex.kernels.ffa_schedule import Schedule
from magi_flex.kernels.plan_cache import derived
from magi_flex.mask_plan import MaskPlan

_PARAMS = struct.Struct("<6Q3q5i4x")  # CombineParams
_THREADS, _ROWS = 256, 8
MAX_PARTS = 32
# A part of fewer keys takes less time than its own overhead (first loads, a partial result written and read).
_LEAST_KEYS = 512


def key_parts(row_tiles: int, kv_len: int, processors: int) -> int:
    """Into how many parts of the keys so many row tiles (over all heads and batch entries) are split; 1: not at all."""
    return max(1, min(processors // max(row_tiles, 1), kv_len // _LEAST_KEYS, MAX_PARTS))


def split_plan(plan: MaskPlan, parts: int, batch: int) -> MaskPlan:
    """The plan with ``parts * batch`` mask batch entries, part by part, each with its share of the keys."""

    def build() -> MaskPlan:
        starts, ends = (x.expand(batch, -1, -1, -1) for x in (plan.starts, plan.ends))
        edges = [plan.kv_len * part // parts for part in range(parts + 1)]
        clamped = [
            [x.clamp(low, high) for x in (starts, ends)] for low, high in zip(edges[:-1], edges[1:], strict=True)
        ]
        starts, ends = (torch.cat(x) for x in zip(*clamped, strict=True))
        return MaskPlan(RowIntervals.build(starts, ends, plan.kv_len))

    return derived(plan, ("ffa parts", parts, batch), build)


class LaunchInParts:
    """As :class:`ForwardLaunch`, in parts: for an instance that splits keys, and the plan of the parts."""

    def __init__(
        self,
        parts: int,
        instance: ForwardInstance,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        intervals: RowIntervals,
        schedule: Schedule,
        scale: float,
        sm_margin: int,
    ) -> None:
        self._parts = parts
        batch, heads, q_len, _ = q_BHQD.shape
        self._out_shape = (parts * batch, heads, q_len, v_BGKE.shape[3])
        q, out = self._inputs_and_results(q_BHQD)[:2]
        self._launch = ForwardLaunch(instance, q, k_BGKD, v_BGKE, out, intervals, schedule, scale, sm_margin=sm_margin)

    def _inputs_and_results(self, q_BHQD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = torch.empty(self._out_shape, dtype=torch.float32, device=q_BHQD.device)
        rows = q_BHQD.shape[:3].numel()
        lse, max_score = torch.empty((2, self._parts, rows), dtype=torch.float32, device=q_BHQD.device)
        return q_BHQD.repeat(self._parts, 1, 1, 1), out, lse, max_score

    def __call__(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        out_BHQE: Tensor,
        lse_BHQ: Tensor,
        max_score_BHQ: Tensor,
        score: None = None,
    ) -> None:
        q, out, lse, max_score = self._inputs_and_results(q_BHQD)
        self._launch(q, k_BGKD, v_BGKE, out, lse, max_score)
        launch_combine(q.dtype, out, lse, max_score, out_BHQE, lse_BHQ, max_score_BHQ)


@functools.lru_cache(maxsize=64)
def _kernel(dtype: torch.dtype, wide_out: bool, device_index: int) -> cuda_driver.Kernel:
    defines = {"FFA_DTYPE": kernel_dtype(dtype), "FFA_WIDE_OUT": wide_out}
    with torch.cuda.device(device_index):
        return cuda_driver.Kernel(compile_cubin("ffa/combine.cu", defines).code, "ffa_combine", 0)


def launch_combine(
    dtype: torch.dtype,
    part_out_PBHQE: Tensor,
    part_lse_PBHQ: Tensor,
    part_max_PBHQ: Tensor,
    out_BHQE: Tensor,
    lse_BHQ: Tensor,
    max_score_BHQ: Tensor,
) -> None:
    """Fill ``out`` (``dtype`` or float32), ``lse`` and ``max_score`` on the current stream.

    The parts are contiguous float32, at most MAX_PARTS; the head dim is a multiple of 8, at most 256.
    """
    device = out_BHQE.device
    batch, heads, q_len, v_dim = out_BHQE.shape
    rows = batch * heads * q_len
    params = cuda_driver.ParameterBlock(0, _PARAMS)
    params.set_rest(
        part_out_PBHQE.data_ptr(),
        part_lse_PBHQ.data_ptr(),
        part_max_PBHQ.data_ptr(),
        out_BHQE.data_ptr(),
        lse_BHQ.data_ptr(),
        max_score_BHQ.data_ptr(),
        *out_BHQE.stride()[:3],
        part_lse_PBHQ.shape[0],
        rows,
        heads,
        q_len,
        v_dim,
    )
    kernel = _kernel(dtype, out_BHQE.dtype == torch.float32, device.index)
    kernel.launch(-(-rows // _ROWS), _THREADS, params, cuda_driver.current_stream(device))
