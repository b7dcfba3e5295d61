"""Plans that forward, backward and several layers share, and other things known of masks: kept as long as a tensor
that stands for them is alive.

A key is only a memo.  Whoever asks passes what the plan was made from, and builds it again if the key is unknown (the
tensor was copied, or comes from another process).
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from magi_flex.kernels.contents import Contents, Verdict, contents_of

if TYPE_CHECKING:
    from magi_flex.op_specs import BuiltMask

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry:
    owner: StorageWeakRef
    value: Any
    contents: tuple[tuple[torch.device, Contents], ...] = ()


class HandledMask:
    """The plan behind a handle, which is not certain as long as ``verdict`` is there."""

    def __init__(self, identity: Hashable, mask: BuiltMask, verdict: Verdict | None = None):
        self.identity = identity
        self.mask = mask
        self.verdict = verdict

    @property
    def is_certain(self) -> bool:
        return self.verdict is None

    def correct(self, build: Callable[[], BuiltMask]) -> None:
        """Waits for the verdict; the plan is the right one from then on.

        It becomes certain last: if waiting or building fails, whoever comes next asks again.
        """
        verdict = self.verdict
        if verdict is not None and not verdict():
            self.mask = build()
        self.verdict = None


class _HandleMemory(bytearray):
    """Memory of a handle, which holds its plan: both are freed when the last tensor over it is."""

    plan: HandledMask


_MOST_BYTES = 1 << 26  # of tensors that copies are kept of
_LOOKED_AT = 4  # entries, of which the dead are dropped, at each new one: more than come, and not all of them each time
_entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # those that are looked at next come first
_handles: WeakValueDictionary[int, _HandleMemory] = WeakValueDictionary()
_lock = threading.Lock()


def _count_keys() -> None:
    """From a random number, so that keys of different processes (a cached or pickled graph's tensors) do not meet."""
    global _keys
    _keys = itertools.count(int.from_bytes(os.urandom(8), sys.byteorder) >> 2)


_keys: itertools.count[int]
_count_keys()
os.register_at_fork(after_in_child=_count_keys)


def new_handle(plan: HandledMask) -> Tensor:
    """int64 [1] on the CPU: a key for :func:`of_handle`, as long as its memory lives."""
    key = next(_keys)
    memory = _HandleMemory(key.to_bytes(8, sys.byteorder))
    memory.plan = plan
    _handles[key] = memory
    return torch.frombuffer(memory, dtype=torch.int64)


def of_handle(handle: Tensor, identity: Hashable) -> HandledMask | None:
    """The plan of a handle; None if it is a copy (or another process's) or not of this ``identity``."""
    memory = _handles.get(handle.item())
    return memory.plan if memory is not None and memory.plan.identity == identity else None


def storage_key(owner: Tensor) -> int:
    """A key for ``owner``'s memory, unique as long as an entry holds a weak reference to it."""
    return owner.untyped_storage()._cdata


def remember(
    key: Hashable, owner: Tensor, value: Any, contents: tuple[tuple[torch.device, Contents], ...] = ()
) -> None:
    """Keep ``value`` under ``key`` until ``owner``'s memory is freed."""
    with _lock:
        for old in list(itertools.islice(_entries, _LOOKED_AT)):
            if _entries[old].owner.expired():
                del _entries[old]
            else:
                _entries.move_to_end(old)
        _entries[key] = _Entry(StorageWeakRef(owner.untyped_storage()), value, contents)


def recall(key: Hashable, build: Callable[[], T]) -> T:
    """What is kept under ``key``, or a new one if there is nothing (any more)."""
    entry = _find(key)
    return build() if entry is None else entry.value


def shared(tensors: Sequence[Tensor], identity: Hashable, build: Callable[[], T]) -> T:
    """What was made before from these very tensors with the same contents, or a new one."""
    value = known(tensors, identity)
    if value is None:
        value = build()
        note(tensors, identity, value)
    return value


def note(tensors: Sequence[Tensor], identity: Hashable, value: Any) -> None:
    """Keep ``value`` (not None) for :func:`known`, as long as the first tensor's memory lives.

    Not for large tensors (``_MOST_BYTES``): their contents are copied.
    """
    if tensors and sum(x.nbytes for x in tensors) <= _MOST_BYTES:
        devices = dict.fromkeys(x.device for x in tensors)
        contents = tuple((device, contents_of([x for x in tensors if x.device == device])) for device in devices)
        remember(_key(tensors, identity), tensors[0], value, contents)


def known(tensors: Sequence[Tensor], identity: Hashable) -> Any | None:
    """What was noted for these very tensors, if they still hold the same contents; else None.

    Contents are compared with copies: tensors can be written to without a trace (``.data``, memory shared with NumPy,
    the static memory of CUDA graphs).
    """
    found = _noted(tensors, identity)
    if found is None:
        return None
    value, verdict = found
    return value if verdict is None or verdict() else None


def expected(tensors: Sequence[Tensor], identity: Hashable, build: Callable[[], T]) -> tuple[T, Verdict | None]:
    """As :func:`shared`, without waiting for a GPU, and what will say whether it is right (None: it is)."""
    found = _noted(tensors, identity)
    if found is not None:
        return found
    value = build()
    note(tensors, identity, value)
    return value, None


def _key(tensors: Sequence[Tensor], identity: Hashable) -> Hashable:
    return identity, *[(storage_key(x), x.dtype, x.shape, x.device) for x in tensors]


def _noted(tensors: Sequence[Tensor], identity: Hashable) -> tuple[Any, Verdict | None] | None:
    """What was noted for these tensors, and what will say whether it still holds (None: it does); None if not."""
    entry = _find(_key(tensors, identity))
    if entry is None:
        return None
    verdicts = []
    for device, contents in entry.contents:
        there = tensors if len(entry.contents) == 1 else [x for x in tensors if x.device == device]
        same = contents.compare(there)
        if same is False:
            return None
        if same is not True:
            verdicts.append(same)
    return entry.value, (lambda: all(verdict() for verdict in verdicts)) if verdicts else None


def _find(key: Hashable) -> _Entry | None:
    with _lock:
        entry = _entries.get(key)
    return entry if entry is not None and not entry.owner.expired() else None
