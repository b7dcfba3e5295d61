"""flex_attention called without torch.compile: the dense math of FlexAttention's ops is replaced by our kernels.

FlexAttention itself captures the mods as graphs and handles autograd; what is replaced is the implementation of the
forward and the backward op below that.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._pytree import tree_leaves

from inductor_lowering.tile_program import JOINT_SCALARS, SCORE_SCALARS
from inductor_lowering.torch_compat import BACKWARD_HOP, FORWARD_HOP, HopCall, item_access_as_index, tracing_alone
from inductor_lowering.translate import MaskInputs, Stock, backend_choice, refuse_stock_for_sharded, translate
from magi_flex import ops, plan_memo
from magi_flex.kernels.cuda_driver import stream_of
from magi_flex.kernels.layout import fill_order
from magi_flex.kernels.request import ScoreProgram
from magi_flex.kernels.route import AUTO
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import BuiltMask, MaskSpec, ScoreSpec
from magi_flex.remember import remembered
from magi_flex.score_steps import Sizes

logger = logging.getLogger("magi_flex")

_KEY = DispatchKey.CompositeExplicitAutograd
_stock_forward = FORWARD_HOP.py_kernels[_KEY]
_stock_backward = BACKWARD_HOP.py_kernels[_KEY]
_stock_differentiated_backward = BACKWARD_HOP.py_kernels[DispatchKey.Autograd]
_backend = AUTO
MASK_SCALARS = 4  # b, h, q, k

# Functions of single elements that are one op in an eager graph and that no tag says are elementwise.
_aten = torch.ops.aten
_DECOMPOSITIONS: dict[Any, Any] = get_decompositions(
    [
        *(_aten.log_sigmoid_forward, _aten.hardswish, _aten._prelu_kernel),
        *(_aten.log_sigmoid_backward, _aten.hardswish_backward, _aten._prelu_kernel_backward, _aten.mish_backward),
        *(_aten.softplus_backward, _aten.hardtanh_backward, _aten.leaky_relu_backward, _aten.elu_backward),
        _aten.hardsigmoid_backward,
    ]
)


def install(backend: str | None) -> None:
    """Let eager calls use ``backend``, or PyTorch's own math if None."""
    global _backend
    _backend = backend or AUTO
    for hop, key, ours, stock in (
        (FORWARD_HOP, _KEY, _forward, _stock_forward),
        (BACKWARD_HOP, _KEY, _backward, _stock_backward),
        (BACKWARD_HOP, DispatchKey.Autograd, _differentiated_backward, _stock_differentiated_backward),
    ):
        hop.py_kernels[key] = stock if backend is None else ours
        hop._dispatch_cache.clear()


@torch._dynamo.disable
def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = HopCall.of_forward(args)
    try:
        backend = backend_choice(call.kernel_options, _backend)
        mask_inputs, (score, *score_inputs) = translate(call, _mask_graph(call), _score_graph(call))
    except Stock as reason:
        return _leave(_stock_forward, call, args, reason)
    mask, tensors, _ = mask_inputs
    needs_backward = any(isinstance(x, Tensor) and x.requires_grad for x in (*args[:3], *call.score_captures))
    settings = (call.scale, backend, needs_backward, fill_order(call.q))
    built = None if mask.sharded else _shared_mask(call, mask_inputs)
    where, program = _prepared(call, built, tensors, score, score_inputs)
    run = ops.runner_of(mask).run_forward
    out, lse, max_score = run(call.q, call.k, call.v, where, program, *settings, call.wants_max_score)
    if needs_backward and built is not None:
        plan_memo.remember(_key_of_plan(lse, mask, call), lse, built)
    return out, lse, max_score


@torch._dynamo.disable
def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    call = HopCall.of_backward(args)
    needs_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in call.score_captures)
    try:
        backend = backend_choice(call.kernel_options, _backend)
        graphs = (_mask_graph(call), _score_graph(call), _joint_graph(call))
        mask_inputs, (score, *score_inputs) = translate(call, *graphs, needs_grad)
    except Stock as reason:
        return _leave(_stock_backward, call, args, reason)
    mask, tensors, _ = mask_inputs
    given = (call.q, call.k, call.v, call.out, call.lse, call.d_out, call.d_lse)
    settings = (call.scale, backend, fill_order(call.q), fill_order(call.k), fill_order(call.v))
    built = None
    if not mask.sharded:
        key = _key_of_plan(call.lse, mask, call)
        built = plan_memo.recall(key, lambda: _shared_mask(call, mask_inputs))
    where, program = _prepared(call, built, tensors, score, score_inputs)
    dq, dk, dv, wanted = ops.runner_of(mask).run_backward(*given, where, program, *settings)
    remaining = iter(wanted)
    return dq, dk, dv, tuple(next(remaining) if needed else None for needed in needs_grad)


class _NotTwice(torch.autograd.Function):
    """The first ``count`` tensors, whose gradients with respect to the others are an error that says so."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(
            "flex_attention: double backward (gradients of its gradients) is not implemented; detach the first "
            "gradients, or write the attention with torch.softmax where second derivatives are needed"
        )


def _differentiated_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """The backward as autograd calls it: with ``create_graph`` its results know that they depend on the inputs."""
    with torch._C._AutoDispatchBelowAutograd():
        dq, dk, dv, captured = BACKWARD_HOP(*args)
    inputs = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.requires_grad]
    if not torch.is_grad_enabled() or not inputs:
        return dq, dk, dv, captured
    found = [x for x in (dq, dk, dv, *captured) if x is not None]
    marked = iter(_NotTwice.apply(len(found), *found, *inputs))
    return next(marked), next(marked), next(marked), tuple(None if x is None else next(marked) for x in captured)


def _leave(stock: Any, call: HopCall, args: Sequence[Any], reason: Stock) -> Any:
    refuse_stock_for_sharded(call, call.block_mask.mask_mod, reason)
    logger.log(logging.INFO if reason.chosen else logging.WARNING, "flex_attention is left to PyTorch: %s", reason)
    return stock(*args)


def _prepared(
    call: HopCall, built: BuiltMask | None, tensors: Sequence[Any], score: ScoreSpec, inputs: Sequence[Any]
) -> tuple[MaskPlan | Tensor, ScoreProgram]:
    """Plan, or the handle of a sharded mask's plans, and score program."""
    if built is None:  # the mod sees indices of the whole sequence
        return tensors[0], score.build(*inputs, None, call.q.device)
    return built.plan, score.build(*inputs, _sizes(call), call.q.device, built.selected)


def _sizes(call: HopCall) -> Sizes:
    return call.q.shape[0], call.q.shape[1], call.q.shape[2], call.k.shape[2]


def _shared_mask(call: HopCall, inputs: MaskInputs) -> BuiltMask:
    """The mask's plan, one for all layers of a model that use the mask."""
    mask, tensors, ints = inputs
    return mask.shared(tensors, ints, _sizes(call), call.q.device)


def _key_of_plan(lse: Tensor, mask: MaskSpec, call: HopCall) -> Hashable:
    """Of the plan that the backward of the call with this ``lse`` finds again."""
    return plan_memo.storage_key(lse), mask, _sizes(call), stream_of(lse.device)


# ---- graphs ---------------------------------------------------------------------------------------------------------

_MOST_KINDS = 64  # of captures, whose graphs a mod keeps
_traced: WeakKeyDictionary[GraphModule, dict[Hashable, GraphModule]] = WeakKeyDictionary()


def _mask_graph(call: HopCall) -> GraphModule:
    return _aten_graph(call.block_mask.mask_mod, MASK_SCALARS, call.mask_captures, call.q)


def _score_graph(call: HopCall) -> GraphModule:
    return _aten_graph(call.score_mod, SCORE_SCALARS, call.score_captures, call.q)


def _joint_graph(call: HopCall) -> GraphModule:
    """The joint graph without what only autograd's formulas hold: in-place ops (clamp, maximum) and fused ops."""
    joint = call.joint_graph
    ops = [node.target for node in joint.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    if not any(op._schema.is_mutable or op in _DECOMPOSITIONS for op in ops):
        return joint
    return _aten_graph(joint, JOINT_SCALARS, call.score_captures, call.q, functionalize(joint))


def _aten_graph(mod: Any, scalars: int, captures: Sequence[Any], q: Tensor, function: Any = None) -> GraphModule:
    """The mod's graph in aten ops; the graph that Dynamo captured is traced once for each kind of captures.

    ``function``: what to trace in place of ``mod`` itself.
    """
    if not isinstance(mod, GraphModule):
        raise Stock("the mod is called directly, for debugging", chosen=True)
    scores = () if scalars == MASK_SCALARS else (0, JOINT_SCALARS - 1)
    known = _traced.setdefault(mod, {})
    key = (scalars, q.dtype, q.device, tuple((x.shape, x.dtype) if isinstance(x, Tensor) else int for x in captures))
    example = [q.new_zeros((), dtype=q.dtype if i in scores else torch.int32) for i in range(scalars)]
    detached = [x.detach() if isinstance(x, Tensor) else x for x in captures]
    trace = functools.partial(_trace, function or mod, [*example, *detached])
    try:
        return remembered(known, key, functools.partial(trace, symbolic=True), _MOST_KINDS)
    except GuardOnDataDependentSymNode:  # what the mod does depends on the value of a captured int
        key = (*key, tuple(x for x in captures if not isinstance(x, Tensor)))
        return remembered(known, key, functools.partial(trace, symbolic=False), _MOST_KINDS)


def _trace(function: Any, args: Sequence[Any], symbolic: bool) -> GraphModule:
    """``symbolic``: the graph is for any values of the ints."""
    shapes = ShapeEnv()
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    with shapes.ignore_fresh_unbacked_symbols():
        stand_ins = [
            fake.from_tensor(x, static_shapes=True)
            if isinstance(x, Tensor)
            else shapes.create_unbacked_symint()
            if symbolic
            else x
            for x in args
        ]
    with tracing_alone(), torch.no_grad(), fake, item_access_as_index():
        return make_fx(function, _DECOMPOSITIONS, tracing_mode="real", _allow_non_fake_inputs=True)(*stand_ins)
