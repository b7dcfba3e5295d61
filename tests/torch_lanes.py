"""The operations of a traced score mod (magi_flex.kernels.fa4_walk.Lanes) on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magi_flex.kernels.fa4_walk import BINARY, COMPARE, FLOAT_UNARY

_BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.true_divide,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "pow": torch.pow,
}


class TorchLanes:
    """Strict about dtypes: float32 tensors mix with float32 tensors alone, and so on."""

    def unary(self, name: str, x: Tensor) -> Tensor:
        if name in FLOAT_UNARY:
            assert x.dtype == torch.float32, name
            return getattr(torch, name)(x)
        assert name in ("neg", "abs", "not") and (name == "not" or x.dtype != torch.bool)
        return {"neg": torch.neg, "abs": torch.abs, "not": torch.bitwise_not}[name](x)

    def binary(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == y.dtype and name in BINARY | COMPARE
        assert name in ("and", "or", "xor", *COMPARE) or x.dtype != torch.bool
        assert name not in ("div", "pow") or x.dtype == torch.float32
        return getattr(torch, name)(x, y) if name in COMPARE else _BINARY[name](x, y)

    def where(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        assert condition.dtype == torch.bool and x.dtype == y.dtype
        return torch.where(condition, x, y)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def constant(self, value: float | int | bool, dtype: torch.dtype, like: Tensor) -> Tensor:
        assert isinstance(like, Tensor)
        return torch.tensor(value, dtype=dtype)

    def load(self, table: Tensor, indices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        table = table.view(1) if table.dim() == 0 else table
        assert len(indices) == table.dim() and not any(i.dtype.is_floating_point for i in indices)
        within = []
        for index, size in zip(indices, table.shape, strict=True):
            index = torch.where(index < 0, index + size, index)
            within.append(index.clamp(0, size - 1).long())
        return table[tuple(torch.broadcast_tensors(*within))].to(dtype)
