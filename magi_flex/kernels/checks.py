"""Checks of what a call of flex_attention gives, in the caller's words; kernels may rely on them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.mask_plan import MaskPlan


class Layout(NamedTuple):
    """Query, key and value apart from what they hold and where: a kernel prepared for one serves all of its layout."""

    shapes: tuple[torch.Size, torch.Size, torch.Size]
    strides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    devices: tuple[torch.device, torch.device, torch.device]

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> Layout:
        return Layout(
            (q.shape, k.shape, v.shape),
            (q.stride(), k.stride(), v.stride()),
            (q.dtype, k.dtype, v.dtype),
            (q.device, k.device, v.device),
        )


def check_inputs(layout: Layout) -> None:
    """Raises ValueError unless q ``[B, H, Q, D]``, k ``[B or 1, G, K, D]`` and v ``[B or 1, G, K, E]`` fit together."""
    q_device = layout.devices[0]
    for name, shape, dtype, device in zip(
        ("query", "key", "value"), layout.shapes, layout.dtypes, layout.devices, strict=True
    ):
        if len(shape) != 4:
            raise ValueError(f"{name}: is {list(shape)}; [batch, heads, length, head_dim] is needed")
        if not dtype.is_floating_point:
            raise ValueError(f"{name}: is {dtype}; a floating point dtype is needed, so convert it with .to()")
        if device != q_device:
            raise ValueError(f"{name}: is on {device}, but query is on {q_device}; move them to one device")
    q, k, v = layout.shapes
    batch, heads, _, head_dim = q
    kv_heads, kv_len = k[1:3]
    if k[0] not in (1, batch) or k[3] != head_dim:
        raise ValueError(f"key: is {list(k)}; [{batch} or 1, heads, length, {head_dim}] is needed for query {list(q)}")
    if v[:3] != k[:3]:
        raise ValueError(f"value: is {list(v)}; [{k[0]}, {kv_heads}, {kv_len}, any] is needed for key {list(k)}")
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"query: has {heads} heads, which is no multiple of the {kv_heads} heads of key and value; every key head "
            f"must serve the same number of query heads"
        )


def check_mask_shape(sizes: Sequence[int], batch: int, heads: int) -> None:
    """Raises ValueError unless a mask made for these (batch, heads) broadcasts to the query's."""
    for name, made_for, needed in (("B", sizes[0], batch), ("H", sizes[1], heads)):
        if made_for not in (1, needed):
            raise ValueError(
                f"block_mask: was made for {name}={made_for}, but query has {needed}; make it with {name}={needed}, or "
                f"None if it is the same for all"
            )


def check_plan(plan: MaskPlan, layout: Layout) -> None:
    """Raises ValueError unless query, key and value fit together (:func:`check_inputs`, key as many batch entries as
    query), and the plan is for these lengths, batch and heads, on the same device."""
    bits, starts = plan.bit_tiles, plan.starts
    _check_plan(layout, starts.shape, plan.kv_len, starts.device, None if bits is None else bits.row_ptr.shape)


@functools.lru_cache(maxsize=1024)
def _check_plan(
    layout: Layout, starts: torch.Size, plan_kv_len: int, plan_device: torch.device, row_ptr: torch.Size | None
) -> None:
    """:func:`check_plan`, which remembers what fits, for launch paths."""
    check_inputs(layout)
    (batch, heads, q_len, _), (kv_batch, _, kv_len, _), _ = layout.shapes
    if kv_batch != batch:
        raise ValueError(f"key: has batch size {kv_batch}; kernels need that of query, {batch}")
    mask_batch, mask_heads, _, mask_q_len = starts
    if (mask_q_len, plan_kv_len) != (q_len, kv_len):
        raise ValueError(
            f"block_mask: is for {mask_q_len} queries and {plan_kv_len} keys, but query and key have {q_len} and "
            f"{kv_len}; make it again for these lengths"
        )
    check_mask_shape((mask_batch, mask_heads), batch, heads)
    if row_ptr is not None:
        check_mask_shape(row_ptr[:2], batch, heads)
    device = layout.devices[0]
    if plan_device != device:
        raise ValueError(f"block_mask: is on {plan_device}, but query is on {device}; move it with block_mask.to()")
