"""Recognising the mask_mod of a sequence that ranks share (magi_flex/sharded_mask.py), alone and not as a part.

Two programs are the same mask if they compute the same expression, as in canonical.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from inductor_lowering.canonical import example_of, expression, form
from inductor_lowering.torch_compat import item_access_as_index, tracing_alone
from magi_flex.bit_tiles import BitTiles
from magi_flex.canonical_mask import CanonicalMaskMod
from magi_flex.fx_program import FxProgram
from magi_flex.mask_plan import MaskPlanBuilder
from magi_flex.sharded_mask import HANDLE_SHAPE, ShardedMaskMod


def is_sharded(program: FxProgram, captures: Sequence[Any]) -> bool:
    """Whether ``program`` is a ShardedMaskMod and nothing more, so that its handle says all about it."""
    computed, used = expression(program)
    if len(used) not in (4, 5, 8, 9) or not all(isinstance(captures[i], Tensor) for i in used):
        return False
    one_order = len(used) in (4, 8)  # queries and keys share the tensor of their dispatch order
    # in order of use: handle, order of keys, starts, order of queries, ends
    starts, ends = captures[used[2]], captures[used[3 if one_order else 4]]
    found = form(computed, starts, ends, len(used) >= 8)
    return found is not None and computed == _template(*found, one_order)


@functools.lru_cache(maxsize=64)
def _template(one_batch: bool, one_head: bool, slots: int, searches: int, one_order: bool) -> tuple[Any, ...]:
    """The expression of a ShardedMaskMod over a CanonicalMaskMod of this form."""
    with _disable_current_modes():  # it may be asked for in the middle of a compilation
        example = example_of(one_batch, one_head, slots, searches)
        return _expression_of(example, one_order)


def _expression_of(example: CanonicalMaskMod, one_order: bool) -> tuple[Any, ...]:
    tensors = [example.starts, example.ends]
    if example.bit_tiles is not None:
        tensors += [example.bit_tiles.row_ptr, example.bit_tiles.cols, example.bit_tiles.slot, example.bit_tiles.bits]

    def mask_mod(b, h, q, k, handle, q_order, kv_order, starts, ends, *bits):  # type: ignore[no-untyped-def]
        tiles = BitTiles(MaskPlanBuilder.q_tile, MaskPlanBuilder.kv_tile, *bits) if bits else None
        canonical = CanonicalMaskMod(starts, ends, example.kv_len, tiles)
        canonical.search_steps = example.search_steps
        return ShardedMaskMod(handle, q_order, q_order if one_order else kv_order, canonical)(b, h, q, k)

    indices = [torch.zeros((), dtype=torch.int32) for _ in range(4)]  # inputs are known apart as objects
    order = torch.zeros(1, dtype=torch.int64)
    handle = torch.zeros(HANDLE_SHAPE, dtype=torch.int64)
    with tracing_alone(), torch.no_grad(), item_access_as_index():
        graph = make_fx(mask_mod, tracing_mode="real")(*indices, handle, order, order.clone(), *tensors)
    return expression(FxProgram.from_graph(graph))[0]
