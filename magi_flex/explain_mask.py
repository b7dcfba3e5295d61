"""What a mask became, which backend would serve it, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from inductor_lowering.capture import MaskMod, trace_mask_mod
from inductor_lowering.to_intervals import PlanReport, block_mask_plan_with_report, plan_with_report
from magi_flex import tile_map
from magi_flex.kernels.request import RequestFacts
from magi_flex.kernels.route import call_facts, explain_route, stock_is_faster
from magi_flex.kernels.tile_plans import objection
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import MaskSpec, split_captures
from magi_flex.tiles import TileCounts, count_tiles

STOCK_BLOCK = 128  # BLOCK_SIZE of stock create_block_mask


@dataclass(frozen=True)
class Explanation:
    """``str()`` is the text; :meth:`plot` draws the tile map.

    Attributes:
        name: what to call the mask.
        plan: the exact mask.
        report: how the mask compiler found it.
        q_tile, kv_tile, counts: tiles of a fixed grid of that size by class, over the plan's batch and heads.
        facts: the call that routing was asked about.
        routes: backend -> reasons why it does not serve such a call (none: it does), fastest first.
        stock_nbytes: bytes of the stock BlockMask of this mask.
        depends_on: what in the data the number of intervals depends on, so that planning has to look; or None.
        by_labels: whether it is one equality of labels that does, with which planning need not look.
    """

    name: str
    plan: MaskPlan
    report: PlanReport
    q_tile: int
    kv_tile: int
    counts: TileCounts
    facts: RequestFacts
    routes: tuple[tuple[str, list[str]], ...]
    stock_nbytes: int
    depends_on: str | None
    by_labels: bool

    @property
    def backend(self) -> str | None:
        """The backend that ``auto`` takes in a compiled call, or None where that is stock lowering."""
        if stock_is_faster(self.facts) is not None:
            return None
        return next((name for name, reasons in self.routes if not reasons), None)

    def plot(self, target: Any = None, batch: int = 0, head: int = 0) -> Any:
        """Draw the tile map of one batch entry and head.

        Args:
            target: a file to write (png, pdf, svg), matplotlib axes to draw into, or None for a new figure.
            batch, head: which one, where the mask depends on them.
        Returns:
            The file's path, the axes, or the figure.
        Raises:
            ValueError: there is no such batch entry or head.
            ModuleNotFoundError: matplotlib is not installed.
        """
        for what, index, size in zip(("batch", "head"), (batch, head), self.plan.starts.shape[:2], strict=True):
            if not 0 <= index < size:
                raise ValueError(f"{what}: {index} given, but the mask has {size}; allowed are 0 to {size - 1}")
        which = [f"batch {batch}"] * (self.plan.starts.shape[0] > 1) + [f"head {head}"] * (
            self.plan.starts.shape[1] > 1
        )
        counts = self.counts
        return tile_map.draw(
            self.plan,
            target,
            title=", ".join([f"{self.name}   {self.plan.q_len:,} × {self.plan.kv_len:,}", *which]),
            counts={"full": counts.full, "partial": counts.partial, "empty": counts.empty},
            q_tile=self.q_tile,
            kv_tile=self.kv_tile,
            batch=batch,
            head=head,
        )

    def __str__(self) -> str:
        return "\n".join([*self._mask_lines(), *self._device_lines(), *self._route_lines()])

    def _mask_lines(self) -> list[str]:
        plan, counts = self.plan, self.counts
        batch, heads, slots, _ = plan.starts.shape
        pairs = batch * heads * plan.q_len * plan.kv_len
        apart = [f"{n} {what}" for n, what in ((batch, "batch entries"), (heads, "heads")) if n > 1]
        of = " x ".join(apart) or "one for all batch entries and heads"
        lines = [
            f"{self.name}: {plan.q_len:,} queries x {plan.kv_len:,} keys, {of}",
            f"  intervals  {slots} slot{'s' * (slots > 1)} a row{self._bit_tile_text()}",
            f"  found by   {_path_text(self.report)}",
        ]
        lines += [f"             {reason}" for reason in self.report.reasons]
        area = plan.area()
        total = counts.full + counts.partial + counts.empty
        lines += [
            f"  area       {area:,} pairs, {_percent(area, pairs)} of all",
            f"  tiles      {self.q_tile} x {self.kv_tile}: {counts.full:,} full, {counts.partial:,} partial, "
            f"{counts.empty:,} empty; {_percent(counts.empty, total)} are skipped",
            f"  memory     plan {_bytes(plan.nbytes)}; lists of a stock BlockMask {_bytes(self.stock_nbytes)}",
        ]
        return lines

    def _device_lines(self) -> list[str]:
        """Whether planning waits for a GPU, which keeps it out of CUDA graphs."""
        if self.facts.device.type != "cuda":
            return []
        if self.depends_on is None:
            text = (
                "the number of intervals follows from the mask_mod: nothing is read back, CUDA graphs can hold the plan"
            )
        elif self.by_labels:
            text = (
                "a mask by labels: CUDA graphs can hold the plan, which is fast where each label stands in one run of "
                "keys; outside of them one flag is read back"
            )
        else:
            text = f"waits for the GPU once a mask: the number of intervals depends on {self.depends_on}"
        builder = objection(self.facts.device, self.plan.bit_tiles is not None)
        return [
            f"  planning   {text}",
            f"             tiles by {'our GPU kernels' if builder is None else f'torch: {builder}'}",
        ]

    def _bit_tile_text(self) -> str:
        bits = self.plan.bit_tiles
        if bits is None:
            return ""
        return f", and {len(bits.cols):,} bit tiles of {bits.q_tile} x {bits.kv_tile} where a row needs more"

    def _route_lines(self) -> list[str]:
        facts = self.facts
        call = f"{str(facts.dtype).removeprefix('torch.')}, heads {facts.q_heads}:{facts.kv_heads}, D={facts.head_dim}"
        lines = [
            f"  backend    {self.backend or 'stock lowering'}, for {call}, {_purpose(facts)}, on {facts.device.type}"
        ]
        width = max(len(name) for name, _ in self.routes)
        for name, reasons in self.routes:
            why = "taken: the fastest that serves this" if name == self.backend else "serves this too, but is slower"
            lines.append(f"             {name:{width}}  {'not: ' + '; '.join(reasons) if reasons else why}")
        return lines


def explain(
    mask: MaskMod | BlockMask | MaskPlan,
    q_len: int | None = None,
    kv_len: int | None = None,
    B: int | None = None,
    H: int | None = None,
    *,
    name: str | None = None,
    heads: tuple[int, int] = (8, 8),
    head_dim: int = 64,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    training: bool = True,
    device: torch.device | str | None = None,
    q_tile: int = 128,
    kv_tile: int = 128,
) -> Explanation:
    """Look at a mask: its intervals, tiles and bytes, how they were found, and the backend that would serve a call.

    Args:
        mask: a mask_mod (lengths needed), a BlockMask of any origin, or a plan.
        q_len, kv_len, B, H: as for :func:`magi_flex.plan`.
        name: what to call the mask (default: the mask_mod's own name).
        heads: (query, key/value) heads of the call that routing is asked about, with head_dim, v_head_dim, dtype;
            training: a backward is wanted.
        device: where the call would run (default: the mask's device; for a mask_mod a GPU where there is one).
        q_tile, kv_tile: tile sizes for counts and picture.
    Raises:
        TypeError: ``mask`` is none.
        ValueError: as :func:`magi_flex.plan` does; or tile sizes below 1, or heads that do not divide.
    """
    if heads[0] < 1 or heads[1] < 1 or heads[0] % heads[1]:
        raise ValueError(f"heads: {heads} given; query heads must be a multiple of key/value heads")
    device = _device(mask, device)
    plan, report, stock_nbytes = _solve(mask, q_len, kv_len, B, H, device)
    depends_on, by_labels = _depends_on(mask, plan, B or 1, H or 1)
    facts = call_facts(
        device,
        (dtype, dtype, dtype),
        (head_dim, head_dim if v_head_dim is None else v_head_dim),
        heads,
        (),
        needs_backward=training,
        has_bit_tiles=plan.bit_tiles is not None,
    )
    return Explanation(
        name=name or _name(mask),
        plan=plan,
        report=report,
        q_tile=q_tile,
        kv_tile=kv_tile,
        counts=count_tiles(plan, q_tile, kv_tile),
        facts=facts,
        routes=tuple(explain_route(facts)),
        stock_nbytes=stock_nbytes,
        depends_on=depends_on,
        by_labels=by_labels,
    )


def _depends_on(
    mask: MaskMod | BlockMask | MaskPlan, plan: MaskPlan, batch: int, heads: int
) -> tuple[str | None, bool]:
    """What in the data the number of intervals depends on, or None where it follows from the mask_mod; and whether
    that is an equality of labels alone."""
    if isinstance(mask, MaskPlan):
        return None if plan.bit_tiles is None else "bit tiles", False
    mask_mod = mask.mask_mod if isinstance(mask, BlockMask) else mask
    if mask_mod is noop_mask:
        return "block lists alone", False
    program, captures = trace_mask_mod(mask_mod, plan.device)
    order, tensors, ints = split_captures(captures)
    spec, sizes = MaskSpec(program.to_json(), order), (batch, heads, plan.q_len, plan.kv_len)
    shape = spec.static_shape(tensors, ints, *sizes)
    if not isinstance(shape, str):
        return None, False
    return shape, not isinstance(spec.labelled_shapes(tensors, ints, *sizes), str)


def stock_block_mask_nbytes(batch: int, heads: int, q_len: int, kv_len: int, block: int = STOCK_BLOCK) -> int:
    """Bytes of the BlockMask that stock create_block_mask makes: int32 counts and dense index tables, for partial and
    for full blocks, by rows and by columns."""
    rows, columns = -(-q_len // block), -(-kv_len // block)
    return 4 * batch * heads * 2 * (rows * columns + rows + rows * columns + columns)


def _solve(
    mask: MaskMod | BlockMask | MaskPlan,
    q_len: int | None,
    kv_len: int | None,
    B: int | None,
    H: int | None,
    device: torch.device,
) -> tuple[MaskPlan, PlanReport, int]:
    """The plan, how it was found, and the bytes of a stock BlockMask of the same mask."""
    if isinstance(mask, MaskPlan):
        plan, report = mask, PlanReport(rules=["given as a plan"])
    elif isinstance(mask, BlockMask):
        plan, report = block_mask_plan_with_report(mask, B, H, q_len, kv_len)
    else:
        if not callable(mask):
            raise TypeError(f"mask: is {type(mask).__name__}; a mask_mod, a BlockMask or a MaskPlan is needed")
        if q_len is None or kv_len is None:
            raise ValueError(
                f"q_len, kv_len: are {q_len}, {kv_len}; a mask_mod has no lengths of its own, so give both"
            )
        program, captures = trace_mask_mod(mask, device)
        plan, report = plan_with_report(program, captures, B or 1, H or 1, q_len, kv_len, device)
    batch, heads = plan.starts.shape[:2]
    return plan, report, stock_block_mask_nbytes(batch, heads, plan.q_len, plan.kv_len)


def _device(mask: MaskMod | BlockMask | MaskPlan, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if isinstance(mask, MaskPlan):
        return mask.device
    if isinstance(mask, BlockMask):
        return mask.kv_num_blocks.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _name(mask: MaskMod | BlockMask | MaskPlan) -> str:
    if isinstance(mask, (BlockMask, MaskPlan)):
        return type(mask).__name__
    name = getattr(mask, "__name__", type(mask).__name__)
    return "mask" if name == "<lambda>" else name


def _path_text(report: PlanReport) -> str:
    if report.path == "stream":
        return "evaluation pair by pair, in time that grows with tokens²:"
    return f"symbolic rules, in time that grows with tokens: {', '.join(report.rules)}"


def _purpose(facts: RequestFacts) -> str:
    return "training" if facts.needs_backward else "inference"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "nothing"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
