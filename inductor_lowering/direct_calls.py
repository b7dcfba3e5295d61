"""Inductor's code calls our operators' Python functions themselves, not through PyTorch's dispatcher.

The dispatcher converts each argument of a call to C++ and back, which takes about as long as the function itself does.
In a compiled graph there is nothing else for it to do: tensors are plain, and autograd is above.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.ir import FallbackKernel
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from magi_flex.ops import DIRECT


def install() -> None:
    """For all graphs that hold these operators; Inductor's cache key has our sources in it (``JointPass.uuid``)."""
    for name in DIRECT:
        register_lowering(getattr(torch.ops.magi_flex, name).default, type_promotion_kind=None)(_lowering(name))


def _lowering(name: str) -> Any:
    handler = fallback_handler(getattr(torch.ops.magi_flex, name).default, add_to_fallback_set=False)

    def lower(*args: Any) -> Any:
        result = handler(*args)
        if not V.graph.cpp_wrapper:  # which looks operators up by name
            kernel = next(x for x in reversed(V.graph.operations) if isinstance(x, FallbackKernel))
            kernel.python_kernel_name = f"torch.ops.magi_flex.direct.{name}"
        return result

    return lower
