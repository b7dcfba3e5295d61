"""The pass over Inductor's joint graph that replaces FlexAttention's ops by ours.

It sees the forward and the backward of all layers in one graph, before they are partitioned, so it can insert one plan
op for each distinct mask, which all of them share.  A call that cannot be translated stays as it is and takes
Inductor's own lowering; the reason is logged.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

import magi_flex.ops
from inductor_lowering.torch_compat import (
    BACKWARD_HOP,
    CAPTURED_GRADS,
    FORWARD_HOP,
    LSE,
    MAX_SCORE,
    HopCall,
    rank_identity,
)
from inductor_lowering.translate import (
    MaskInputs,
    ScoreInputs,
    Stock,
    backend_choice,
    in_cuda_graph,
    leave_to_faster_stock,
    refuse_stock_for_sharded,
    serves_labels,
    translate,
)
from magi_flex.kernels.layout import dense_order
from magi_flex.kernels.tile_plans import builder_choice
from magi_flex.op_specs import CallSpec, MaskSpec

logger = logging.getLogger("magi_flex")


class JointPass(CustomGraphPass):
    """Runs the passes that were set before it, then replaces FlexAttention's ops.

    Args:
        backend: "auto" or the name of the backend for calls that choose none.
        before: passes that the user had set.
        source_hash: what to put into Inductor's cache key, see :meth:`uuid`.
    """

    def __init__(self, backend: str, before: Sequence[Any], source_hash: str):
        self.backend = backend
        self.before = tuple(before)
        self.source_hash = source_hash

    def uuid(self) -> Any | None:
        """Part of Inductor's cache key: without it a cached stock graph would be taken for ours, and the reverse.

        None (no caching) if a pass before this one has no identity itself, as Inductor does for such a pass.
        """
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        if any(x is None for x in ids):
            return None
        return ("magi_flex", self.source_hash, self.backend, builder_choice(), torch.__version__, rank_identity(), *ids)

    def __call__(self, graph: Graph) -> None:
        for earlier in self.before:
            earlier(graph)
        calls = [node for node in graph.nodes if node.target in (FORWARD_HOP, BACKWARD_HOP)]
        if calls:
            _Rewriter(graph, self.backend).rewrite(calls)


class _Rewriter:
    def __init__(self, graph: Graph, backend: str):
        self.graph = graph
        self.backend = backend
        module = graph.owning_module
        assert module is not None
        self.module: GraphModule = module
        self.handles: dict[Any, Node] = {}
        self.intervals: dict[Any, tuple[list[Node], list[int]] | None] = {}
        self.sizes: dict[Any, Node] = {}

    def rewrite(self, calls: list[Node]) -> None:
        backward_of = {}
        for node in calls:
            if node.target is BACKWARD_HOP and _is_getitem(lse := HopCall.of_node(node).lse):
                backward_of[lse.args[0]] = node
        score_grads = {node: any(_captured_gradients(node).values()) for node in backward_of.values()}
        for node in calls:
            try:
                if node.target is FORWARD_HOP:
                    backward = backward_of.get(node)
                    self._forward(node, backward is not None, score_grads.get(backward, False))
                else:
                    self._backward(node)
            except Stock as reason:
                self._leave(node, reason)

    def _leave(self, node: Node, reason: Stock) -> None:
        call = HopCall.of_node(node)
        refuse_stock_for_sharded(call, self._submodule(call.block_mask.mask_mod), reason)
        device = call.q.meta["val"].device
        wanted = "a backward pass" if node.target is BACKWARD_HOP else "the largest scores"
        if device.type == "cpu" and (node.target is BACKWARD_HOP or call.kernel_options.get("OUTPUT_MAX")):
            raise RuntimeError(
                f"flex_attention: {wanted} on a CPU is more than PyTorch itself can compile, and magi_flex cannot take "
                f"this call ({reason})"
            )
        logger.log(logging.INFO if reason.chosen else logging.WARNING, "%s is left to PyTorch: %s", node.target, reason)
        position = 6 if node.target is FORWARD_HOP else 11
        options = {k: v for k, v in call.kernel_options.items() if k != "magi_backend"}
        node.update_arg(position, options)

    # ---- the two ops --------------------------------------------------------------------------------------------

    def _forward(self, node: Node, needs_backward: bool, score_grads: bool) -> None:
        call = HopCall.of_node(node)
        backend = backend_choice(call.kernel_options, self.backend)
        mask, score = translate(call, self._submodule(call.block_mask.mask_mod), self._submodule(call.score_mod))
        leave_to_faster_stock(call, mask[0], score[0], backend, needs_backward, score_grads)
        out, lse, max_score = node.meta["val"]
        wide = magi_flex.ops.stats_dtype(out.dtype)
        with self.graph.inserting_before(node):
            kind, inputs = self._inputs(node, call, mask, score, backend, needs_backward, score_grads)
            op = getattr(torch.ops.magi_flex, f"{kind}attention").default
            settings = CallSpec(score[0], backend, (tuple(dense_order(out)),), needs_backward, call.wants_max_score)
            new = self.graph.call_function(op, (call.q, call.k, call.v, *inputs, settings.to_json(), call.scale))
        new.meta = {**node.meta, "val": (out, lse.to(wide), max_score.to(wide))}
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        if wide != lse.dtype:
            self._narrow_stats(new)

    def _narrow_stats(self, forward: Node) -> None:
        """FlexAttention promises float32 statistics in a compiled graph; our backward takes the wide ones."""
        for stat in list(forward.users):
            if not _is_getitem(stat) or stat.args[1] not in (LSE, MAX_SCORE):
                continue
            stat.meta["val"] = forward.meta["val"][stat.args[1]]
            users = [user for user in stat.users if user.target is not BACKWARD_HOP]
            with self.graph.inserting_after(stat):
                narrow = self.graph.call_function(torch.ops.prims.convert_element_type.default, (stat, torch.float32))
            narrow.meta = {**stat.meta, "val": stat.meta["val"].to(torch.float32)}
            for user in users:
                user.replace_input_with(stat, narrow)

    def _backward(self, node: Node) -> None:
        call = HopCall.of_node(node)
        backend = backend_choice(call.kernel_options, self.backend)
        slots = _captured_gradients(node)
        needs_grad = tuple(bool(slots.get(i)) for i in range(len(call.score_captures)))
        graphs = (self._submodule(x) for x in (call.block_mask.mask_mod, call.score_mod, call.joint_graph))
        mask, score = translate(call, *graphs, needs_grad)
        leave_to_faster_stock(call, mask[0], score[0], backend, True, any(needs_grad))
        dq, dk, dv, captured = node.meta["val"]
        given = (call.q, call.k, call.v, call.out, call.lse, call.d_out, call.d_lse)
        with self.graph.inserting_before(node):
            kind, inputs = self._inputs(node, call, mask, score, backend, True, any(needs_grad))
            op = getattr(torch.ops.magi_flex, f"{kind}attention_backward").default
            settings = CallSpec(score[0], backend, tuple(tuple(dense_order(x)) for x in (dq, dk, dv)))
            new = self.graph.call_function(op, (*given, *inputs, settings.to_json(), call.scale))
        wanted = [i for i, needed in enumerate(needs_grad) if needed]
        new.meta = {**node.meta, "val": (dq, dk, dv, [captured[i] for i in wanted])}
        for i, users in slots.items():
            for user in users:
                user.update_arg(1, wanted.index(i))
        for outer in [u for u in node.users if u.args[1] == CAPTURED_GRADS]:
            for unused in [u for u in outer.users if not u.users]:
                self.graph.erase_node(unused)
            outer.meta["val"] = new.meta["val"][CAPTURED_GRADS]
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    # ---- plans --------------------------------------------------------------------------------------------------

    def _inputs(
        self,
        anchor: Node,
        call: HopCall,
        mask: MaskInputs,
        score: ScoreInputs,
        backend: str,
        needs_backward: bool,
        score_grads: bool,
    ) -> tuple[str, tuple[Any, ...]]:
        """Which of the ops, by the beginning of their names, and what they take for the call's mods.

        A plan's op is inserted at the graph's insertion point, unless there is one for this mask.
        """
        (mask_spec, mask_tensors, mask_ints), (score_spec, score_tensors, score_ints) = mask, score
        if in_cuda_graph(call, score_spec, backend, needs_backward, score_grads):
            labels = serves_labels(call, score_spec, needs_backward, score_grads)
            plan = self._intervals(anchor, call, *mask, labels)
            if plan is not None:
                return "planned_", (*plan, score_tensors, score_ints)
        handle = self._handle(anchor, call, *mask)
        both = [*mask_tensors, *score_tensors], [*mask_ints, *score_ints]
        return "sharded_" if mask_spec.sharded else "", (handle, *both, mask_spec.to_json())

    def _handle(self, anchor: Node, call: HopCall, mask: MaskSpec, tensors: list[Node], ints: list[Any]) -> Node | None:
        """The handle of a mask's plan; None where there is none."""
        if mask.is_full or mask.sharded:
            return None
        q, k = call.q.meta["val"], call.k.meta["val"]
        lengths = [*(self._size(call.q, q, dim) for dim in range(3)), self._size(call.k, k, 2)]
        key = (mask, tuple(tensors), tuple(ints), tuple(lengths), q.device)
        if key not in self.handles:
            inputs = (tensors, ints, mask.to_json(), *lengths, q.device)
            handle = self.graph.call_function(torch.ops.magi_flex.plan_handle.default, inputs)
            with _fake_mode(q):
                handle.meta["val"] = torch.empty(1, dtype=torch.int64)
            _keep(handle, anchor)
            self.handles[key] = handle
        return self.handles[key]

    def _intervals(
        self, anchor: Node, call: HopCall, mask: MaskSpec, tensors: list[Node], ints: list[Any], labels: bool
    ) -> tuple[Any, ...] | None:
        """A plan that is all in tensors of the graph, and the block size; None where its size depends on data.

        ``labels``: whether a mask by labels may be such a plan.
        """
        if mask.is_full:
            return ([], [])
        q, k = call.q.meta["val"], call.k.meta["val"]
        sizes = (*q.shape[:3], k.shape[2])
        key = (mask, tuple(tensors), tuple(ints), sizes, q.device, labels)
        if key not in self.intervals:
            op, shapes = _planning_op(mask, [x.meta["val"] for x in tensors], ints, sizes, labels)
            if op is None:
                logger.info("the plan of a mask stays outside of the CUDA graph: its size depends on %s", shapes)
                self.intervals[key] = None
            else:
                whole = self.graph.call_function(op, (tensors, ints, mask.to_json(), *sizes, q.device))
                with _fake_mode(q):
                    values = [torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in shapes]
                whole.meta["val"] = values if op is torch.ops.magi_flex.plan_labels.default else tuple(values)
                parts = [self.graph.call_function(operator.getitem, (whole, i)) for i in range(len(values))]
                for part, value in zip(parts, values, strict=True):
                    part.meta["val"] = value
                for node in (whole, *parts):
                    _keep(node, anchor)
                self.intervals[key] = parts, list(ints[:2]) if mask.lists else []
        return self.intervals[key]

    def _size(self, node: Node, value: torch.Tensor, dim: int) -> int | Node:
        size = value.shape[dim]
        if isinstance(size, int):
            return size
        key = size.node.expr
        if key not in self.sizes:
            self.sizes[key] = self._symbol(size) or self._sym_size(node, size, dim)
        return self.sizes[key]

    def _symbol(self, size: torch.SymInt) -> Node | None:
        for node in self.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
                return node
        return None

    def _sym_size(self, node: Node, size: torch.SymInt, dim: int) -> Node:
        with self.graph.inserting_after(node):
            new = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
        new.meta["val"] = size
        return new

    def _submodule(self, node: Node) -> GraphModule:
        return getattr(self.module, node.target)


def _planning_op(
    mask: MaskSpec, tensors: Sequence[torch.Tensor], ints: Sequence[Any], sizes: Sequence[Any], labels: bool
) -> tuple[Any, Any]:
    """The op that makes a mask's plan without the host, and its results' (shape, dtype); or None and why not.

    ``tensors`` are fakes.
    """
    if any(isinstance(x, Node) for x in ints):
        return None, "a captured size that is not known"
    shape = mask.static_shape(tensors, ints, *sizes)
    if not isinstance(shape, str):
        return torch.ops.magi_flex.plan_intervals.default, magi_flex.ops.interval_tensors(shape, sizes[3])
    labelled = mask.labelled_shapes(tensors, ints, *sizes) if labels else shape
    if isinstance(labelled, str):
        return None, shape
    return torch.ops.magi_flex.plan_labels.default, magi_flex.ops.label_tensors(labelled)


def _keep(node: Node, anchor: Node) -> None:
    """Activation checkpointing must not make a plan again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for name in ("partitioner_tag", "stack_trace"):
        if name in anchor.meta:
            node.meta[name] = anchor.meta[name]


def _is_getitem(node: Any) -> bool:
    return isinstance(node, Node) and node.target is operator.getitem


def _captured_gradients(backward: Node) -> dict[int, list[Node]]:
    """For each capture of the score mod, the nodes that read its gradient and are used."""
    slots: dict[int, list[Node]] = {}
    for outer in backward.users:
        if outer.args[1] == CAPTURED_GRADS:
            for inner in outer.users:
                if inner.users:
                    slots.setdefault(inner.args[1], []).append(inner)
    return slots


def _fake_mode(value: torch.Tensor) -> Any:
    return value.fake_mode  # type: ignore[attr-defined]
