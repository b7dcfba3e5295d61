"""Shape and dtype of an operator's result, from a run on stand-ins that hold no data of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def _stand_ins(tree: Any, device: str) -> Any:
    """Each tensor as one element stretched to its shape: a one, because a zero may be divided by."""

    def replace(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.ones((), dtype=x.dtype, device=device).expand(x.shape)
        return torch.device(device) if isinstance(x, torch.device) else x

    return tree_map(replace, tree)


def result_like(func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor of the shape and dtype that ``func(*args, **kwargs)`` returns (no data, any device).

    The run is on CPU stand-ins, because meta functions cost about a millisecond; where the stand-in's values do not
    fit the operator, meta functions take over.  Raises what the operator raises.
    """
    if func is torch.ops.aten.index.Tensor and all(i is None or i.dim() == 0 for i in args[1]):
        table, indices = args
        if len(indices) > table.dim():
            raise IndexError(f"{len(indices)} indices for a tensor of shape {tuple(table.shape)}")
        kept = [size for size, i in zip(table.shape, indices, strict=False) if i is None]
        return torch.empty((), dtype=table.dtype).expand(kept + list(table.shape[len(indices) :]))
    try:
        return func(*_stand_ins(args, "cpu"), **_stand_ins(kwargs, "cpu"))
    except (RuntimeError, IndexError, ZeroDivisionError):
        return func(*_stand_ins(args, "meta"), **_stand_ins(kwargs, "meta"))
