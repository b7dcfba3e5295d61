"""The ``cpu`` backend: C++ kernels of ``csrc/cpu``, forward and backward.

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim,
R intervals of a row.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from magi_flex.kernels import jit
from magi_flex.kernels.layout import empty_in_order, fill_order
from magi_flex.kernels.request import (
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Backend,
    Bias,
    Distance,
    Multiply,
    RequestFacts,
    ScoreProgram,
    ScoreStep,
    Softcap,
)

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NATIVE_STEPS = (Multiply, Softcap, Distance, Bias)

# ---- the C interface (csrc/cpu/attention.h) -------------------------------------------------------------------------


class _Tensor4(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("stride", c_int64 * 4), ("type", c_int32))


class _Mask(ctypes.Structure):
    _fields_ = (
        ("starts", c_void_p),
        ("ends", c_void_p),
        ("batch_stride", c_int64),
        ("head_stride", c_int64),
        ("slots", c_int64),
        ("row_ptr", c_void_p),
        ("row_ptr_batch_stride", c_int64),
        ("row_ptr_head_stride", c_int64),
        ("cols", c_void_p),
        ("slot", c_void_p),
        ("bits", c_void_p),
        ("q_tile", c_int64),
        ("kv_tile", c_int64),
    )


class _ScoreStep(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("value", c_float),
        ("table", c_void_p),
        ("type", c_int32),
        ("absolute", c_int32),
        ("stride", c_int64 * 4),
        ("offset", c_int64),
        ("size", c_int64),
    )


class _ScoreProgram(ctypes.Structure):
    _fields_ = (
        ("steps", c_void_p),
        ("count", c_int64),
        ("batch_offset", c_int64),
        ("head_offset", c_int64),
        ("q_index", c_void_p),
        ("k_index", c_void_p),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim")),
        ("scale", c_float),
        ("threads", c_int32),
        *((name, _Tensor4) for name in ("q", "k", "v", "out")),
        ("lse", c_void_p),
        ("max_score", c_void_p),
        ("mask", _Mask),
        ("score", _ScoreProgram),
        *((name, _Tensor4) for name in ("d_out", "dq", "dk", "dv")),
        ("d_lse", c_void_p),
    )


_OUT_OF_MEMORY, _BIAS_OUT_OF_RANGE = 1, 2


class _Call:
    """One call's arguments; holds every tensor whose memory they point to."""

    def __init__(self, request: AttentionRequest):
        q, k, v = request.q, request.k, request.v
        self.keep: list[object] = []
        self.args = _Attention(
            batch=q.shape[0],
            q_heads=q.shape[1],
            kv_heads=k.shape[1],
            q_len=q.shape[2],
            kv_len=k.shape[2],
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            threads=torch.get_num_threads(),
            q=self.tensor4(q),
            k=self.tensor4(k),
            v=self.tensor4(v),
        )
        self._set_mask(request)
        self._set_score(request)

    def pointer(self, tensor: Tensor) -> int:
        self.keep.append(tensor)
        return tensor.data_ptr()

    def tensor4(self, tensor: Tensor) -> _Tensor4:
        return _Tensor4(self.pointer(tensor), (c_int64 * 4)(*tensor.stride()), ELEMENT_TYPES[tensor.dtype])

    def _set_mask(self, request: AttentionRequest) -> None:
        mask, plan = self.args.mask, request.plan
        starts, ends = (x.to(torch.int32).contiguous() for x in (plan.starts, plan.ends))
        mask.starts, mask.ends = self.pointer(starts), self.pointer(ends)
        mask.slots = starts.shape[2]
        mask.batch_stride, mask.head_stride = _shared_strides(starts)
        tiles = plan.bit_tiles
        if tiles is None:
            return
        row_ptr = tiles.row_ptr.contiguous()
        mask.row_ptr = self.pointer(row_ptr)
        mask.row_ptr_batch_stride, mask.row_ptr_head_stride = _shared_strides(row_ptr)
        for name in ("cols", "slot", "bits"):
            setattr(mask, name, self.pointer(getattr(tiles, name).contiguous()))
        mask.q_tile, mask.kv_tile = tiles.q_tile, tiles.kv_tile

    def _set_score(self, request: AttentionRequest) -> None:
        score = request.score
        steps = list(score.steps or ())
        scale = request.scale
        while steps and isinstance(first := steps[0], Multiply):  # a factor at the front is a different scale
            scale *= first.factor
            del steps[0]
        self.args.scale = scale
        array = (_ScoreStep * len(steps))(*(self._step(step) for step in steps))
        self.keep.append(array)
        index = score.index_map
        self.args.score = _ScoreProgram(ctypes.addressof(array), len(steps), index.b_offset, index.h_offset)
        if index.q_index is not None:
            self.args.score.q_index = self.pointer(index.q_index.to(torch.int32).contiguous())
        if index.k_index is not None:
            self.args.score.k_index = self.pointer(index.k_index.to(torch.int32).contiguous())

    def _step(self, step: ScoreStep) -> _ScoreStep:
        if isinstance(step, Multiply):
            return _ScoreStep(kind=0, value=step.factor)
        if isinstance(step, Softcap):
            return _ScoreStep(kind=1, value=step.cap)
        if isinstance(step, Distance):
            slopes = step.slopes_H.detach().to(torch.float32).contiguous()
            strides = (c_int64 * 4)(0, int(slopes.numel() > 1), 0, 0)
            return _ScoreStep(kind=2, table=self.pointer(slopes), absolute=step.absolute, stride=strides)
        table = step.table.detach().contiguous()
        if table.dtype not in ELEMENT_TYPES:
            table = table.to(torch.float32)
        return _ScoreStep(
            kind=3,
            value=step.factor,
            table=self.pointer(table),
            type=ELEMENT_TYPES[table.dtype],
            stride=(c_int64 * 4)(*step.strides_bhqk),
            offset=step.offset,
            size=table.numel(),
        )

    def run(self, name: str) -> None:
        library = jit.load()
        if isinstance(library, jit.BuildError):
            raise library
        status = getattr(library, name)(ctypes.byref(self.args))
        if status == _OUT_OF_MEMORY:
            raise MemoryError("cpu attention: out of memory for its scratch buffers")
        if status == _BIAS_OUT_OF_RANGE:
            raise IndexError(
                "score_mod: a bias table is read outside of its bounds at a (query, key) pair that attends; "
                "make the table larger or mask the pair"
            )


def _shared_strides(tensor: Tensor) -> tuple[int, int]:
    """Strides over batch and heads of a contiguous tensor, 0 where there is but one for all."""
    return tuple(0 if tensor.shape[dim] == 1 else tensor.stride(dim) for dim in (0, 1))  # type: ignore[return-value]


# ---- checks: the library reads raw memory ---------------------------------------------------------------------------


def _check(request: AttentionRequest) -> None:
    q, k, v = request.q, request.k, request.v
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.device.type != "cpu" or tensor.dtype not in ELEMENT_TYPES:
            raise ValueError(
                f"{name}: is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; the cpu kernel takes "
                "[batch, heads, length, head_dim] of float32, bfloat16 or float16 on the CPU"
            )
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: is {tensor.dtype}, but q is {q.dtype}; give all three the same dtype")
    heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
    _check_score(request.score, heads, q_len, kv_len)


def _check_score(score: ScoreProgram, heads: int, q_len: int, kv_len: int) -> None:
    if score.steps is None:
        raise ValueError("score: has no native steps; use the tiled kernel")
    for step in score.steps:
        if isinstance(step, Distance) and step.slopes_H.numel() not in (1, heads + score.index_map.h_offset):
            if step.slopes_H.numel() < heads + score.index_map.h_offset:
                raise ValueError(f"score: {step.slopes_H.numel()} slopes for {heads} heads; give one a head, or one")
    for name, index, length in (("q", score.index_map.q_index, q_len), ("k", score.index_map.k_index, kv_len)):
        if index is not None and index.shape != (length,):
            raise ValueError(f"score: index_map.{name}_index is {list(index.shape)}; [{length}] is needed")


# ---- the backend ----------------------------------------------------------------------------------------------------


class CpuBackend(Backend):
    """Blocked matrix products over the key tiles of each row tile, straight from the row intervals.

    float32 softmax and accumulation for float32, bfloat16 and float16; any head dims, any whole GQA ratio; results do
    not depend on scheduling.
    """

    name = "cpu"

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"runs on the CPU only, the tensors are on {device.type}"
        library = jit.load()
        return str(library) if isinstance(library, jit.BuildError) else None

    def objections(self, facts: RequestFacts) -> list[str]:
        reasons = []
        if facts.dtype not in ELEMENT_TYPES:
            reasons.append(f"serves float32, bfloat16 and float16, not {str(facts.dtype).removeprefix('torch.')}")
        if facts.mixed_dtypes:
            reasons.append("query, key and value have different dtypes")
        if facts.score_steps is None:
            reasons.append("the score mod is not made of scale, softcap, distance and bias steps")
        elif unknown := [step.__name__ for step in facts.score_steps if step not in NATIVE_STEPS]:
            reasons.append(f"no native score step {', '.join(unknown)}")
        if facts.score_grads and facts.needs_backward:
            reasons.append("does not compute gradients of what the score mod captures")
        return reasons

    def forward(self, request: AttentionRequest) -> AttentionOutput:
        _check(request)
        q, v = request.q, request.v
        call = _Call(request)
        dtype = torch.float32 if request.wide_results else q.dtype
        out = empty_in_order(q, (*q.shape[:3], v.shape[3]), fill_order(q), dtype)
        lse, max_score = (torch.empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
        call.args.out = call.tensor4(out)
        call.args.lse, call.args.max_score = call.pointer(lse), call.pointer(max_score)
        call.run("magi_attention_forward")
        return AttentionOutput(out, lse, max_score)

    def backward(
        self,
        request: AttentionRequest,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
    ) -> AttentionGradients:
        _check(request)
        if any(request.score.needs_grad):
            raise ValueError("score: gradients of captures are wanted; the cpu kernel has none, use the tiled kernel")
        q, k, v = request.q, request.k, request.v
        for name, tensor, shape in (
            ("out", out, (*q.shape[:3], v.shape[3])),
            ("d_out", d_out, (*q.shape[:3], v.shape[3])),
            ("lse", lse, q.shape[:3]),
            ("d_lse", d_lse, q.shape[:3]),
        ):
            if tensor is not None and tensor.shape != tuple(shape):
                raise ValueError(f"{name}: is {list(tensor.shape)}, but {list(shape)} is needed")
        call = _Call(request)
        grads = [
            empty_in_order(x, x.shape, fill_order(x), torch.float32 if request.wide_results else x.dtype)
            for x in (q, k, v)
        ]
        call.args.out, call.args.d_out = call.tensor4(out), call.tensor4(d_out)
        call.args.lse = call.pointer(lse.to(torch.float32).contiguous())
        if d_lse is not None:
            call.args.d_lse = call.pointer(d_lse.to(torch.float32).contiguous())
        dq, dk, dv = grads
        call.args.dq, call.args.dk, call.args.dv = (call.tensor4(x) for x in grads)
        call.run("magi_attention_backward")
        return AttentionGradients(dq, dk, dv, captures=(None,) * len(request.score.captures))
