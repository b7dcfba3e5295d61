"""flex_attention on DTensors: batch and heads stay local, a sharded sequence goes through the exchange plans.

The rule unwraps the operands and calls FlexAttention's op again on the local parts, so that whatever serves the op
(eager, or in a compiled graph) serves it here.  What differs between ranks (offsets of batch entries and heads, plans)
is looked up when the graph runs; the graph itself is the same on every rank.

Shape legend: B batch, H query heads, G key/value heads, S sequence, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_map

from inductor_lowering import entry_checks
from inductor_lowering.torch_compat import BACKWARD_HOP, CAPTURED_GRADS, FORWARD_HOP, BlockMaskArgs
from magi_flex.distributed import context_ops
from magi_flex.kernels.layout import dense_order, fill_order, strides_for
from magi_flex.sharded_mask import find_handle

BATCH, HEADS, SEQUENCE = 0, 1, 2  # dimensions of the operands


def install() -> None:
    """Give FlexAttention's ops their DTensor rule (once; it does not change what happens to plain tensors)."""
    if DTensor not in FORWARD_HOP.python_key_table:
        FORWARD_HOP.py_impl(DTensor)(_forward)
        BACKWARD_HOP.py_impl(DTensor)(_backward)


@dataclass(frozen=True)
class Layout:
    """How the operands are laid out for the local call.

    Attributes:
        mesh: of all operands.
        q, k: placements for queries (and outputs) and for keys and values.
        dk: placements of the local gradients of keys and values.
    """

    mesh: DeviceMesh
    q: tuple[Placement, ...]
    k: tuple[Placement, ...]
    dk: tuple[Placement, ...]

    @staticmethod
    def of(q: DTensor, k: DTensor, v: DTensor) -> Layout:
        for name, x in (("query", q), ("key", k), ("value", v)):
            if not isinstance(x, DTensor) or x.device_mesh != q.device_mesh:
                raise ValueError(f"{name}: must be a DTensor on the query's mesh, as the other operands of this call")
        of_q, of_k, of_dk = [], [], []
        q_heads, k_heads = q.shape[HEADS], k.shape[HEADS]  # that are left for a rank: several dimensions may cut them
        for dim, size in enumerate(q.device_mesh.shape):
            placement = q.placements[dim]
            kept: Placement = Replicate()
            keys: Placement = Replicate()
            if placement == Shard(SEQUENCE):
                kept = keys = Shard(SEQUENCE)
            elif placement == Shard(BATCH):
                kept = Shard(BATCH)
                keys = kept if k.shape[BATCH] == q.shape[BATCH] else Replicate()
            elif placement == Shard(HEADS) and q_heads % size == 0:
                if k_heads % size == 0:
                    kept = keys = Shard(HEADS)
                    k_heads //= size
                elif k_heads == 1:
                    kept = Shard(HEADS)
                if kept == Shard(HEADS):
                    q_heads //= size
            of_q.append(kept)
            of_k.append(keys)
            of_dk.append(Partial() if keys.is_replicate() and not kept.is_replicate() else keys)
        if of_q.count(Shard(SEQUENCE)) > 1:
            raise ValueError(f"query: has placements {q.placements}; only one mesh dimension can share the sequence")
        return Layout(q.device_mesh, tuple(of_q), tuple(of_k), tuple(of_dk))

    def mesh_dims(self, tensor_dim: int) -> list[int]:
        """The mesh dimensions over which a dimension of q is sharded, in order."""
        return [i for i, placement in enumerate(self.q) if placement == Shard(tensor_dim)]

    def captured_grad(self) -> tuple[Placement, ...]:
        """Placements of a capture's gradient: the ranks that share the sequence have its sum already."""
        return tuple(Partial() if p in (Shard(BATCH), Shard(HEADS)) else Replicate() for p in self.q)


def _local(x: Any, placements: Sequence[Placement]) -> Any:
    if not isinstance(x, DTensor):
        return x
    return (x if tuple(x.placements) == tuple(placements) else x.redistribute(placements=placements))._local_tensor


def _replicated(x: Any) -> Any:
    """A capture's whole value; an eager backward pass asks it whether its gradient is wanted."""
    if not isinstance(x, DTensor):
        return x
    local = _local(x, [Replicate()] * x.device_mesh.ndim)
    return local.detach().requires_grad_() if x.requires_grad and type(local) is Tensor else local


def _wrap(
    local: Tensor, layout: Layout, placements: Sequence[Placement], shape: Sequence[int], like: Tensor | None = None
) -> DTensor:
    """A DTensor of this global shape; ``like``: whose order of dimensions the result has (None: contiguous).

    What is empty has no order of its own, and strides that differ between ranks would make autograd lay out a gradient
    anew on some of them, by collectives that the others do not join.
    """
    if local.numel():
        order = dense_order(local)
    else:
        order = list(reversed(range(local.dim()))) if like is None else fill_order(like)
    strides = strides_for(shape, order)
    return DTensor.from_local(
        local, layout.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


# ---- masks and mods of the local part -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LocalMask:
    """The block mask and what it captures, for the local call.

    Attributes:
        offsets: of batch and heads, where mods on local indices have to add them.
    """

    block_mask: tuple[Any, ...]
    captures: tuple[Any, ...]
    offsets: tuple[Tensor, ...] = ()

    @staticmethod
    def of(layout: Layout, q: DTensor, block_mask: tuple[Any, ...], captures: Any) -> _LocalMask:
        captures = tuple(tree_map(_replicated, captures))
        block_mask = tuple(tree_map(_replicated, block_mask[:-1])) + block_mask[-1:]
        mesh = context_ops.mesh_arguments(layout.mesh)
        of_batch, of_heads, of_sequence = (layout.mesh_dims(dim) for dim in (BATCH, HEADS, SEQUENCE))
        handle = find_handle(block_mask[-1], captures) if isinstance(block_mask[-1], fx.GraphModule) else None
        if of_sequence:
            if handle is None:
                raise ValueError(
                    f"block_mask: the sequence is sharded (query has placements {q.placements}), so the mask must be a "
                    "ContextParallel's block_mask"
                )
            if not entry_checks.serving():
                raise RuntimeError(
                    "flex_attention over a sharded sequence needs our kernels: call magi_flex.enable(), or compile "
                    'with backend="magi_flex"'
                )
            local = torch.ops.magi_flex.localize_handle(
                captures[handle], *q.shape[:2], *mesh, of_batch, of_heads, of_sequence
            )
            return _LocalMask(block_mask, (*captures[:handle], local, *captures[handle + 1 :]))
        if handle is not None:
            raise ValueError(
                f"query: has placements {q.placements}, but the mask is a ContextParallel's; shard the sequence with "
                "ContextParallel.shard"
            )
        if not (of_batch or of_heads):
            return _LocalMask(block_mask, captures)
        offsets = tuple(
            torch.ops.magi_flex.shard_offset(q._local_tensor, q.shape[dim], *mesh, dims)
            for dim, dims in ((BATCH, of_batch), (HEADS, of_heads))
        )
        lists = BlockMaskArgs.of(block_mask).kv_num_blocks
        for dim in (BATCH, HEADS):
            if lists.shape[dim] > 1:
                index = torch.arange(q._local_tensor.shape[dim], device=lists.device) + offsets[dim]
                block_mask = tuple(
                    x.index_select(dim, index) if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[dim] > 1 else x
                    for x in block_mask
                )
        block_mask = (*block_mask[:-1], _with_offsets(block_mask[-1], 0, offsets))
        return _LocalMask(block_mask, captures, offsets)


def _with_offsets(mod: Any, scalars_before: int, offsets: tuple[Tensor, ...], is_joint: bool = False) -> Any:
    """``mod`` on local batch and head indices: two more captures, which are added to b and h.

    Args:
        scalars_before: arguments before b and h.
        is_joint: a joint graph, which also returns a gradient for each capture.
    """
    if not offsets:
        return mod
    if not isinstance(mod, fx.GraphModule):
        raise ValueError("score_mod, block_mask: a mod that is called directly (for debugging) cannot be sharded")
    graph = fx.Graph()
    inputs = [node for node in mod.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in inputs}
    for name, node in zip(("b_offset", "h_offset"), inputs[scalars_before : scalars_before + 2], strict=True):
        values[node] = graph.call_function(torch.ops.aten.add.Tensor, (values[node], graph.placeholder(name)))
    # placeholders come first
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        last.append(node)
    result = graph.graph_copy(mod.graph, values)
    graph.output([*result, None, None] if is_joint else result)  # type: ignore[misc]
    return fx.GraphModule(mod, graph)


# ---- the rules ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LocalCall:
    """What the forward and the backward operator have in common, on the local parts.

    Attributes:
        operands: q, k, v.
        rest: the arguments after the mods: block mask, scale, kernel options, captures.
        offsets: see :class:`_LocalMask`.
    """

    layout: Layout
    operands: tuple[Tensor, Tensor, Tensor]
    rest: tuple[Any, ...]
    offsets: tuple[Tensor, ...]

    @staticmethod
    def of(
        q: DTensor,
        k: DTensor,
        v: DTensor,
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: dict[str, Any],
        score_captures: Any,
        mask_captures: Any,
    ) -> _LocalCall:
        layout = Layout.of(q, k, v)
        q = _laid_out(q, layout.q)
        mask = _LocalMask.of(layout, q, block_mask, mask_captures)
        score_captures = tuple(tree_map(_replicated, score_captures))
        rest = (
            *(mask.block_mask, scale, kernel_options),
            *((*score_captures, *mask.offsets), (*mask.captures, *mask.offsets)),
        )
        local_q = q._local_tensor
        if type(local_q) is Tensor and any(x.requires_grad for x in (q, k, v)):
            local_q = local_q.detach().requires_grad_()  # an uncompiled forward asks whether a backward will follow
        return _LocalCall(layout, (local_q, _local(k, layout.k), _local(v, layout.k)), rest, mask.offsets)


def _forward(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_captures: Any = (),
    mask_captures: Any = (),
) -> tuple[DTensor, DTensor, DTensor]:
    call = _LocalCall.of(q, k, v, block_mask, scale, kernel_options, score_captures, mask_captures)
    layout = call.layout
    results = FORWARD_HOP(*call.operands, _with_offsets(score_mod, 1, call.offsets), *call.rest)
    shapes = ((*q.shape[:3], v.shape[3]), q.shape[:3], q.shape[:3])
    return tuple(  # type: ignore[return-value]
        # without max scores FlexAttention gives an empty tensor
        _wrap(x, layout, layout.q if x.dim() else [Replicate()] * layout.mesh.ndim, shape if x.dim() else (), like)
        for x, shape, like in zip(results, shapes, (q, None, None), strict=True)
    )


def _laid_out(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    return x if tuple(x.placements) == placements else x.redistribute(placements=placements)


def _backward(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    out: DTensor,
    lse: DTensor,
    d_out: Any,
    d_lse: Any,
    fw_graph: Any,
    joint_graph: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_captures: Any = (),
    mask_captures: Any = (),
) -> tuple[Any, ...]:
    call = _LocalCall.of(q, k, v, block_mask, scale, kernel_options, score_captures, mask_captures)
    layout = call.layout
    results = BACKWARD_HOP(
        *call.operands,
        *(_local(x, layout.q) for x in (out, lse, d_out, d_lse)),
        _with_offsets(fw_graph, 1, call.offsets),
        _with_offsets(joint_graph, 1, call.offsets, is_joint=True),
        *call.rest,
    )
    dq, dk, dv, captured = *results[:3], results[CAPTURED_GRADS]
    grads = [
        _laid_out(_wrap(grad, layout, placements, like.shape, like), tuple(like.placements))
        for grad, placements, like in ((dq, layout.q, q), (dk, layout.dk, k), (dv, layout.dk, v))
    ]
    captured = tuple(captured)[: len(captured) - len(call.offsets)]
    of_captures = tuple(
        _captured_grad(grad, capture, layout) for grad, capture in zip(captured, score_captures, strict=False)
    )
    return (*grads, of_captures)


def _captured_grad(grad: Any, capture: Any, layout: Layout) -> Any:
    """Summed over the ranks that hold other batch entries or heads, laid out as the capture is."""
    if not isinstance(grad, Tensor):
        return grad
    whole = _wrap(grad, layout, layout.captured_grad(), grad.shape)
    replicated = tuple([Replicate()] * layout.mesh.ndim)
    if isinstance(capture, DTensor):
        return _laid_out(_laid_out(whole, replicated), tuple(capture.placements))
    return _laid_out(whole, replicated)._local_tensor
