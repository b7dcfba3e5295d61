"""ContextParallel: one long sequence over the ranks of a mesh dimension, any mask, balanced.

    cp = ContextParallel(mesh["cp"], block_mask)          # or several masks, for layers that alternate
    x = cp.shard(tokens, dim=1)                           # DTensor in dispatch order; positions: cp.position_ids
    y = model(x, cp.position_ids, cp.block_mask)          # flex_attention as usual, eager or compiled
    y = cp.unshard(y, dim=1)                              # in the order of the sequence again

Shape legend: B batch, S sequence, H query heads, G key/value heads, D head dim, Q this rank's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from magi_flex.block_mask import plan as plan_of_block_mask
from magi_flex.canonical_mask import CanonicalMaskMod
from magi_flex.distributed import sharding
from magi_flex.distributed.context_mask import ContextMask, ContextMaskMod, Options, new_handle
from magi_flex.distributed.dispatch import Dispatch, dtensor_row_counts
from magi_flex.distributed.group_collective import group_cast
from magi_flex.distributed.mask_forms import to_intervals, to_plan
from magi_flex.distributed.native_buffers import choose_native
from magi_flex.distributed.planning import check_masks, gather_dispatch, gather_needed
from magi_flex.distributed.sequence import roll_plan
from magi_flex.distributed.timeline import Timeline
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan

Mask = BlockMask | MaskPlan | RowIntervals


class ContextParallel:
    """The dispatch of one sequence and the exchange plans of its masks.  Constructing it is a collective.

    Make a new one when the masks change; a compiled model sees new tensor contents only and is not compiled again.

    Args:
        mesh: one-dimensional, or the whole mesh of the activations with ``dim`` naming the dimension that shares the
            sequence (data and tensor parallel dimensions beside it).
        masks: BlockMasks, MaskPlans or RowIntervals of equal lengths, of the whole problem, the same on every rank.
            Layers that use different ones share the dispatch, which balances all of them.
        dim: name of the mesh dimension; needed if the mesh has several.
        forward_stages, backward_stages, keep_keys, ranks_per_node, move, prefetch, native, costs: see
            :class:`Options`.

    Attributes:
        block_masks: for flex_attention on DTensors that are sharded by :meth:`shard`, one for each mask.
        position_ids: DTensor int64 ``[S]`` in dispatch order, for rotary embeddings.
        rows: int64 ``[Q]``, this rank's rows as indices into the sequence.
        dispatch: who holds which rows; :attr:`kv_dispatch` the same for keys (another one where lengths differ).
        timeline: set it to a :class:`Timeline` to record what runs when.

    Raises:
        ValueError: on every rank, if the ranks were given different masks or options; lengths that differ; no mask.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        masks: Mask | Sequence[Mask],
        *,
        dim: str | None = None,
        **options: Any,
    ) -> None:
        given = [masks] if isinstance(masks, (BlockMask, MaskPlan, RowIntervals)) else list(masks)
        if not given:
            raise ValueError("masks: is empty; give at least one mask")
        self.mesh = mesh
        self.mesh_dim = _mesh_dim(mesh, dim)
        self.group = mesh.get_group(self.mesh_dim)
        self.options = Options(**options)
        self.device = _device(mesh)
        intervals = [_intervals(mask, self.device) for mask in given]
        ranks = self.group.size()
        if ranks % self.options.ranks_per_node:
            raise ValueError(f"ranks_per_node: got {self.options.ranks_per_node}, which must divide the {ranks} ranks")
        check_masks(intervals, self.group, self.options.as_ints())
        lengths = {(mask.q_len, mask.kv_len) for mask in intervals}
        if len(lengths) > 1:
            raise ValueError(
                f"masks: have lengths {sorted(lengths)} (queries, keys); they must be equal to share a dispatch"
            )
        self.q_len, self.kv_len = lengths.pop()
        self.dispatch = gather_dispatch(intervals, dtensor_row_counts(self.q_len, ranks), self.group)
        self.kv_dispatch = self.dispatch
        if self.kv_len != self.q_len:
            self.kv_dispatch = Dispatch.contiguous(self.kv_len, dtensor_row_counts(self.kv_len, ranks))
        needed = gather_needed(intervals, self.dispatch, self.group)
        native = choose_native(self.options.native, self.group, self.device)
        of_all = (self.group, self.dispatch, self.kv_dispatch)
        self.masks = [
            ContextMask(mask, *of_all, of_mask, self.device, self.options, native)
            for mask, of_mask in zip(intervals, needed, strict=True)
        ]
        self.rows = self.dispatch.rows(self.group.rank()).to(self.device)
        self.position_ids = self._distribute(self.rows, (self.q_len,), 0)
        dispatches = {x.length: x for x in (self.kv_dispatch, self.dispatch)}
        self._order = {length: dispatch.order(self.device) for length, dispatch in dispatches.items()}
        sizes = [mask.BLOCK_SIZE if isinstance(mask, BlockMask) else None for mask in given]
        self.block_masks = [self._block_mask(mask, size) for mask, size in zip(self.masks, sizes, strict=True)]
        sharding.install()

    @property
    def block_mask(self) -> BlockMask:
        """The only mask's BlockMask."""
        if len(self.block_masks) != 1:
            raise ValueError(f"block_mask: there are {len(self.block_masks)} masks; take one of block_masks")
        return self.block_masks[0]

    @property
    def timeline(self) -> Timeline | None:
        return self.masks[0].timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        for mask in self.masks:
            mask.timeline = timeline

    @property
    def imbalance(self) -> float:
        """Largest over mean load of the ranks, 1 is perfect (see :meth:`Dispatch.imbalance`)."""
        return self.dispatch.imbalance([mask.mask for mask in self.masks])

    # ---- tensors --------------------------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int) -> DTensor:
        """The rows of this rank of a tensor that every rank of the group has whole; dispatch order along ``dim``.

        Args:
            x: a tensor (the same on all ranks of the mesh), or a DTensor on the mesh that is replicated over the
                sequence's dimension (and sharded as you like over the others, but not along ``dim``).
            dim: the sequence: of the masks' query length, or of their key length.

        Differentiable: the gradient of a DTensor is summed over the ranks that share the sequence; that of a plain
        tensor holds this rank's rows alone, to be summed as gradients of parameters are.

        Raises:
            ValueError: a length that is neither; a DTensor on another mesh or with other placements.
        """
        dim = dim % x.dim()
        dispatch = self._dispatch_of(x, dim)
        rows = dispatch.rows(self.group.rank()).to(x.device)
        if not isinstance(x, DTensor):
            return self._distribute(x.index_select(dim, rows), tuple(x.shape), dim)
        if x.device_mesh != self.mesh or not x.placements[self.mesh_dim].is_replicate() or Shard(dim) in x.placements:
            raise ValueError(
                f"x: has placements {x.placements} on {x.device_mesh}; it must be on {self.mesh}, replicated over mesh "
                f"dimension {self.mesh_dim}, which shares the sequence, and whole along dimension {dim}"
            )
        placements, of_grad = list(x.placements), list(x.placements)
        placements[self.mesh_dim], of_grad[self.mesh_dim] = Shard(dim), Partial()
        local = x.to_local(grad_placements=of_grad).index_select(dim, rows)
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=x.shape, stride=_contiguous_strides(x.shape)
        )

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor in the order of the sequence, on every rank.  Differentiable.

        Args:
            x: a DTensor in dispatch order along ``dim``, or this rank's part as a plain tensor.
        """
        dim = dim % x.dim()
        if not isinstance(x, DTensor):
            counts = [len(self.rows)]
            if x.shape[dim] != counts[0]:
                raise ValueError(f"x: has {x.shape[dim]} rows in dimension {dim}; this rank holds {counts[0]}")
            shape = list(x.shape)
            shape[dim] = self.q_len
            x = self._distribute(x, tuple(shape), dim)
        self._require_dispatch_order(x, dim)
        order = self._order[self._dispatch_of(x, dim).length]
        return x.full_tensor().index_select(dim, torch.argsort(order))

    def roll(self, x: Tensor, dim: int, shift: int = -1) -> Tensor:
        """As ``torch.roll`` along the sequence, without gathering it: labels are ``roll(tokens, dim, -1)``.

        Args:
            x: a DTensor in dispatch order along ``dim``, or this rank's part as a plain tensor; of the query length.
        """
        dim = dim % x.dim()
        if isinstance(x, DTensor):
            # the whole length, which is the same on every rank: all of them raise, or none does
            if x.shape[dim] != self.q_len:
                raise ValueError(
                    f"x: has length {x.shape[dim]} in dimension {dim}; the masks have {self.q_len} queries"
                )
            self._require_dispatch_order(x, dim)
        local = x.to_local() if isinstance(x, DTensor) else x
        if local.shape[dim] != len(self.rows):
            raise ValueError(f"x: has {local.shape[dim]} rows in dimension {dim}; this rank holds {len(self.rows)}")
        plan = roll_plan(self.dispatch, self.group.rank(), shift).to(local.device)
        (rolled,) = group_cast([local.movedim(dim, 0)], plan, self.group)
        rolled = rolled.movedim(0, dim).contiguous()
        if not isinstance(x, DTensor):
            return rolled
        return DTensor.from_local(
            rolled, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=_contiguous_strides(x.shape)
        )

    def _require_dispatch_order(self, x: DTensor, dim: int) -> None:
        wanted = Shard(dim)
        if x.device_mesh != self.mesh or [i for i, p in enumerate(x.placements) if p == wanted] != [self.mesh_dim]:
            raise ValueError(
                f"x: has placements {x.placements} on {x.device_mesh}; it must be sharded along dimension {dim} over "
                f"dimension {self.mesh_dim} of {self.mesh}, and over no other (as ContextParallel.shard gives it)"
            )

    def _dispatch_of(self, x: Tensor, dim: int) -> Dispatch:
        for dispatch in (self.dispatch, self.kv_dispatch):
            if x.shape[dim] == dispatch.length:
                return dispatch
        raise ValueError(
            f"x: has length {x.shape[dim]} in dimension {dim}; the masks have {self.q_len} queries and "
            f"{self.kv_len} keys"
        )

    def _distribute(self, local: Tensor, shape: tuple[int, ...], dim: int) -> DTensor:
        return _distribute(local, self.mesh, self.mesh_dim, shape, dim)

    # ---- masks ----------------------------------------------------------------------------------------------------

    def _block_mask(self, mask: ContextMask, block_size: tuple[int, int] | None) -> BlockMask:
        def replicated(x: Tensor) -> DTensor:
            return DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

        canonical = CanonicalMaskMod.from_plan(to_plan(mask.mask))
        bits = canonical.bit_tiles
        if bits is not None:
            names = ("row_ptr", "cols", "slot", "bits")
            bits = replace(bits, **{name: replicated(getattr(bits, name)) for name in names})
        mask_mod = ContextMaskMod(
            replicated(new_handle(mask)),
            replicated(self._order[self.q_len]),
            replicated(self._order[self.kv_len]),
            CanonicalMaskMod(replicated(canonical.starts), replicated(canonical.ends), canonical.kv_len, bits),
            self.mesh,
            self.mesh_dim,
        )
        q_block, kv_block = block_size or (_block_size(self.q_len), _block_size(self.kv_len))
        rows, columns = -(-self.q_len // q_block), -(-self.kv_len // kv_block)
        # Every block is listed as partial; views, so that the lists take no memory.
        return BlockMask(
            (self.q_len, self.kv_len),
            *_all_blocks(rows, columns, self.device),
            None,
            None,
            *_all_blocks(columns, rows, self.device),
            None,
            None,
            BLOCK_SIZE=(q_block, kv_block),
            mask_mod=mask_mod,
        )


def attend_local(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, block_mask: BlockMask, **kwargs: Any) -> Any:
    """flex_attention for models whose activations are plain tensors: this rank's rows and keys, in dispatch order.

    Wraps them into DTensors, calls flex_attention (with ``kwargs``) and gives the local results.  ``block_mask`` is a
    ContextParallel's; nothing else of it is needed, so that this may be called inside of a compiled model.
    """
    mask_mod = block_mask.mask_mod
    if not isinstance(mask_mod, ContextMaskMod):
        raise ValueError("block_mask: must be a ContextParallel's block_mask")
    q_len, kv_len = block_mask.seq_lengths
    wrapped = [
        _distribute(x, mask_mod.mesh, mask_mod.mesh_dim, (x.shape[0], x.shape[1], length, x.shape[3]), 2)
        for x, length in ((q_BHQD, q_len), (k_BGKD, kv_len), (v_BGKD, kv_len))
    ]
    result = flex_attention(*wrapped, block_mask=block_mask, **kwargs)
    return torch.utils._pytree.tree_map(lambda y: y.to_local() if isinstance(y, DTensor) else y, result)


def _distribute(local: Tensor, mesh: DeviceMesh, mesh_dim: int, shape: tuple[int, ...], dim: int) -> DTensor:
    """A DTensor of this global shape from this rank's rows of dimension ``dim``; replicated over the mesh otherwise."""
    placements: list[Any] = [Replicate()] * mesh.ndim
    placements[mesh_dim] = Shard(dim)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=_contiguous_strides(shape)
    )


def _all_blocks(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    count = torch.full((1, 1, rows), columns, dtype=torch.int32, device=device)
    return count, torch.arange(columns, dtype=torch.int32, device=device).expand(1, 1, rows, columns)


def _block_size(length: int) -> int:
    block = 128
    while -(-length // block) > 128:
        block *= 2
    return block


def _mesh_dim(mesh: DeviceMesh, dim: str | None) -> int:
    names = mesh.mesh_dim_names
    if dim is None:
        if mesh.ndim == 1:
            return 0
        raise ValueError(f"dim: the mesh has dimensions {names}; name the one that shares the sequence")
    if names is None or dim not in names:
        raise ValueError(f"dim: got {dim!r}, but the mesh has dimensions {names}")
    return names.index(dim)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _intervals(mask: Mask, device: torch.device) -> RowIntervals:
    if isinstance(mask, BlockMask):
        mask = plan_of_block_mask(mask)
    if isinstance(mask, MaskPlan):
        mask = to_intervals(mask)
    if not isinstance(mask, RowIntervals):
        raise ValueError(f"masks: got a {type(mask).__name__}; give BlockMask, MaskPlan or RowIntervals")
    return RowIntervals(mask.starts.to(device), mask.ends.to(device), mask.kv_len)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, size))
    return tuple(strides)
