"""What kernels derive from a mask's plan (tile plans, schedules, launches), kept as long as the plan is.

It lies in the plan itself (``MaskPlan.memo``), beside the state of the plan's tensors that it was made from: so it
never meets another plan's tensors, whatever memory these get.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from magi_flex.kernels.cuda_driver import current_stream
from magi_flex.kernels.graph_scratch import shared
from magi_flex.mask_plan import MaskPlan

T = TypeVar("T")
_CAPACITY = 256  # of a plan: there may be as many layouts of q, k and v as batches


class _Keeping(threading.local):
    on = True
    starts: Tensor | None = None  # of the plan that ``scratch`` is for
    scratch: Tensor | None = None


_keeping = _Keeping()


@contextlib.contextmanager
def nothing_kept(plan: MaskPlan, scratch: Tensor | None) -> Iterator[None]:
    """What is derived meanwhile, in this thread, is not kept: its memory belongs to a CUDA graph's pool.

    ``scratch``: memory of the graph, in which operators share what they derive from ``plan`` (graph_scratch.py).
    """
    before = _keeping.on, _keeping.starts, _keeping.scratch
    _keeping.on, _keeping.starts, _keeping.scratch = False, plan.starts, scratch
    try:
        yield
    finally:
        _keeping.on, _keeping.starts, _keeping.scratch = before


def derived(plan: MaskPlan, what: Hashable, build: Callable[[], T]) -> T:
    """As :func:`kept`, of tensors (in dataclasses and tuples), which operators of one CUDA graph share as well."""
    if _keeping.scratch is not None and plan.starts is _keeping.starts:
        return shared(_keeping.scratch, what, build)
    return kept(plan, what, build)


def kept(plan: MaskPlan, what: Hashable, build: Callable[[], T]) -> T:
    """``build()``, or what it gave earlier on the current stream for the same ``what`` and the same, unchanged tensors
    of ``plan``.  Other streams would not wait for it, nor the memory's next owner for them.

    Nothing is kept for inference tensors, which do not count their changes, nor while a CUDA graph is captured, since
    the captured work is then replayed on other contents, nor inside :func:`nothing_kept`.
    """
    tensors = plan.tensors
    device = tensors[0].device
    if not _keeping.on or not plan.counts_changes:
        return build()
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return build()
        what = what, current_stream(device)
    state = [(x.data_ptr(), x.shape, x._version) for x in tensors]
    memo: dict[Hashable, tuple[Any, T]] = plan.memo
    entry = memo.get(what)
    if entry is not None and entry[0] == state:
        return entry[1]
    value = build()
    if len(memo) >= _CAPACITY:
        memo.clear()
    memo[what] = state, value
    return value
