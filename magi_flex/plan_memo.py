"""Plans that forward, backward and several layers share, and other things known of masks: kept as long as a tensor
that stands for them is alive.

A key is only a memo.  Whoever asks passes what the plan was made from, and builds it again if the key is unknown (the
tensor was copied, or comes from another process).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from magi_flex.op_specs import BuiltMask

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry:
    owner: StorageWeakRef
    value: Any
    contents: tuple[Tensor, ...] = ()


class _HandleMemory(bytearray):
    """Memory of a handle, which holds its plan: both are freed when the last tensor over it is."""

    identity: Hashable
    mask: BuiltMask


_MOST_BYTES = 1 << 26  # of tensors that copies are kept of
_EXACT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})  # equal: same bits
_LOOKED_AT = 4  # entries, of which the dead are dropped, at each new one: more than come, and not all of them each time
_entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # those that are looked at next come first
_handles: WeakValueDictionary[int, _HandleMemory] = WeakValueDictionary()
_lock = threading.Lock()


def new_handle(identity: Hashable, mask: BuiltMask) -> Tensor:
    """int64 [1] on the CPU: a key for :func:`of_handle`, as long as its memory lives.

    64 random bits, so that keys of different processes (a cached or pickled graph's tensors) do not meet.
    """
    memory = _HandleMemory(os.urandom(8))
    memory.identity, memory.mask = identity, mask
    handle = torch.frombuffer(memory, dtype=torch.int64)
    _handles[handle.item()] = memory
    return handle


def of_handle(handle: Tensor, identity: Hashable, build: Callable[[], BuiltMask]) -> BuiltMask:
    """The plan of a handle, or a new one if it is a copy (or another process's) or not of this ``identity``."""
    memory = _handles.get(handle.item())
    return memory.mask if memory is not None and memory.identity == identity else build()


def storage_key(owner: Tensor) -> int:
    """A key for ``owner``'s memory, unique as long as an entry holds a weak reference to it."""
    return owner.untyped_storage()._cdata


def remember(key: Hashable, owner: Tensor, value: Any, contents: tuple[Tensor, ...] = ()) -> None:
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
        contents = (piece.clone() if piece.device.type == "cpu" else piece for piece in _pieces(tensors))
        remember(_key(tensors, identity), tensors[0], value, tuple(contents))


def known(tensors: Sequence[Tensor], identity: Hashable) -> Any | None:
    """What was noted for these very tensors, if they still hold the same contents; else None.

    Contents are compared with copies: tensors can be written to without a trace (``.data``, memory shared with NumPy,
    the static memory of CUDA graphs).
    """
    entry = _find(_key(tensors, identity))
    if entry is None or not all(map(torch.equal, _pieces(tensors), entry.contents)):
        return None
    return entry.value


def _key(tensors: Sequence[Tensor], identity: Hashable) -> Hashable:
    return identity, *[(storage_key(x), x.dtype, x.shape, x.device) for x in tensors]


def _find(key: Hashable) -> _Entry | None:
    with _lock:
        entry = _entries.get(key)
    return entry if entry is not None and not entry.owner.expired() else None


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that are equal where the given ones hold the same bits: on a CPU each by itself, on a GPU all together,
    so that it is waited for once."""
    found = [x if x.dtype in _EXACT else _bytes(x) for x in tensors if x.device.type == "cpu"]
    if len(found) < len(tensors):
        for device in dict.fromkeys(x.device for x in tensors if x.device.type != "cpu"):
            there = [x for x in tensors if x.device == device]
            as_they_are = there[0].dtype in _EXACT and all(x.dtype == there[0].dtype for x in there)
            found.append(torch.cat([x.reshape(-1) if as_they_are else _bytes(x) for x in there]))
    return found


def _bytes(x: Tensor) -> Tensor:
    flat = (x.detach() if x.requires_grad else x).reshape(-1)
    if flat.stride(0) != 1:  # a strided line; a single element counts as contiguous, whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
