"""From a mask to its plan: any mask_mod, program or BlockMask becomes an exact MaskPlan.

Shape legend: B batch, H query heads, Q query rows, K keys.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from inductor_lowering.block_lists import BlockRows, KeyRegion, PlanRows, lists_agree
from inductor_lowering.canonical import find_canonical
from inductor_lowering.capture import MaskMod, trace_mask_mod
from inductor_lowering.mask_program import MaskProgram, UnsupportedMask
from inductor_lowering.packed_labels import quick_intervals
from inductor_lowering.separate import separate
from inductor_lowering.solve import Solver
from inductor_lowering.stream import RowCollector
from inductor_lowering.tile_bounds import TileBounds, Verdict
from inductor_lowering.words import WordEvaluator, pack_keys
from magi_flex.bit_tiles import unpack_bits
from magi_flex.fx_program import FxProgram
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan, MaskPlanBuilder
from magi_flex.plan_blocks import dense_tile

__all__ = [
    "BlockRows",
    "PlanReport",
    "UnsupportedMask",
    "block_mask_plan_with_report",
    "plan_from_block_mask",
    "plan_from_lists",
    "plan_from_mask_mod",
    "plan_from_program",
    "plan_with_report",
    "restrict_by_program",
    "restrict_plan",
]

ROWS_AT_ONCE = 1 << 14  # a multiple of the builder's row tile
logger = logging.getLogger("magi_flex")


@dataclass
class PlanReport:
    """How a mask was solved.

    Attributes:
        path: "symbolic" (time grows with tokens) or "stream" (the mask was evaluated pair by pair somewhere).
        rules: the rules that applied, each once, in order.
        reasons: why rows had to be streamed; empty on the symbolic path.
    """

    path: str = "symbolic"
    rules: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def used(self, rule: str) -> None:
        if rule not in self.rules:
            self.rules.append(rule)

    def streamed(self, reason: str) -> None:
        self.path = "stream"
        if reason not in self.reasons:
            self.reasons.append(reason)


def plan_from_program(
    program: FxProgram,
    captures: Sequence[Any],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str = "cpu",
) -> MaskPlan:
    """The exact plan of a mask's program ``(b, h, q, k, *captures) -> bool``.

    The plan's B (H) is 1 where the mask does not depend on b (h), else ``batch`` (``heads``).
    Raises UnsupportedMask where the program is no mask over single pairs.
    """
    return plan_with_report(program, captures, batch, heads, q_len, kv_len, device)[0]


def plan_from_mask_mod(
    mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device | str = "cpu"
) -> MaskPlan:
    """The exact plan of ``mask_mod(b, h, q_idx, kv_idx)``, which is traced, never called on numbers."""
    program, captures = trace_mask_mod(mask_mod, device)
    return plan_from_program(program, captures, batch, heads, q_len, kv_len, device)


def plan_from_block_mask(
    block_mask: BlockMask,
    batch: int | None = None,
    heads: int | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
) -> MaskPlan:
    """The exact plan of a BlockMask of any origin, with stock semantics: its lists AND its mask_mod.

    ``batch`` and ``heads`` are what the query has; they default to what the lists have.  A mask_mod is asked about
    every batch entry and head even where the lists are shared, as stock kernels do.  The lengths default to the
    mask's own, but not beyond the rows that the lists cover.
    Raises ValueError for sizes that do not fit, UnsupportedMask as plan_from_program does.
    """
    return block_mask_plan_with_report(block_mask, batch, heads, q_len, kv_len)[0]


def block_mask_plan_with_report(
    block_mask: BlockMask,
    batch: int | None = None,
    heads: int | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
) -> tuple[MaskPlan, PlanReport]:
    """As plan_from_block_mask, and how the plan was found."""
    lists = block_mask.kv_num_blocks
    list_batch, list_heads = (1, 1, *lists.shape[:-1])[-2:]
    batch, heads = list_batch if batch is None else batch, list_heads if heads is None else heads
    for name, got, wanted in (("batch", list_batch, batch), ("heads", list_heads, heads)):
        if got not in (1, wanted):
            raise ValueError(
                f"block_mask: was made for {name} {got}, but {name} is {wanted}; a mask for 1 or {wanted} is needed"
            )
    q_block, kv_block = block_mask.BLOCK_SIZE
    if q_len is None:
        q_len = min(block_mask.seq_lengths[0], lists.shape[-1] * q_block)
    kv_len = block_mask.seq_lengths[1] if kv_len is None else kv_len
    partial = BlockRows.from_lists(lists, block_mask.kv_indices, (q_block, kv_block), q_len, kv_len)
    full = None
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = BlockRows.from_lists(
            block_mask.full_kv_num_blocks, block_mask.full_kv_indices, (q_block, kv_block), q_len, kv_len
        )
    program, captures = trace_mask_mod(block_mask.mask_mod, lists.device)
    return plan_with_report(program, captures, batch, heads, q_len, kv_len, lists.device, partial, full)


def plan_from_lists(
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    block_size: tuple[int, int],
    q_len: int,
    kv_len: int,
    mask_plan: MaskPlan | None = None,
) -> MaskPlan:
    """The plan of block lists, with ``mask_plan`` deciding inside the partial blocks (None: every pair attends)."""
    partial = BlockRows.from_lists(kv_num_blocks, kv_indices, block_size, q_len, kv_len)
    full = None
    if (full_kv_num_blocks is None) != (full_kv_indices is None):
        raise ValueError("full_kv_num_blocks, full_kv_indices: one was given without the other; give both or neither")
    if full_kv_num_blocks is not None and full_kv_indices is not None:
        full = BlockRows.from_lists(full_kv_num_blocks, full_kv_indices, block_size, q_len, kv_len)
    if mask_plan is not None and (mask_plan.q_len, mask_plan.kv_len) != (q_len, kv_len):
        raise ValueError(
            f"mask_plan: is for {mask_plan.q_len} x {mask_plan.kv_len} rows x keys, but the lists are for "
            f"{q_len} x {kv_len}; give both the same lengths"
        )
    if mask_plan is None:
        mask_plan = MaskPlan(RowIntervals.full(q_len, kv_len, kv_indices.device))
    return restrict_plan(mask_plan, partial, full)


def plan_with_report(
    program: FxProgram,
    captures: Sequence[Any],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str = "cpu",
    domain: BlockRows | None = None,
    always: BlockRows | None = None,
) -> tuple[MaskPlan, PlanReport]:
    """The plan of (domain AND program) OR always, and how it was found.

    ``domain`` (default: everything) and ``always`` (default: nothing) are the blocks that a BlockMask lists as partial
    and as full.
    """
    canonical = find_canonical(program, captures)
    if canonical is not None:
        plan = canonical.plan(captures, kv_len)
        _check_sizes(plan, batch, heads, q_len)
        if not _is_within(plan, q_len, kv_len) or (domain is not None and not lists_agree(plan, domain, always)):
            plan = restrict_plan(plan, domain or BlockRows.full(q_len, kv_len, device), always)
        return plan, PlanReport(rules=["canonical"])
    if domain is None and torch.device(device).type != "cpu":  # the rules below wait for a GPU many times
        quick = quick_intervals(program, captures, batch, heads, q_len, kv_len, device)
        if quick is not None:
            return MaskPlan(quick[0]), PlanReport(rules=[quick[1]])
    mask = MaskProgram(program, captures, batch, heads, q_len, kv_len, device)
    report = PlanReport()
    plan = _solve(mask, domain or BlockRows.full(q_len, kv_len, device), always, None, report)
    logger.debug("mask plan: %s; rules: %s; reasons: %s", report.path, report.rules, report.reasons)
    return plan, report


def restrict_by_program(
    plan: MaskPlan, program: FxProgram, captures: Sequence[Any], batch: int, heads: int
) -> MaskPlan:
    """The plan AND a program ``(b, h, q, k, *captures) -> bool``; ``batch`` and ``heads`` are the query's.

    Raises IndexError where the program reads a table out of bounds, UnsupportedMask as plan_from_program does.
    """
    mask = MaskProgram(program, captures, batch, heads, plan.q_len, plan.kv_len, plan.device)
    bits = None if plan.bit_tiles is None else plan
    return _solve(mask, PlanRows(plan), None, bits, PlanReport())


def _solve(
    mask: MaskProgram, domain: KeyRegion, always: KeyRegion | None, bits: MaskPlan | None, report: PlanReport
) -> MaskPlan:
    """(domain AND program) OR always; where ``bits`` is given, its pairs only, whatever the domain."""
    q_len, kv_len = mask.sizes["q"], mask.sizes["k"]
    solver, formula, evaluator = Solver(mask), separate(mask), WordEvaluator(mask)
    depends = mask.steps[mask.result].depends
    regions = [domain] if always is None else [domain, always]
    plan_batch = max([mask.sizes["b"] if "b" in depends else 1, *(x.batch for x in regions)])
    plan_heads = max([mask.sizes["h"] if "h" in depends else 1, *(x.heads for x in regions)])

    def words(row_range: tuple[int, int], key_range: tuple[int, int]) -> Tensor:
        found = evaluator.evaluate(formula, row_range, key_range)
        return found if bits is None else found & pack_keys(dense_tile(bits, row_range, key_range))

    tile_bounds = TileBounds(mask, MaskPlanBuilder.q_tile, MaskPlanBuilder.kv_tile)

    def classify(row_range: tuple[int, int]) -> Verdict:
        verdict = tile_bounds.classify(formula, row_range)
        return verdict if bits is None else Verdict(verdict.possible, torch.zeros_like(verdict.certain))

    rows = RowCollector(plan_batch, plan_heads, q_len, kv_len, mask.device)
    for begin in range(0, q_len, ROWS_AT_ONCE):
        end = min(q_len, begin + ROWS_AT_ONCE)
        inside, reasons = solver.solve(formula, domain.rows(begin, end), begin)
        outside = None if always is None else always.rows(begin, end)
        for reason in reasons:
            report.streamed(reason)
        if reasons or bits is not None:
            rows.stream(words, inside, outside, begin, mask.element_cost, classify)
        else:
            rows.add(inside if outside is None else inside.union(outside))
    for rule in solver.rules:
        report.used(rule)
    return rows.finish()


def restrict_plan(plan: MaskPlan, domain: BlockRows, always: BlockRows | None = None) -> MaskPlan:
    """The plan of (domain AND plan) OR always, in the lengths of ``domain``, which has no more rows than ``plan``."""
    shapes = [(x.batch, x.heads) for x in (domain, always) if x is not None] + [plan.starts.shape[:2]]
    q_len, kv_len = domain.q_len, domain.blocks.kv_len
    collector = RowCollector(max(b for b, _ in shapes), max(h for _, h in shapes), q_len, kv_len, plan.device)
    for begin in range(0, q_len, ROWS_AT_ONCE):
        end = min(q_len, begin + ROWS_AT_ONCE)
        inside, outside = domain.rows(begin, end), None if always is None else always.rows(begin, end)
        if plan.bit_tiles is None:
            rows = plan.intervals.take_rows(slice(begin, end))
            inside = inside.intersect(RowIntervals.build(rows.starts, rows.ends, kv_len))
            collector.add(inside if outside is None else inside.union(outside))
        else:
            collector.stream(lambda rows, keys: pack_keys(dense_tile(plan, rows, keys)), inside, outside, begin)
    return collector.finish()


def _check_sizes(plan: MaskPlan, batch: int, heads: int, q_len: int) -> None:
    for name, has, wanted in zip(("batch", "heads"), plan.starts.shape[:2], (batch, heads), strict=False):
        if has not in (1, wanted):
            raise ValueError(f"mask: was made for {name} {has}, but {name} is {wanted}; 1 or {wanted} is needed")
    if plan.q_len < q_len:
        raise ValueError(f"mask: has {plan.q_len} rows, but q_len is {q_len}; make it for at least {q_len} rows")


def _is_within(plan: MaskPlan, q_len: int, kv_len: int) -> bool:
    """Whether the plan is already one for these lengths."""
    if plan.q_len != q_len or (plan.starts.numel() and int(torch.maximum(plan.starts, plan.ends).max()) > kv_len):
        return False
    bits = plan.bit_tiles
    if bits is None or not bits.cols.numel():
        return True
    last = int(bits.cols.max())
    if last >= -(-kv_len // bits.kv_tile):
        return False
    slots = bits.slot[(bits.cols == kv_len // bits.kv_tile) & (bits.slot >= 0)].long()
    return not bool(unpack_bits(bits.bits[slots])[..., kv_len % bits.kv_tile :].any())
