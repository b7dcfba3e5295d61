"""flex_attention called without torch.compile: the dense math of FlexAttention's ops is replaced by our kernels.

FlexAttention itself captures the mods as graphs and handles autograd; what is replaced is the implementation of the
forward and the backward op below that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_lowering.tile_program import JOINT_SCALARS, SCORE_SCALARS
from inductor_lowering.torch_compat import BACKWARD_HOP, FORWARD_HOP, HopCall, item_access_as_index
from inductor_lowering.translate import Stock, backend_choice, mask_spec, refuse_stock_for_sharded, score_spec
from magi_flex import ops, plan_memo
from magi_flex.kernels.layout import fill_order
from magi_flex.kernels.route import AUTO
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import MaskSpec
from magi_flex.score_steps import Sizes

logger = logging.getLogger("magi_flex")

_KEY = DispatchKey.CompositeExplicitAutograd
_stock_forward = FORWARD_HOP.py_kernels[_KEY]
_stock_backward = BACKWARD_HOP.py_kernels[_KEY]
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
    for hop, ours, stock in ((FORWARD_HOP, _forward, _stock_forward), (BACKWARD_HOP, _backward, _stock_backward)):
        hop.py_kernels[_KEY] = stock if backend is None else ours
        hop._dispatch_cache.clear()


@torch._dynamo.disable
def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = HopCall.of_forward(args)
    try:
        backend = backend_choice(call.kernel_options, _backend)
        mask, *mask_inputs = mask_spec(call, _mask_graph(call))
        score, *score_inputs = score_spec(call, _score_graph(call), None, ())
    except Stock as reason:
        return _leave(_stock_forward, call, args, reason)
    needs_backward = any(isinstance(x, Tensor) and x.requires_grad for x in (*args[:3], *call.score_captures))
    program = score.build(*score_inputs, _sizes(mask, call), call.q.device)
    settings = (program, call.scale, backend, needs_backward, fill_order(call.q))
    plan = mask_inputs[0][0] if mask.sharded else _build(mask, mask_inputs, call.q, call.k)
    out, lse, max_score = ops.runner_of(mask).run_forward(call.q, call.k, call.v, plan, *settings, call.wants_max_score)
    if needs_backward and not mask.sharded:
        plan_memo.remember(plan_memo.storage_key(lse), lse, _identity(mask, call), plan)
    return out, lse, max_score


@torch._dynamo.disable
def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    call = HopCall.of_backward(args)
    needs_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in call.score_captures)
    try:
        backend = backend_choice(call.kernel_options, _backend)
        mask, *mask_inputs = mask_spec(call, _mask_graph(call))
        score, *score_inputs = score_spec(call, _score_graph(call), _joint_graph(call), needs_grad)
    except Stock as reason:
        return _leave(_stock_backward, call, args, reason)
    given = (call.q, call.k, call.v, call.out, call.lse, call.d_out, call.d_lse)
    settings = (
        *(score.build(*score_inputs, _sizes(mask, call), call.q.device), call.scale, backend),
        *(fill_order(call.q), fill_order(call.k), fill_order(call.v)),
    )
    if mask.sharded:
        plan = mask_inputs[0][0]
    else:
        plan = plan_memo.recall(
            plan_memo.storage_key(call.lse), _identity(mask, call), lambda: _build(mask, mask_inputs, call.q, call.k)
        )
    dq, dk, dv, wanted = ops.runner_of(mask).run_backward(*given, plan, *settings)
    remaining = iter(wanted)
    return dq, dk, dv, tuple(next(remaining) if needed else None for needed in needs_grad)


def _leave(stock: Any, call: HopCall, args: Sequence[Any], reason: Stock) -> Any:
    refuse_stock_for_sharded(call, call.block_mask.mask_mod, reason)
    logger.log(logging.INFO if reason.chosen else logging.WARNING, "flex_attention is left to PyTorch: %s", reason)
    return stock(*args)


def _identity(mask: MaskSpec, call: HopCall) -> Any:
    return mask, call.q.shape[:3], call.k.shape[2]


def _sizes(mask: MaskSpec, call: HopCall) -> Sizes | None:
    """Bounds of the indices that a score mod sees; with a sharded sequence these are not the local lengths."""
    return None if mask.sharded else (call.q.shape[0], call.q.shape[1], call.q.shape[2], call.k.shape[2])


def _build(mask: MaskSpec, inputs: Sequence[Any], q: Tensor, k: Tensor) -> MaskPlan:
    return mask.build(*inputs, q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)


# ---- graphs ---------------------------------------------------------------------------------------------------------

_traced: WeakKeyDictionary[GraphModule, dict[Any, GraphModule]] = WeakKeyDictionary()


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
    kinds = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in captures)
    known = _traced.setdefault(mod, {})
    key = (scalars, q.dtype, q.device, kinds)
    if key not in known:
        example = [torch.zeros((), dtype=torch.int32, device=q.device) for _ in range(scalars)]
        if scalars != MASK_SCALARS:
            example[0] = q.new_zeros(())
        if scalars == JOINT_SCALARS:
            example[-1] = q.new_zeros(())
        detached = [x.detach() if isinstance(x, Tensor) else x for x in captures]
        with torch.no_grad(), item_access_as_index():
            trace = make_fx(function or mod, _DECOMPOSITIONS, tracing_mode="fake", _allow_non_fake_inputs=True)
            known[key] = trace(*example, *detached)
    return known[key]
