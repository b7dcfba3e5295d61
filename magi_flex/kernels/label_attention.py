"""Attention by labels, written over another kernel's results where a flag on the device says so.

Inside a CUDA graph nothing can be decided by the host.  A mask by labels (document ids) is walked there as intervals
that hold if every label stands in one run of keys; if one does not, these intervals are emptied, and the kernels here,
launched in any case, do the work.  When they are not wanted they end at once.

This file imports no Triton, which may be missing; the kernels are imported when one is launched.

Shape legend: B batch, H query heads (1 where shared by all), Q query rows, K keys, N query blocks, M key blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels.request import AttentionGradients, AttentionOutput, AttentionRequest, RequestFacts
from magi_flex.kernels.route import load
from magi_flex.kernels.triton_configs import padded
from magi_flex.kernels.triton_score import KernelScore, backward_score, forward_score

_WIDEST_ROW = {64: 256, 32: 1024}  # rows and keys of a tile -> bytes of a head that they go with


@dataclass(frozen=True)
class LabelledAttention:
    """A mask that is right in any case: equal labels, inside ``rest``, and what block lists make of that.

    Attributes:
        rest: intervals of ``[B, H]``.
        row_labels, key_labels: int64 ``[B, H, Q]`` and ``[B, H, K]``, B and H as ``rest`` has them.
        blocks: int8 ``[B, H, N, M]``, B and H of their own: 0 nothing attends, 1 the mask decides, 2 all attend; None
            without lists.
        block_size: rows and keys of a block.
        wanted: int32, one element: 0 where the results that are there are right already.
    """

    rest: RowIntervals
    row_labels: Tensor
    key_labels: Tensor
    blocks: Tensor | None
    block_size: tuple[int, int]
    wanted: Tensor

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor], block_size: Sequence[int], kv_len: int) -> LabelledAttention:
        """Of what the op ``plan_labels`` gives behind the intervals and their memory; without lists no block size."""
        starts, ends, row_labels, key_labels, wanted, *blocks = tensors
        rows, keys = block_size or (1, 1)
        rest = RowIntervals(starts, ends, kv_len)
        return LabelledAttention(rest, row_labels, key_labels, blocks[0] if blocks else None, (rows, keys), wanted)


def objections(facts: RequestFacts) -> list[str]:
    """Why such a call cannot be served."""
    triton = load("triton")
    if isinstance(triton, str):
        return [triton]
    missing = triton.missing(facts.device)
    found = [missing] if missing else triton.objections(facts)
    if facts.score_grads:
        found = [*found, "gradients of what a score mod captures are not computed"]
    return found


def forward(request: AttentionRequest, mask: LabelledAttention, results: AttentionOutput) -> None:
    """Write ``results`` of any request (neither queries nor keys may be empty) where wanted."""
    from magi_flex.kernels.label_triton import forward_kernel

    q, k, v = request.q, request.k, request.v
    if not results.out.numel():
        return
    score = forward_score(request.score, q.device)
    batch, heads, q_len, _ = q.shape
    assert results.lse.is_contiguous() and results.max_score.is_contiguous()
    options = _options(request, mask, score)
    with torch.cuda.device_of(q):
        forward_kernel[(-(-q_len // options["M"]), batch * heads)](
            mask.wanted, q, k, v, results.out, results.lse, results.max_score,
            *(x.stride() for x in (q, k, v, results.out)),
            _mask(mask), _blocks(mask), score.args, q_len, k.shape[2], heads, heads // k.shape[1], request.scale,
            **options,
        )  # fmt: skip


def backward(
    request: AttentionRequest,
    mask: LabelledAttention,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    results: AttentionGradients,
) -> None:
    """Write dq, dk and dv of any request where wanted."""
    from magi_flex.kernels.label_triton import kv_kernel, q_kernel

    q, k, v = request.q, request.k, request.v
    if not q.numel() or not out.numel():
        return
    d_out = d_out.to(q.dtype)
    lse = lse.float().contiguous()
    d_lse = None if d_lse is None else d_lse.float().contiguous()
    score = backward_score(request.score, q.device)
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dq, dk, dv = results.dq, results.dk, results.dv
    options = _options(request, mask, score) | {"D_SCORE": score.d_score}
    strides = [x.stride() for x in (q, k, v, out, d_out)]
    rest = (
        _mask(mask),
        _blocks(mask),
        score.args,
        score.d_args,
        q_len,
        kv_len,
        heads,
        heads // kv_heads,
        request.scale,
    )
    inputs = (mask.wanted, q, k, v, out, d_out, lse, d_lse)
    with torch.cuda.device_of(q):
        q_kernel[(-(-q_len // options["M"]), batch * heads)](*inputs, dq, *strides, dq.stride(), *rest, **options)
        kv_kernel[(-(-kv_len // options["N"]), batch * kv_heads)](
            *inputs, dk, dv, *strides, dk.stride(), dv.stride(), *rest, **options
        )


def _mask(mask: LabelledAttention) -> tuple[Any, ...]:
    starts, ends = mask.rest.starts.contiguous(), mask.rest.ends.contiguous()
    batch, heads, slots, _ = starts.shape
    return starts, ends, slots, mask.row_labels.contiguous(), mask.key_labels.contiguous(), batch, heads


def _blocks(mask: LabelledAttention) -> tuple[Any, ...]:
    if mask.blocks is None:
        return None, 1, 1, 1, 1
    return mask.blocks.contiguous(), *mask.block_size, *mask.blocks.shape[:2]


def _options(request: AttentionRequest, mask: LabelledAttention, score: KernelScore) -> dict[str, Any]:
    head_dim, v_dim = request.q.shape[3], request.v.shape[3]
    element_size = request.q.element_size()
    d, e = padded(head_dim, element_size), padded(v_dim, element_size)
    widest = max(d, e) * element_size
    size = next((size for size, most in _WIDEST_ROW.items() if widest <= most), 16)
    return {
        "SCORE": score.score,
        "SLOTS": 1 << (mask.rest.max_intervals - 1).bit_length(),
        "BLOCKS": mask.blocks is not None,
        "HEAD_DIM": head_dim,
        "V_DIM": v_dim,
        "D": d,
        "E": e,
        "M": size,
        "N": size,
        "num_warps": 4,
        "num_stages": 1,
    }
