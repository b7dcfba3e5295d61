"""Checks of what a call of flex_attention gives, in the caller's words; kernels may rely on them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from magi_flex.mask_plan import MaskPlan


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless q ``[B, H, Q, D]``, k ``[B or 1, G, K, D]`` and v ``[B or 1, G, K, E]`` fit together."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: is {list(x.shape)}; [batch, heads, length, head_dim] is needed")
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name}: is {x.dtype}; a floating point dtype is needed, so convert it with .to()")
        if x.device != q.device:
            raise ValueError(f"{name}: is on {x.device}, but query is on {q.device}; move them to one device")
    batch, heads, _, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    if k.shape[0] not in (1, batch) or k.shape[3] != head_dim:
        raise ValueError(
            f"key: is {list(k.shape)}; [{batch} or 1, heads, length, {head_dim}] is needed for query {list(q.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"value: is {list(v.shape)}; [{k.shape[0]}, {kv_heads}, {kv_len}, any] is needed for key {list(k.shape)}"
        )
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


def check_plan(plan: MaskPlan, q: Tensor, k: Tensor) -> None:
    """Raises ValueError unless the plan is for these lengths, batch and heads, on the same device."""
    if (plan.q_len, plan.kv_len) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"block_mask: is for {plan.q_len} queries and {plan.kv_len} keys, but query and key have {q.shape[2]} and "
            f"{k.shape[2]}; make it again for these lengths"
        )
    check_mask_shape(plan.starts.shape[:2], q.shape[0], q.shape[1])
    if plan.bit_tiles is not None:
        check_mask_shape(plan.bit_tiles.row_ptr.shape[:2], q.shape[0], q.shape[1])
    if plan.device != q.device:
        raise ValueError(f"block_mask: is on {plan.device}, but query is on {q.device}; move it with block_mask.to()")
