"""What kernels derive from a mask's intervals (tile plans, schedules), kept as long as the intervals are.

A compiled graph hands the same interval tensors to every layer, forward and backward, in new MaskPlan objects; so what
identifies a mask here is the tensors' memory and version counters.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from magi_flex.kernels.graph_scratch import shared
from magi_flex.mask_plan import MaskPlan

T = TypeVar("T")


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


_CAPACITY = 256
_entries: OrderedDict[Hashable, tuple[tuple[StorageWeakRef, ...], Any]] = OrderedDict()
_lock = threading.Lock()


def _tensors(plan: MaskPlan) -> list[Tensor]:
    tensors = [plan.starts, plan.ends]
    if plan.bit_tiles is not None:
        bits = plan.bit_tiles
        tensors += [bits.row_ptr, bits.cols, bits.slot, bits.bits]
    return tensors


def derived(plan: MaskPlan, what: Hashable, build: Callable[[], T]) -> T:
    """``build()``, or what it gave earlier for the same ``what`` and the same, unchanged tensors of ``plan``.

    Nothing is kept for inference tensors, which do not count their changes, nor while a CUDA graph is captured, since
    the captured work is then replayed on other contents, nor inside :func:`nothing_kept`.
    """
    tensors = _tensors(plan)
    if _keeping.scratch is not None and plan.starts is _keeping.starts:
        return shared(_keeping.scratch, what, build)
    if not _keeping.on or any(x.is_inference() for x in tensors):
        return build()
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return build()
    # As long as its storage lives (see below), nothing else is at a tensor's address.
    identity = tuple((x.data_ptr(), x.shape, x.stride(), x._version) for x in tensors)
    key = (what, plan.kv_len, identity)
    with _lock:
        entry = _entries.get(key)
        if entry is not None:
            owners, value = entry
            if not any(owner.expired() for owner in owners):
                _entries.move_to_end(key)
                return value
            del _entries[key]
    value = build()
    owners = tuple(StorageWeakRef(x.untyped_storage()) for x in tensors)
    with _lock:
        for old in [k for k, (refs, _) in _entries.items() if any(ref.expired() for ref in refs)]:
            del _entries[old]
        _entries[key] = (owners, value)
        while len(_entries) > _CAPACITY:
            _entries.popitem(last=False)
    return value
