"""Everything that depends on torch's private interfaces or differs between its versions (2.11 to 2.14)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

FORWARD_HOP = torch.ops.higher_order.flex_attention
BACKWARD_HOP = torch.ops.higher_order.flex_attention_backward

LSE, MAX_SCORE = 1, 2  # positions in the forward's result
CAPTURED_GRADS = 3  # position in the backward's result


@dataclass(frozen=True)
class BlockMaskArgs:
    """The parts of a BlockMask's tuple that a kernel over key lists needs.

    The tuple has 13 items in torch 2.11 and 17 from 2.13, so it is read from both ends.
    """

    kv_num_blocks: Any
    kv_indices: Any
    full_kv_num_blocks: Any
    full_kv_indices: Any
    q_block: Any
    kv_block: Any
    mask_mod: Any

    @staticmethod
    def of(block_mask: Sequence[Any]) -> BlockMaskArgs:
        return BlockMaskArgs(*block_mask[2:6], *block_mask[-3:])


@dataclass(frozen=True)
class HopCall:
    """Arguments of either op by name; ``out`` to ``joint_graph`` are the backward's (None in the forward)."""

    q: Any
    k: Any
    v: Any
    score_mod: Any
    block_mask: BlockMaskArgs
    scale: Any
    kernel_options: dict[str, Any]
    score_captures: tuple[Any, ...]
    mask_captures: tuple[Any, ...]
    out: Any = None
    lse: Any = None
    d_out: Any = None
    d_lse: Any = None
    joint_graph: Any = None

    @property
    def wants_max_score(self) -> bool:
        """Whether the caller asked for the largest scores; a direct call of the op does not say, so it may."""
        return bool(self.kernel_options.get("OUTPUT_MAX", True))

    @staticmethod
    def of_forward(args: Sequence[Any]) -> HopCall:
        q, k, v, score_mod, block_mask, scale, options, *captures = args
        score_captures, mask_captures = (*captures, (), ())[:2]
        return HopCall(
            q,
            k,
            v,
            score_mod,
            BlockMaskArgs.of(block_mask),
            scale,
            options,
            tuple(score_captures),
            tuple(mask_captures),
        )

    @staticmethod
    def of_backward(args: Sequence[Any]) -> HopCall:
        q, k, v, out, lse, d_out, d_lse, fw_graph, joint_graph, block_mask, scale, options, *captures = args
        score_captures, mask_captures = (*captures, (), ())[:2]
        return HopCall(
            q,
            k,
            v,
            fw_graph,
            BlockMaskArgs.of(block_mask),
            scale,
            options,
            tuple(score_captures),
            tuple(mask_captures),
            out,
            lse,
            d_out,
            d_lse,
            joint_graph,
        )

    @staticmethod
    def of_node(node: Node) -> HopCall:
        return (HopCall.of_forward if node.target is FORWARD_HOP else HopCall.of_backward)(node.args)


def custom_passes(config_value: Any) -> tuple[Callable[..., Any], ...]:
    """The passes that an Inductor option holds: none, one, or (from 2.13) several."""
    if config_value is None:
        return ()
    return tuple(config_value) if isinstance(config_value, (list, tuple)) else (config_value,)


def register_dynamo_backend(name: str, compiler: Callable[..., Any]) -> None:
    """Make ``torch.compile(backend=name)`` work where the package's metadata (its entry point) is not installed."""
    from torch._dynamo.backends import registry

    if name not in registry._COMPILER_FNS:
        registry.register_backend(compiler, name=name)


def current_compiler() -> Callable[..., Any] | None:
    """The backend that Dynamo is tracing for, None outside of a trace."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        compiler = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None
    while True:  # torch.compile and Dynamo's debugging aids wrap the function that was given
        inner = getattr(compiler, "compiler_fn", None) or getattr(compiler, "_torchdynamo_orig_backend", None)
        if inner is None:
            return compiler
        compiler = inner


def item_access_as_index() -> Any:
    """Context in which ``table[h, q]`` with 0-d index tensors is one index op, as FlexAttention traces mods."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


@contextmanager
def tracing_alone() -> Iterator[None]:
    """Context of a trace by make_fx outside of Dynamo, while other threads may trace, compile or call.

    FX keeps its state in globals.  Dynamo's lock lets one thread at a time trace, and its flag keeps calls of compiled
    functions on other threads from being taken for part of the trace.
    """
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def rank_identity() -> tuple[Any, ...]:
    """What tells this rank's graphs from those of other ranks, and of this rank in other runs.

    Graphs over DTensors hold the names of process groups and sizes that depend on the rank.  The keys of AOTAutograd's
    cache do not (pytorch/pytorch issue 188390): ranks that share a warm cache ran each other's graphs.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ()
    return dist.get_rank(), *sorted(dist.distributed_c10d._world.pg_names.values())
