"""From the arguments of FlexAttention's ops to what ours take (op_specs.py), or the reason why not.

Works on a graph's nodes (compiled) and on real tensors (eager) alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch.fx import GraphModule, Node

from inductor_lowering.score_analysis import recognise
from inductor_lowering.score_gradient import has_gradient_of
from inductor_lowering.score_select import Selection, split_selection
from inductor_lowering.sharded_masks import is_sharded
from inductor_lowering.tile_program import joint_program, score_program
from inductor_lowering.torch_compat import HopCall
from magi_flex.fx_program import FxProgram, UnsupportedProgram
from magi_flex.kernels import label_attention
from magi_flex.kernels.request import RequestFacts
from magi_flex.kernels.route import AUTO, call_facts, check_choice, route, stock_is_faster
from magi_flex.kernels.score_split import SCORE_ARGUMENTS, score_ops
from magi_flex.kernels.tile_plans import objection
from magi_flex.op_specs import MaskSpec, ScoreSpec, split_captures
from magi_flex.score_steps import step_types
from magi_flex.sharded_mask import find_handle

T = TypeVar("T")
STOCK = "stock"
WHOLE_SEQUENCE_BLOCK = 1 << 30  # FlexAttention's block size when there is no block mask
_CONSTANT_TRUE = {("aten::full", 1), ("aten::new_full", 2), ("aten::new_ones", None)}


class Stock(Exception):
    """The call is left to PyTorch; ``chosen``: because the caller asked for that."""

    def __init__(self, reason: str, chosen: bool = False):
        super().__init__(reason)
        self.chosen = chosen


def backend_choice(kernel_options: dict[str, Any], default: str) -> str:
    """The backend that a call asks for.  Raises Stock, or ValueError for an unknown name."""
    ours = kernel_options.get("magi_backend")
    stock = kernel_options.get("BACKEND", "AUTO")
    if kernel_options.get("FORCE_USE_FLEX_ATTENTION"):
        stock = "FORCE_USE_FLEX_ATTENTION"
    if ours == STOCK:
        raise Stock("kernel_options['magi_backend'] is 'stock'", chosen=True)
    if stock != "AUTO":
        if ours not in (None, default):
            raise ValueError(
                f"kernel_options: magi_backend={ours!r} and PyTorch's own choice {stock!r} contradict each other; "
                f"give one of them"
            )
        raise Stock(f"kernel_options ask for PyTorch's own kernel ({stock})", chosen=True)
    return check_choice(default if ours is None else ours, STOCK)


MaskInputs = tuple[MaskSpec, list[Any], list[Any]]  # with the tensors and ints that a MaskSpec describes
ScoreInputs = tuple[ScoreSpec, list[Any], list[Any]]


def translate(
    call: HopCall,
    mask_mod: GraphModule,
    score_mod: GraphModule,
    joint: GraphModule | None = None,
    needs_grad: tuple[bool, ...] = (),
) -> tuple[MaskInputs, ScoreInputs]:
    """What our ops take for the call's mask and score mod.

    A score mod that gives minus infinity outside of a condition makes that a part of the mask.

    Raises Stock for what cannot be translated.
    """
    mask = _program("mask_mod", FxProgram.from_graph, mask_mod)
    forward = _program("score_mod", score_program, score_mod)
    gradient = None if joint is None else _program("score_mod", joint_program, joint)
    handle = _once(mask_mod, "handle", lambda: find_handle(mask_mod, call.mask_captures))
    if handle is not None and not is_sharded(
        mask, [x.meta["val"] if isinstance(x, Node) else x for x in call.mask_captures]
    ):
        raise ValueError(
            "block_mask: combines the mask_mod of a ContextParallel with something else, which would be lost; "
            "combine the masks first and give the result to ContextParallel"
        )
    selection = None
    if handle is None:
        selection = _once(score_mod, "selection", lambda: split_selection(forward))
    if selection is not None and selection.reads_tables and _value(call.q).device.type != "cpu":
        selection = None  # reading out of bounds, at pairs that the mask leaves out, could not be caught
    order, tensors, ints = split_captures(call.score_captures)
    score: ScoreInputs = ScoreSpec(), [], []
    rest = forward if selection is None else selection.rest
    recipe = _once(score_mod, ("recipe", order, selection is None), lambda: recognise(rest, order))
    if recipe is not None and joint is not None and gradient is not None and not any(needs_grad):
        if not _once(joint, ("steps", order), lambda: has_gradient_of(recipe, gradient, order, selection)):
            recipe = None
    if forward.steps[-1] != ["return", {"node": 0}] or recipe is None or any(needs_grad):
        steps = None if recipe is None else json.dumps(recipe)
        backward = None if joint is None or gradient is None else _json(joint, gradient)
        score = ScoreSpec(_json(score_mod, forward), backward, order, needs_grad, steps), tensors, ints
    if handle is not None:
        return (MaskSpec(None, "t", sharded=True), [call.mask_captures[handle]], []), score
    return _mask_inputs(call, mask_mod, mask, selection), score


_facts: WeakKeyDictionary[GraphModule, dict[Hashable, Any]] = WeakKeyDictionary()


def _once(graph: GraphModule, what: Hashable, find: Callable[[], T]) -> T:
    """``find()``, once for each graph: eager calls bring the same ones again and again."""
    known = _facts.setdefault(graph, {})
    if what not in known:
        known[what] = find()
    return known[what]


def _program(name: str, make: Callable[[GraphModule], FxProgram], graph: GraphModule) -> FxProgram:
    try:
        return _once(graph, "program", lambda: make(graph))
    except UnsupportedProgram as error:
        raise Stock(f"{name}: {error}") from error


def _json(graph: GraphModule, program: FxProgram) -> str:
    return _once(graph, "json", program.to_json)


def _mask_inputs(call: HopCall, graph: GraphModule, program: FxProgram, selection: Selection | None) -> MaskInputs:
    args = call.block_mask
    lists = [] if _visits_everything(call) else [args.kv_num_blocks, args.kv_indices]
    if lists and args.full_kv_num_blocks is not None:
        lists += [args.full_kv_num_blocks, args.full_kv_indices]
    always_true = _is_always_true(program)
    order, tensors, ints = split_captures(() if always_true else call.mask_captures)
    spec = MaskSpec(None if always_true else _json(graph, program), order, bool(lists), len(lists) == 4)
    tensors, ints = [*lists, *tensors], [*([args.q_block, args.kv_block] if lists else []), *ints]
    if selection is not None:
        order, more_tensors, more_ints = split_captures([call.score_captures[i] for i in selection.captures])
        spec = replace(spec, selection=selection.condition.to_json(), selection_order=order)
        tensors, ints = [*tensors, *more_tensors], [*ints, *more_ints]
    return spec, tensors, ints


def refuse_stock_for_sharded(call: HopCall, mask_mod: Any, reason: Stock) -> None:
    """PyTorch's own kernels know nothing of other ranks, so such a call cannot be left to them."""
    if isinstance(mask_mod, GraphModule) and find_handle(mask_mod, call.mask_captures) is not None:
        raise RuntimeError(f"flex_attention over a sharded sequence cannot be left to PyTorch: {reason}")


def leave_to_faster_stock(
    call: HopCall, mask: MaskSpec, score: ScoreSpec, backend: str, needs_backward: bool, score_grads: bool
) -> None:
    """Raises Stock where PyTorch compiles a faster kernel than any of ours that serves the call.

    Looks at nothing that forward and backward of one call could see differently, so that both go the same way.
    """
    facts = _graph_facts(call, score, needs_backward, score_grads)
    if backend != AUTO or mask.sharded or facts is None:
        return
    reason = stock_is_faster(facts)
    if reason is not None:
        raise Stock(f"its kernel is faster than those of ours that serve the call ({reason})", chosen=True)


def _graph_facts(call: HopCall, score: ScoreSpec, needs_backward: bool, score_grads: bool) -> RequestFacts | None:
    """What routing may look at, as far as a graph tells; None where head dims are not known."""
    q, k, v = (x.meta["val"] for x in (call.q, call.k, call.v))
    if not all(isinstance(x.shape[3], int) for x in (q, v)):
        return None
    steps: tuple[type, ...] | None = ()
    ops: frozenset[str] = frozenset()
    if score.forward is not None:
        steps = None if score.recipe is None else step_types(json.loads(score.recipe))
        if steps is None:
            ops = score_ops(FxProgram.from_json(score.forward), SCORE_ARGUMENTS)
    return call_facts(
        q.device,
        (q.dtype, k.dtype, v.dtype),
        (q.shape[3], v.shape[3]),
        None,
        steps,
        needs_backward=needs_backward,
        score_grads=score_grads,  # bit tiles are known only when the plan is made
        max_score=call.wants_max_score,
        score_ops=ops,
    )


def in_cuda_graph(call: HopCall, score: ScoreSpec, backend: str, needs_backward: bool, score_grads: bool) -> bool:
    """Whether Inductor will capture this call in a CUDA graph, and plan and kernel can be made without the host.

    Looks at nothing that forward and backward of one call could see differently.
    """
    facts = _graph_facts(call, score, needs_backward, score_grads)
    if not inductor_config.triton.cudagraphs or facts is None or objection(facts.device, has_bit_tiles=False):
        return False
    try:
        return route(facts, backend).never_waits
    except ValueError:  # the chosen backend does not serve the call, which it says when it runs
        return False


def serves_labels(call: HopCall, score: ScoreSpec, needs_backward: bool, score_grads: bool) -> bool:
    """Whether a mask by labels can stay in the CUDA graph: whatever the labels are, the graph's kernels serve them."""
    facts = _graph_facts(call, score, needs_backward, score_grads)
    return facts is not None and not label_attention.objections(facts)


def _value(x: Any) -> Any:
    """What a node computes, as a fake; anything else is its own value."""
    return x.meta["val"] if isinstance(x, Node) else x


def _is_always_true(program: FxProgram) -> bool:
    """Whether the mask_mod is FlexAttention's noop_mask, or returns a constant true in another way."""
    returned = program.steps[-1][1]
    step = program.steps[returned["node"]] if isinstance(returned, dict) and "node" in returned else [None]
    if step[0] != "call":
        return False
    return any(
        step[1] == name and (position is None or step[3][position] in (True, 1)) for name, position in _CONSTANT_TRUE
    )


def _visits_everything(call: HopCall) -> bool:
    """Whether the lists are those that FlexAttention makes up when there is no block mask: one block of any length."""
    args = call.block_mask
    sizes = (args.q_block, args.kv_block)
    if not all(isinstance(size, int) and size >= WHOLE_SEQUENCE_BLOCK for size in sizes):
        return False
    return _is_one_number(args.kv_num_blocks, 1) and _is_one_number(args.kv_indices, 0)


def _is_one_number(x: Any, number: int) -> bool:
    """Whether ``x`` is known to hold only ``number``."""
    if isinstance(x, Node):
        return x.target is torch.ops.aten.full.default and x.args[1] == number
    return isinstance(x, Tensor) and x.numel() == 1 and int(x) == number
