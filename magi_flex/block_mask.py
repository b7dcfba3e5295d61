"""create_block_mask: a stock BlockMask in O(tokens) memory, from any mask_mod or list of AttnSlices.

Shape legend: B mask batch, H mask head (1 = shared), R intervals of a row, Q query rows, N query blocks, M key blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as stock
from torch.nn.attention.flex_attention import BlockMask

from inductor_lowering.capture import MaskMod
from inductor_lowering.to_intervals import plan_from_block_mask, plan_from_mask_mod
from magi_flex.attn_slices import Ranges, plan_from_attn_slices
from magi_flex.canonical_mask import CanonicalMaskMod
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import note_lists
from magi_flex.plan_blocks import block_area

__all__ = ["CanonicalMaskMod", "block_mask_from_plan", "create_block_mask", "from_attn_slices", "plan"]

_FINEST_BLOCK = 128
_MOST_BLOCKS = 128  # blocks of an axis, unless the user asks for a block size


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] | None = None,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """As torch's create_block_mask, in time and memory that grow with tokens for the masks people use.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, of 0-d integer tensors; traced, never called on numbers.
        B, H: batch and query heads (None: 1).  The result has 1 where the mask does not depend on them.
        Q_LEN, KV_LEN: lengths in tokens.
        device: where the mask lives (default: the current accelerator, else the CPU).
        BLOCK_SIZE: of the block lists; by default 128, coarser beyond 16384 tokens so that lists stay small.
        _compile: ignored; nothing needs to be compiled.
        separate_full_blocks: list full blocks apart, so that kernels skip the mask there.
        compute_dq_write_order, dq_kv_order: for torch's own deterministic backward; must be left as they are.
    Returns:
        A BlockMask whose mask_mod is a CanonicalMaskMod.  Inside a compiled region, where tensor contents are not
        known, this is torch's own create_block_mask.
    Raises:
        ValueError (MaskModError, UnsupportedMask): where mask_mod is no mask over single pairs, or a size is bad.
        NotImplementedError: for compute_dq_write_order.
    """
    if compute_dq_write_order:
        raise NotImplementedError(
            "compute_dq_write_order: is True; only False is possible here, so make this mask with "
            "torch.nn.attention.flex_attention.create_block_mask"
        )
    if torch.compiler.is_compiling():
        block = _FINEST_BLOCK if BLOCK_SIZE is None else BLOCK_SIZE
        options = {} if separate_full_blocks else {"separate_full_blocks": False}  # torch 2.11 does not know it
        return stock.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, block, **options)
    for name, size in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if size is not None and size < (1 if name in "BH" else 0):
            raise ValueError(f"{name}: is {size}; a size of at least {1 if name in 'BH' else 0} is needed")
    mask_plan = plan_from_mask_mod(mask_mod, B or 1, H or 1, Q_LEN, KV_LEN, _device(device))
    return block_mask_from_plan(mask_plan, BLOCK_SIZE, separate_full_blocks)


def from_attn_slices(
    q_ranges: Ranges,
    k_ranges: Ranges,
    types: Sequence[str | int],
    q_len: int,
    kv_len: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] | None = None,
) -> BlockMask:
    """The BlockMask of a list of AttnSlices (MagiAttention's form of a mask), as create_block_mask makes it.

    Args:
        q_ranges, k_ranges: ``[begin, end)`` of queries and of keys of each slice.
        types: "full", "causal", "inv_causal" or "bi_causal" of each slice (or 0 to 3).
        q_len, kv_len: lengths in tokens.
        device, BLOCK_SIZE: as create_block_mask takes them.
    Raises:
        ValueError: for ranges outside of the lengths, unknown types, and lists of different lengths.
    """
    return block_mask_from_plan(
        plan_from_attn_slices(q_ranges, k_ranges, types, q_len, kv_len, _device(device)), BLOCK_SIZE
    )


def block_mask_from_plan(
    mask_plan: MaskPlan, block_size: int | tuple[int, int] | None = None, separate_full_blocks: bool = True
) -> BlockMask:
    """The BlockMask of a plan: canonical mask_mod, and block lists that agree with it."""
    if block_size is None:
        block_size = (_default_block(mask_plan.q_len), _default_block(mask_plan.kv_len))
    q_block, kv_block = (block_size, block_size) if isinstance(block_size, int) else block_size
    if q_block < 1 or kv_block < 1:
        raise ValueError(f"BLOCK_SIZE: is {block_size}; positive numbers of rows and keys are needed")
    area_BHNM = block_area(mask_plan, q_block, kv_block)
    full_BHNM = area_BHNM == q_block * kv_block  # as in stock masks, a block that crosses a length is partial
    kinds = ((area_BHNM > 0) & ~full_BHNM, full_BHNM) if separate_full_blocks else (area_BHNM > 0,)
    unused = (None,) * (4 - 2 * len(kinds))
    lists = (*(x for kind in kinds for x in _ordered(kind)), *unused)
    # (BlockMask.from_kv_blocks would make dense blocks of the lists again, to transpose them.)
    transposed = (*(x for kind in kinds for x in _ordered(kind.transpose(2, 3))), *unused)
    mask_mod, lengths = CanonicalMaskMod.from_plan(mask_plan), (mask_plan.q_len, mask_plan.kv_len)
    mask = BlockMask(lengths, *lists, *transposed, BLOCK_SIZE=(q_block, kv_block), mask_mod=mask_mod)
    note_lists([x for x in lists if x is not None], mask_mod.tensors, (q_block, kv_block), lengths)
    return mask


def plan(
    mask: MaskMod | BlockMask,
    q_len: int | None = None,
    kv_len: int | None = None,
    B: int | None = None,
    H: int | None = None,
    device: torch.device | str | None = None,
) -> MaskPlan:
    """The exact plan of a mask_mod (lengths needed) or a BlockMask (lengths, B and H default to its own).

    Raises ValueError where sizes are missing or do not fit the mask.
    """
    if isinstance(mask, BlockMask):
        if device is not None:
            mask = mask.to(device)
        return plan_from_block_mask(mask, B, H, q_len, kv_len)
    if q_len is None or kv_len is None:
        raise ValueError(f"q_len, kv_len: are {q_len}, {kv_len}; a mask_mod has no lengths of its own, so give both")
    return plan_from_mask_mod(mask, B or 1, H or 1, q_len, kv_len, _device(device))


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _default_block(length: int) -> int:
    block = _FINEST_BLOCK
    while -(-length // block) > _MOST_BLOCKS:
        block *= 2
    return block


def _ordered(dense_BHNM: Tensor) -> tuple[Tensor, Tensor]:
    """Number of listed blocks, and all block indices with the listed ones first in ascending order."""
    order = torch.argsort(dense_BHNM.to(torch.int8), dim=-1, descending=True, stable=True)
    return (
        dense_BHNM.sum(-1, dtype=torch.int32).contiguous(),
        order.to(torch.int32, memory_format=torch.contiguous_format),
    )
