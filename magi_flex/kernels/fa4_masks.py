"""How a mask reaches flash-attn-4: by its own flags or packed sequences where it is just that, else by interval bits
on the partial blocks of lists.

Shape legend: B mask batch, H mask heads (1 = shared), R intervals of a row, Q query rows, K keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels.fa4_tiles import (
    BlockLists,
    BlockSize,
    backward_block,
    block_lists,
    forward_block,
    padded_bounds,
)
from magi_flex.kernels.plan_cache import derived
from magi_flex.mask_plan import MaskPlan
from magi_flex.mask_structure import Band, Documents, Structure, find_structure

# Documents shorter than this on average share tiles better than they fill their own.
LEAST_MEAN_DOCUMENT = 128
# Intervals of queries that a key may have for the backward to mask by bits of queries.
MOST_COLUMN_INTERVALS = 64


@dataclass(frozen=True)
class KernelMask:
    """A mask as one of the kernels takes it.

    Attributes:
        flags: causal and window arguments.
        documents: packed sequences; queries and keys are then given as one sequence.
        bounds: starts and ends ``[B, H, R, rows + padding]`` that the kernel's mask_mod reads; by key if ``by_key``.
        lists: blocks to visit, of ``block`` size.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    documents: Documents | None = None
    bounds: tuple[Tensor, Tensor] | None = None
    by_key: bool = False
    lists: BlockLists | None = None
    block: BlockSize | None = None

    @property
    def slots(self) -> int:
        """R, or 0 where no mask_mod is needed."""
        return 0 if self.bounds is None else self.bounds[0].shape[2]


def structure_of(plan: MaskPlan) -> Structure | None:
    """The plan's structure, looked for once; None as well while a CUDA graph is captured, which allows no transfer."""
    if plan.structure is not None:
        return plan.structure
    if is_capturing(plan):
        return None
    return derived(plan, ("structure",), lambda: find_structure(plan.intervals))


def is_capturing(plan: MaskPlan) -> bool:
    return plan.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def flagged_mask(plan: MaskPlan, batch: int, can_pack: bool) -> KernelMask | None:
    """The mask by flags or packed sequences, where it is that.

    Args:
        batch: of the queries.
        can_pack: the batch can be laid out as one sequence, and the score mod does not mind.
    """
    structure = structure_of(plan)
    if isinstance(structure, Band):
        if structure.is_causal:
            return KernelMask({"causal": True})
        return KernelMask({"window_size_left": structure.left, "window_size_right": structure.right})
    if isinstance(structure, Documents) and can_pack:
        if structure.count * LEAST_MEAN_DOCUMENT <= plan.starts.shape[0] * plan.q_len:
            return KernelMask({"causal": structure.causal}, _for_batch(plan, structure, batch))
    return None


def _for_batch(plan: MaskPlan, documents: Documents, batch: int) -> Documents:
    if plan.starts.shape[0] == batch:
        return documents
    return derived(plan, ("documents", batch), lambda: documents.repeated(batch, plan.q_len))


def forward_mask(plan: MaskPlan, arch: int, dims: tuple[int, int], group: int) -> KernelMask:
    """Interval bits and lists for the forward kernel.

    Args:
        dims: head dims of keys and of values; group: query heads of a key head.
    """
    block = forward_block(arch, *dims, plan.q_len * group)

    def build() -> KernelMask:
        return KernelMask(bounds=padded_bounds(plan.intervals), lists=_lists(plan, block, False), block=block)

    return derived(plan, ("fa4 forward", block), build)


def backward_mask(plan: MaskPlan, arch: int, dims: tuple[int, int]) -> KernelMask:
    """Interval bits and lists for the backward kernel, which keeps keys and walks over queries.

    Its threads hold few keys and many queries (where ``wants_key_bounds``), so they are given the queries of a key.
    """
    block = backward_block(arch, *dims)

    def build() -> KernelMask:
        columns: RowIntervals | None = None
        if wants_key_bounds(arch, dims[0]) and not is_capturing(plan):
            columns = plan.intervals.transpose(max_intervals=MOST_COLUMN_INTERVALS)
        bounds = padded_bounds(plan.intervals if columns is None else columns)
        lists = _lists(plan, block, True)
        return KernelMask(bounds=bounds, by_key=columns is not None, lists=lists, block=block)

    return derived(plan, ("fa4 backward", block), build)


def wants_key_bounds(arch: int, head_dim: int) -> bool:
    """Whether a thread of the backward kernel has more queries than keys in a tile."""
    return arch // 10 != 9 or head_dim <= 128


def _lists(plan: MaskPlan, block: BlockSize, transposed: bool) -> BlockLists:
    columns = -(-plan.q_len // block.q) if transposed else -(-plan.kv_len // block.kv)
    return block_lists(plan, block, transposed, width=columns if is_capturing(plan) else None)
