"""One mask of a context parallel run on this rank: its plans, and the handle by which compiled graphs find them.

A graph sees a mask only as captured tensors.  The first of them is the handle: its contents name the plans that this
process keeps for as long as the handle's memory lives, so that a new mask is new contents and nothing recompiles.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from magi_flex.canonical_mask import CanonicalMaskMod
from magi_flex.distributed.attention_plan import AttentionPlan
from magi_flex.distributed.cost_model import PREFETCH, Costs, Cut, Shape, choose_cut
from magi_flex.distributed.dispatch import Dispatch
from magi_flex.distributed.exchange_plan import build_exchange_plan
from magi_flex.distributed.key_ranges import KeyRanges
from magi_flex.distributed.native_exchange import with_native_hops
from magi_flex.distributed.planning import Needed, gather_needed
from magi_flex.distributed.query_exchange import choose_pairs, gather_pair_counts
from magi_flex.distributed.timeline import Timeline
from magi_flex.intervals import RowIntervals
from magi_flex.remember import remembered
from magi_flex.sharded_mask import HANDLE_MAGIC, HANDLE_SHAPE, ShardedMaskMod

RANKS_OF_A_NODE = 8  # where ranks_per_node does not say
# Remembered of a mask; beyond that all ranks of the group, which make the same calls, plan anew.
_MOST_CALLS, _MOST_PLANS = 256, 64


@dataclass(frozen=True)
class Options:
    """How the passes of a context parallel run are cut.

    Attributes:
        cut: "keys": the rank's own keys are attended to first, then those of others in stages, as they arrive; "heads":
            all keys are attended to at once, by one group of heads after the other; "auto": what the cost model finds
            faster.
        forward_stages, backward_stages: stages, or groups of heads; None lets the cost model choose.
        keep_keys: keep the keys and values of others of the forward pass for the backward pass instead of fetching them
            again; both passes then are cut as the forward is.
        ranks_per_node: above 1: exchange on two levels.
        move: "keys"; or "auto": queries where the cost model finds that faster, which it considers where a pass has so
            few queries that sending them all would take fewer bytes than sending all keys.
        prefetch: stages whose keys may be on their way before they are computed.
        native: True: kernels of ours write rows straight into the memory of the other GPUs, which must be GPUs of one
            machine that reach each other's memory (else RuntimeError); False: all-to-all; "auto": native where that
            is possible and known to be faster, which is nowhere yet (on two H200s neither was).
        costs: figures of the machine for the cost model.
    """

    cut: Literal["auto", "keys", "heads"] = "auto"
    forward_stages: int | None = None
    backward_stages: int | None = None
    keep_keys: bool = False
    ranks_per_node: int = 1
    move: Literal["auto", "keys"] = "auto"
    prefetch: int = PREFETCH
    native: Literal["auto"] | bool = "auto"
    costs: Costs = Costs()

    def __post_init__(self) -> None:
        if self.native not in ("auto", True, False):
            raise ValueError(f'native: got {self.native!r}, allowed are "auto", True and False')
        if self.cut not in ("auto", "keys", "heads"):
            raise ValueError(f'cut: got {self.cut!r}, allowed are "auto", "keys" and "heads"')
        if self.move not in ("auto", "keys"):
            raise ValueError(f'move: got {self.move!r}, allowed are "auto" and "keys"')
        for name in ("prefetch", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed are 1 and more")
        for name in ("forward_stages", "backward_stages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, allowed are 1 and more, or None for the cost model's choice")

    def as_ints(self) -> list[int]:
        """For a checksum: all of them decide what is exchanged, so every rank must have the same."""
        costs = torch.tensor(list(vars(self.costs).values()), dtype=torch.float64).view(torch.int64).tolist()
        stages = (self.forward_stages or 0, self.backward_stages or 0)
        native = 2 if self.native == "auto" else int(self.native)
        cut = ("auto", "keys", "heads").index(self.cut)
        return [cut, *stages, self.keep_keys, self.ranks_per_node, self.move == "auto", self.prefetch, native, *costs]


Part = tuple[int, int, int, int]  # of a mask: first batch entry, entries, first head, heads


@dataclass
class ContextMask:
    """Plans of one mask; the same on every rank of ``group`` but for the rank's own part.

    Attributes:
        mask: of the whole problem, in the order of the sequence.
        needed: the keys that each rank's rows attend to, and how the rows are spread over them.
        device: where attention runs.
        native: rows travel by native collectives.
    """

    mask: RowIntervals
    group: dist.ProcessGroup
    q_dispatch: Dispatch
    kv_dispatch: Dispatch
    needed: Needed
    device: torch.device
    options: Options
    native: bool = False
    timeline: Timeline | None = None
    _parts: dict[Part, tuple[RowIntervals, KeyRanges]] = field(default_factory=dict)
    _plans: dict[Hashable, AttentionPlan] = field(default_factory=dict)
    _plan_of_call: dict[Hashable, AttentionPlan] = field(default_factory=dict)

    def plan(self, shape: Shape, backward: bool, batch_offset: int = 0, head_offset: int = 0) -> AttentionPlan:
        """The plan of a pass over ``shape.batch`` batch entries and ``shape.q_heads`` query heads.

        The first call for a part of a batch or head dependent mask, for a choice between queries and keys, or for a
        plan of native collectives, is a collective.
        """

        def solve() -> AttentionPlan:
            part = self._part(batch_offset, shape.batch, head_offset, shape.q_heads)
            # kept keys are those of the forward's plan
            return self._solved(part, shape, backward and not self.options.keep_keys)

        return remembered(self._plan_of_call, (shape, backward, batch_offset, head_offset), solve, _MOST_CALLS)

    def _solved(self, part: Part, shape: Shape, backward: bool) -> AttentionPlan:
        """One plan for all passes that cut the same part into the same stages."""
        may_move = self.options.move == "auto" and self.options.cut != "heads"
        considered = may_move and self._few_queries(shape, backward)
        cut = self.cut(shape, backward, ("keys",) if considered else ("keys", "heads"))
        key = (part, cut, (shape, backward) if considered else None)

        def build() -> AttentionPlan:
            mask, needed = self._parts[part]
            moved = self._moved_queries(mask, needed, shape, backward) if considered else None
            exchange = build_exchange_plan(
                mask,
                self.q_dispatch,
                self.kv_dispatch,
                self.group.rank(),
                needed,
                cut.parts if cut.by == "keys" else 1,
                self.options.ranks_per_node,
                moved,
                joined=cut.by == "heads",
            )
            if self.native:
                exchange = with_native_hops(exchange, self.group, self.device)
            return AttentionPlan.from_exchange(exchange, self.device, cut.head_groups)

        return remembered(self._plans, key, build, _MOST_PLANS)

    def _part(self, batch_offset: int, batch: int, head_offset: int, heads: int) -> Part:
        mask_batch, mask_heads = self.mask.starts.shape[:2]
        if mask_batch == 1:
            batch_offset, batch = 0, 1
        if mask_heads == 1:
            head_offset, heads = 0, 1
        part = (batch_offset, batch, head_offset, heads)
        if part not in self._parts:
            if batch_offset + batch > mask_batch or head_offset + heads > mask_heads:
                raise ValueError(
                    f"block_mask: is for {mask_batch} batch entries and {mask_heads} heads, but entries {batch_offset} "
                    f"to {batch_offset + batch} and heads {head_offset} to {head_offset + heads} are wanted"
                )
            if (batch, heads) == (mask_batch, mask_heads):
                self._parts[part] = (self.mask, self.needed.ranges)
            else:
                entries, of_heads = slice(batch_offset, batch_offset + batch), slice(head_offset, head_offset + heads)
                bounds = (x[entries, of_heads].contiguous() for x in (self.mask.starts, self.mask.ends))
                mask = RowIntervals(*bounds, self.mask.kv_len)
                self._parts[part] = (mask, gather_needed([mask], self.q_dispatch, self.group)[0].ranges)
        return part

    @property
    def _crosses_network(self) -> bool:
        return 1 < self.options.ranks_per_node < self.group.size() or self.group.size() > RANKS_OF_A_NODE

    def _few_queries(self, shape: Shape, backward: bool) -> bool:
        per_key = shape.key_bytes() + (shape.key_gradient_bytes() if backward else 0)
        return self.mask.q_len * shape.query_bytes(backward) < self.mask.kv_len * per_key

    def _moved_queries(self, mask: RowIntervals, needed: KeyRanges, shape: Shape, backward: bool) -> Tensor:
        """For which pairs of ranks queries move.  A collective."""
        costs = self.options.costs
        bandwidth = costs.network_bandwidth if self._crosses_network else costs.node_bandwidth
        counts = gather_pair_counts(mask, self.q_dispatch, self.kv_dispatch, needed, self.group)
        return choose_pairs(counts, shape, costs, backward, bandwidth)

    def cut(self, shape: Shape, backward: bool, by: Sequence[Literal["keys", "heads"]] = ("keys", "heads")) -> Cut:
        """How a pass is cut, the same on every rank: chosen for the rank with the most remote keys."""
        options = self.options
        if options.cut != "auto":
            by = (options.cut,)
        counts = self.needed.ranges.counts()
        rank = int(counts.argmax())
        own = self.kv_dispatch.row_counts()[rank]
        return choose_cut(
            options.costs,
            shape,
            backward,
            self.needed.spreads[rank],
            self.mask.q_len / self.group.size(),
            own,
            max(0, int(counts[rank]) - own),
            self._crosses_network,
            prefetch=options.prefetch,
            by=by,
            parts=options.backward_stages if backward else options.forward_stages,
        )


# ---- handles --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    owner: StorageWeakRef
    mask: ContextMask
    batch_offset: int
    head_offset: int


_keys = itertools.count(1)
_by_key: dict[int, _Entry] = {}
_by_storage: dict[int, _Entry] = {}  # spares the look into a tensor on a GPU
_lock = threading.Lock()


def new_handle(mask: ContextMask, batch_offset: int = 0, head_offset: int = 0) -> Tensor:
    """int64 HANDLE_SHAPE on the mask's device: HANDLE_MAGIC, a key, the batch offset and the head offset.

    This process keeps ``mask`` until the handle's memory is freed.
    """
    with _lock:
        for table in (_by_key, _by_storage):
            for key in [key for key, entry in table.items() if entry.owner.expired()]:
                del table[key]
        key = next(_keys)
        handle = torch.tensor([HANDLE_MAGIC, key, batch_offset, head_offset], device=mask.device).view(HANDLE_SHAPE)
        storage = handle.untyped_storage()
        entry = _Entry(StorageWeakRef(storage), mask, batch_offset, head_offset)
        _by_key[key] = _by_storage[storage._cdata] = entry
    return handle


def find(handle: Tensor) -> tuple[ContextMask, int, int]:
    """(mask, batch offset, head offset).  Raises RuntimeError for what is no handle of a mask that is alive here."""
    with _lock:
        entry = _by_storage.get(handle.untyped_storage()._cdata)
    if entry is None or entry.owner.expired():
        values = handle.flatten().tolist()
        if len(values) != 4 or values[0] != HANDLE_MAGIC:
            raise RuntimeError("block_mask: is not that of a ContextParallel; take ContextParallel.block_mask")
        with _lock:
            entry = _by_key.get(values[1])
    if entry is None or entry.owner.expired():
        raise RuntimeError(
            "block_mask: its ContextParallel is gone; keep it alive until the backward pass, and use it only in the "
            "process that made it"
        )
    return entry.mask, entry.batch_offset, entry.head_offset


class ContextMaskMod(ShardedMaskMod):
    """A mask_mod that also knows which dimension of which mesh shares the sequence."""

    def __init__(
        self,
        handle: Tensor,
        q_position: Tensor,
        kv_position: Tensor,
        mask_mod: CanonicalMaskMod,
        mesh: DeviceMesh,
        mesh_dim: int,
    ) -> None:
        super().__init__(handle, q_position, kv_position, mask_mod)
        self.mesh = mesh
        self.mesh_dim = mesh_dim
