"""What the ops carry in their string arguments: which mask and which score mod, apart from the tensors they read.

An op gets a mod's captures as a list of tensors and a list of (symbolic) ints; ``order`` says how the two interleave.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from magi_flex import plan_memo
from magi_flex.bit_tiles import BitTiles
from magi_flex.fx_program import FxProgram
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.checks import check_mask_shape
from magi_flex.kernels.contents import Verdict
from magi_flex.kernels.cuda_driver import stream_of
from magi_flex.kernels.request import IDENTITY, ScoreProgram
from magi_flex.kernels.tile_plans import objection
from magi_flex.mask_plan import MaskPlan
from magi_flex.mask_structure import Band
from magi_flex.score_steps import Sizes, build_steps

if TYPE_CHECKING:
    from inductor_lowering.packed_labels import LabelledIntervals

logger = logging.getLogger("magi_flex")
Inputs = tuple[Sequence[Any], Sequence[Any]]  # tensors and ints


def split_captures(captures: Sequence[Any]) -> tuple[str, list[Any], list[Any]]:
    """(order, tensors, ints): "t" and "i" in the captures' order.  Captures may be a graph's nodes."""
    tensors, ints, order = [], [], ""
    for x in captures:
        is_number = isinstance(x.meta["val"] if isinstance(x, Node) else x, (int, torch.SymInt))
        order += "i" if is_number else "t"
        (ints if is_number else tensors).append(x)
    return order, tensors, ints


def join_captures(order: str, tensors: Sequence[Tensor], ints: Sequence[int]) -> tuple[Any, ...]:
    """The inverse of :func:`split_captures`."""
    remaining = {"t": iter(tensors), "i": iter(ints)}
    return tuple(next(remaining[kind]) for kind in order)


def split_last(order: str, tensors: Sequence[Any], ints: Sequence[Any]) -> tuple[Inputs, Inputs]:
    """The tensors and ints before those that ``order`` tells of, and these, which are the last ones."""
    first_tensor, first_int = len(tensors) - order.count("t"), len(ints) - order.count("i")
    return (tensors[:first_tensor], ints[:first_int]), (tensors[first_tensor:], ints[first_int:])


@dataclass(frozen=True)
class BuiltMask:
    """A mask's plan, and whether it holds the score mod's selection (MaskSpec.selection)."""

    plan: MaskPlan
    selected: bool = True


@dataclass(frozen=True)
class LabelledMask:
    """A mask by labels (document ids), of which the host need not know whether a label returns.

    Attributes:
        intervals: the mask, where ``holds`` (a bool tensor): each label stands in one run, lists change nothing.
        labels, blocks: what it is in any case: pairs of ``labels`` in blocks of state 1, all pairs of those of state
            2; int8 ``[B, H, query blocks, key blocks]``, None without lists.
    """

    intervals: RowIntervals
    holds: Tensor
    labels: LabelledIntervals
    blocks: Tensor | None


@dataclass(frozen=True)
class MaskSpec:
    """A mask as stock FlexAttention means it: block lists AND mask_mod on partial blocks, lists alone on full ones.

    Tensors: the lists (kv_num_blocks, kv_indices and, with ``full_lists``, full_kv_num_blocks, full_kv_indices), then
    the mask_mod's captures, then the selection's.  Ints: the block sizes (q_block, kv_block) of the lists, then
    captures in the same order.

    Attributes:
        program: FxProgram JSON of the mask_mod; None where it is true everywhere.
        order: how captured tensors and ints interleave.
        lists: whether block lists restrict the mask; without them every block is partial.
        full_lists: whether there are lists of full blocks as well.
        sharded: the sequence is shared by ranks; the only tensor is the handle of the mask's plans
            (magi_flex/distributed/context_mask.py).
        selection: FxProgram JSON of a condition (b, h, q, k, *captures) outside of which the score mod gives minus
            infinity (inductor_lowering/score_select.py), or None.
        selection_order: how its captured tensors and ints interleave.
    """

    program: str | None
    order: str
    lists: bool = False
    full_lists: bool = False
    sharded: bool = False
    selection: str | None = None
    selection_order: str = ""

    @property
    def is_full(self) -> bool:
        return self.program is None and not self.lists and not self.sharded and self.selection is None

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> MaskSpec:
        return MaskSpec(**json.loads(text))

    def build(
        self,
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        device: torch.device,
    ) -> BuiltMask:
        """The exact plan, without the selection where that reads a table out of bounds.

        The mask may leave out such pairs; then the score mod's own graph, which looks at attended pairs only, selects.
        """
        if self.is_full:
            return BuiltMask(full_plan(q_len, kv_len, device))
        # Inference tensors do not count their changes: nothing that kernels derive from them could be kept.
        with torch.inference_mode(False), torch.no_grad():
            built = self._build(tensors, ints, (batch, heads, q_len, kv_len), device)
            return built if device.type == "cpu" else replace(built, plan=built.plan.with_outline())

    def shared(self, tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes, device: torch.device) -> BuiltMask:
        """As :meth:`build`; one for all calls on a stream, while the first tensor lives and all hold what they held.

        Another stream would not wait for the plan to be filled, nor the memory's next owner for what reads it there.
        """
        return plan_memo.shared(*self._to_share(tensors, ints, sizes, device))

    def expected(
        self, tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes, device: torch.device
    ) -> tuple[BuiltMask, Verdict | None]:
        """As :meth:`shared`, without waiting for a GPU, and what will say whether it is right (None: it is)."""
        return plan_memo.expected(*self._to_share(tensors, ints, sizes, device))

    def _to_share(
        self, tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes, device: torch.device
    ) -> tuple[Sequence[Tensor], Hashable, Callable[[], BuiltMask]]:
        identity = (self, tuple(ints), sizes, device, stream_of(device))
        return tensors, identity, lambda: self.build(tensors, ints, *sizes, device)

    def _build(self, tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes, device: torch.device) -> BuiltMask:
        from inductor_lowering.to_intervals import UnsupportedMask, restrict_by_program

        if self.selection is None:
            return BuiltMask(self._mask_plan(tensors, ints, sizes, device))
        own, selected_by = split_last(self.selection_order, tensors, ints)
        captures = join_captures(self.selection_order, *selected_by)
        plan = self._mask_plan(*own, sizes, device)
        try:
            return BuiltMask(restrict_by_program(plan, FxProgram.from_json(self.selection), captures, *sizes[:2]))
        except (IndexError, UnsupportedMask) as error:
            logger.info("score_mod: its -inf selection is not made part of the mask: %s", error)
            return BuiltMask(plan, selected=False)

    def _mask_plan(
        self, tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes, device: torch.device
    ) -> MaskPlan:
        """The plan without the selection.  Device-built plans read nothing from the device if they need not."""
        from inductor_lowering.to_intervals import BlockRows, plan_from_lists, plan_with_report

        batch, heads, q_len, kv_len = sizes
        own = self if self.selection is None else replace(self, selection=None, selection_order="")
        if self.lists:
            check_mask_shape(tensors[0].shape[:2], batch, heads)
            if self._has_its_own_lists(tensors, ints, sizes):
                own = replace(own, lists=False, full_lists=False)
                return own._mask_plan(tensors[self._list_count :], ints[2:], sizes, device)
        # (Without lists plan_with_report tries the same.)
        if self.lists and objection(device, has_bit_tiles=False) is None:
            intervals = own._quick_intervals(tensors, ints, sizes, device)
            if intervals is not None:
                return MaskPlan(intervals)
        partial = full = None
        if self.lists:
            count = self._list_count
            lists, tensors = tensors[:count], tensors[count:]
            block_size, ints = (ints[0], ints[1]), ints[2:]
            if self.program is None:
                return plan_from_lists(*lists, *[None] * (4 - count), block_size, q_len, kv_len)
            partial = BlockRows.from_lists(lists[0], lists[1], block_size, q_len, kv_len)
            if self.full_lists:
                full = BlockRows.from_lists(lists[2], lists[3], block_size, q_len, kv_len)
        elif self.program is None:
            return full_plan(q_len, kv_len, device)
        captures = join_captures(self.order, tensors, ints)
        program = FxProgram.from_json(self.program)
        plan = plan_with_report(program, captures, batch, heads, q_len, kv_len, device, partial, full)[0]
        return plan if device.type == "cpu" else _without_shared_memory(plan, tensors)

    def _has_its_own_lists(self, tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes) -> bool:
        """Whether the block lists were made from this mask's plan (:func:`note_lists`), so that they change nothing."""
        from inductor_lowering.canonical import find_canonical

        if self.program is None:
            return False
        count = self._list_count
        captures = join_captures(self.order, tensors[count:], ints[2:])
        canonical = find_canonical(FxProgram.from_json(self.program), captures)
        if canonical is None:
            return False
        plan = [captures[i] for i in astuple(canonical) if i is not None]
        return plan_memo.known((*tensors[:count], *plan), _made_for(ints[:2], sizes[2:])) is not None

    def _quick_intervals(
        self, tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes, device: torch.device
    ) -> RowIntervals | None:
        """The mask by a fixed sequence of operations, one flag of which is read; None where there is no such."""
        from inductor_lowering.static_intervals import NotStatic

        holds: Tensor | None
        try:
            intervals, holds = self.static_intervals(tensors, ints, *sizes, device)
        except NotStatic:
            try:
                mask = self.labelled_mask(tensors, ints, *sizes, device)
                intervals, holds = mask.intervals, mask.holds
            except NotStatic:
                return None
        return intervals if holds is None or bool(holds) else None

    def static_shape(
        self, tensors: Sequence[Tensor], ints: Sequence[int], batch: int, heads: int, q_len: int, kv_len: int
    ) -> tuple[int, ...] | str:
        """The shape of :meth:`static_intervals`, from the tensors' shapes and dtypes alone; or why it is not known."""
        found = self._on_meta(self.static_intervals, tensors, ints, (batch, heads, q_len, kv_len))
        return found if isinstance(found, str) else tuple(found[0].starts.shape)

    def labelled_shapes(
        self, tensors: Sequence[Tensor], ints: Sequence[int], batch: int, heads: int, q_len: int, kv_len: int
    ) -> LabelledMask | str:
        """:meth:`labelled_mask` on the meta device; or why the mask has not that form."""
        return self._on_meta(self.labelled_mask, tensors, ints, (batch, heads, q_len, kv_len))

    def _on_meta(
        self, compute: Callable[..., Any], tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes
    ) -> Any | str:
        from inductor_lowering.mask_program import UnsupportedMask
        from inductor_lowering.static_intervals import NotStatic

        if not all(isinstance(size, int) for x in tensors for size in x.shape):
            return "a size that is not known"
        with unset_fake_temporarily():
            like = [torch.empty(tuple(x.shape), dtype=x.dtype, device="meta") for x in tensors]
            try:
                return compute(like, ints, *sizes, torch.device("meta"))
            except (NotStatic, UnsupportedMask) as reason:
                return str(reason)

    def static_intervals(
        self,
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        device: torch.device,
    ) -> tuple[RowIntervals, Tensor | None]:
        """The intervals of the mask_mod, with nothing read from the device, and whether the block lists change nothing
        about them (a bool tensor; None without lists).

        Raises NotStatic where the number of intervals depends on the tensors' contents.
        """
        from inductor_lowering.block_lists import agreement
        from inductor_lowering.static_intervals import NotStatic, static_intervals

        sizes = (batch, heads, q_len, kv_len)
        captures = self._known_captures(tensors, ints, sizes)
        if self.program is None:
            if self.lists:
                raise NotStatic("block lists alone")
            return RowIntervals.full(q_len, kv_len, device), None
        intervals = static_intervals(FxProgram.from_json(self.program), captures, *sizes, device)
        lists = self._listed_blocks(tensors, ints, sizes)
        return intervals, None if lists is None else agreement(MaskPlan(intervals), *lists)

    def labelled_mask(
        self,
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        device: torch.device,
    ) -> LabelledMask:
        """The mask by labels, with nothing read from the device.

        Raises NotStatic where the mask_mod is no equality of labels AND conditions of a known number of intervals.
        """
        from inductor_lowering.block_lists import agreement
        from inductor_lowering.packed_labels import labelled_intervals
        from inductor_lowering.static_intervals import NotStatic

        sizes = (batch, heads, q_len, kv_len)
        captures = self._known_captures(tensors, ints, sizes)
        if self.program is None:
            raise NotStatic("no mask_mod")
        labels = labelled_intervals(FxProgram.from_json(self.program), captures, *sizes, device)
        intervals, holds = labels.packed()
        blocks, lists = None, self._listed_blocks(tensors, ints, sizes)
        if lists is not None:
            _, partial, full = lists
            holds = holds & agreement(MaskPlan(intervals), *lists)
            blocks = partial.to(torch.int8)
            if full is not None:
                blocks = torch.where(full, torch.full_like(blocks, 2), blocks)
        return LabelledMask(intervals, holds, labels, blocks)

    def _known_captures(self, tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes) -> tuple[Any, ...]:
        """The mask_mod's captures.

        Raises NotStatic where the intervals of the mask cannot be had without reading from the device.
        """
        from inductor_lowering.static_intervals import NotStatic

        if self.sharded:
            raise NotStatic("a sequence shared by ranks")
        if self.selection is not None:
            raise NotStatic("a condition of the score mod")
        if not all(isinstance(size, int) for size in (*sizes, *ints)):
            raise NotStatic("a size that is not known")
        if self.lists:
            tensors, ints = tensors[self._list_count :], ints[2:]
        return join_captures(self.order, tensors, ints)

    @property
    def _list_count(self) -> int:
        return 4 if self.full_lists else 2

    def _listed_blocks(
        self, tensors: Sequence[Tensor], ints: Sequence[int], sizes: Sizes
    ) -> tuple[tuple[int, int], Tensor, Tensor | None] | None:
        """(block size, which blocks are listed as partial, and as full) or None without lists."""
        from inductor_lowering.block_lists import listed_blocks

        if not self.lists:
            return None
        block_size = (ints[0], ints[1])
        check_mask_shape(tensors[0].shape[:2], *sizes[:2])
        count = self._list_count
        listed = [listed_blocks(*tensors[i : i + 2], block_size, *sizes[2:]) for i in range(0, count, 2)]
        return block_size, listed[0], listed[1] if self.full_lists else None


def note_lists(
    lists: Sequence[Tensor], plan: Sequence[Tensor], block_size: Sequence[int], lengths: Sequence[int]
) -> None:
    """Remember, as long as these tensors hold what they hold, that the block lists were made from a plan.

    Args:
        lists: kv_num_blocks, kv_indices, and the two of full blocks if there are any.
        plan: what a CanonicalMaskMod captures.
        lengths: of queries and keys.
    """
    plan_memo.note((*lists, *plan), _made_for(block_size, lengths), True)


def _made_for(block_size: Sequence[int], lengths: Sequence[int]) -> Hashable:
    return "lists of a plan", *block_size, *lengths


def full_plan(q_len: int, kv_len: int, device: torch.device) -> MaskPlan:
    """The plan of a call without a mask: the same one in every call, as there is nothing that it could follow.

    One for each stream, since others would not wait until it is filled; one that is made while a CUDA graph is captured
    is filled by the graph's replays alone, so it is not kept.
    """
    make = _full_plan
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        make = _full_plan.__wrapped__
    return make(q_len, kv_len, device, stream_of(device))


@functools.lru_cache(maxsize=8)
def _full_plan(q_len: int, kv_len: int, device: torch.device, stream: int) -> MaskPlan:
    with torch.inference_mode(False), unset_fake_temporarily():
        return MaskPlan(RowIntervals.full(q_len, kv_len, device), structure=Band(None, None))


def _without_shared_memory(plan: MaskPlan, tensors: Sequence[Tensor]) -> MaskPlan:
    """``plan`` in memory of its own: what kernels derive from it is kept as long as that is unchanged (plan_cache.py),
    and a user may write to captures without a trace."""
    theirs = {x.untyped_storage()._cdata for x in tensors}
    if plan.starts.untyped_storage()._cdata not in theirs:
        return plan
    bits = plan.bit_tiles
    if bits is not None:
        own = (x.clone() for x in (bits.row_ptr, bits.cols, bits.slot, bits.bits))
        bits = BitTiles(bits.q_tile, bits.kv_tile, *own)
    return MaskPlan(RowIntervals(plan.starts.clone(), plan.ends.clone(), plan.kv_len), bits)


@dataclass(frozen=True)
class ScoreSpec:
    """A score mod; its tensors and ints are its captures.

    Attributes:
        forward, joint: FxProgram JSON of the two graphs (see ScoreProgram); both None for the identity.
        order: how captured tensors and ints interleave.
        needs_grad: for each capture, whether its gradient is wanted.
        recipe: JSON of the simple steps that the score mod consists of (score_steps.py), or None; for the pairs that
            the mask's selection leaves, if it has one.
    """

    forward: str | None = None
    joint: str | None = None
    order: str = ""
    needs_grad: tuple[bool, ...] = ()
    recipe: str | None = None

    def build(
        self,
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        sizes: Sizes | None,
        device: torch.device,
        selected: bool = True,
    ) -> ScoreProgram:
        """``sizes`` (batch, heads, queries, keys) bound the indices that the mod sees; None: not known here.

        ``selected``: BuiltMask.selected of the mask.  Steps are for kernels that give no gradients of captures, so they
        are left out where one is wanted.
        """
        if self.forward is None:
            return IDENTITY
        captures = join_captures(self.order, tensors, ints)
        steps = None
        if self.recipe is not None and selected and sizes is not None and not any(self.needs_grad):
            steps = build_steps(_recipe(self.recipe), captures, sizes, device)
        return ScoreProgram(
            steps=steps,
            forward=FxProgram.from_json(self.forward),
            joint=None if self.joint is None else FxProgram.from_json(self.joint),
            captures=captures,
            needs_grad=self.needs_grad,
        )


@dataclass(frozen=True)
class CallSpec:
    """A call apart from its tensors, its mask and its scale.

    One string for all of it: each argument of an op costs time in every call.

    Attributes:
        score: the score mod, whose captures are the last of the call's tensors and ints.
        backend: "auto" or the name of a backend.
        orders: fill orders (layout.py) of the results: of out, or of dq, dk and dv.
        needs_backward, max_score: of a forward call, whether a backward will follow, and whether anybody reads the
            largest scores.
    """

    score: ScoreSpec
    backend: str
    orders: tuple[tuple[int, ...], ...]
    needs_backward: bool = True
    max_score: bool = False

    @property
    def forward_settings(self) -> tuple[str, bool, tuple[int, ...], bool]:
        """As run_forward takes them: backend, needs_backward, out_order, max_score."""
        return self.backend, self.needs_backward, self.orders[0], self.max_score

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> CallSpec:
        record = json.loads(text)
        score = ScoreSpec(**{**record["score"], "needs_grad": tuple(record["score"]["needs_grad"])})
        return CallSpec(**{**record, "score": score, "orders": tuple(map(tuple, record["orders"]))})


@functools.lru_cache(maxsize=1024)
def _recipe(text: str) -> tuple[Any, ...]:
    return tuple(json.loads(text))
