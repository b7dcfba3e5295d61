"""Plans that forward, backward and several layers share: kept as long as a tensor that stands for them is alive.

A key is only a memo.  Whoever asks passes what the plan was made from, and builds it again if the key is unknown (the
tensor was copied, or comes from another process).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from magi_flex.op_specs import BuiltMask


@dataclass(frozen=True)
class _Entry:
    owner: StorageWeakRef
    identity: Hashable
    mask: BuiltMask
    contents: tuple[Tensor, ...] = ()


_MOST_BYTES = 1 << 26  # of tensors that copies are kept of
_entries: dict[int, _Entry] = {}
_lock = threading.Lock()


def new_key() -> int:
    """63 random bits, so that keys of different processes (a cached or pickled graph's tensors) do not meet."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def storage_key(owner: Tensor) -> int:
    """A key for ``owner``'s memory, unique as long as an entry holds a weak reference to it."""
    return owner.untyped_storage()._cdata


def remember(key: int, owner: Tensor, identity: Hashable, mask: BuiltMask, contents: tuple[Tensor, ...] = ()) -> None:
    """Keep ``mask`` under ``key`` until ``owner``'s memory is freed; ``identity``: the spec and lengths it is for."""
    with _lock:
        for old in [k for k, entry in _entries.items() if entry.owner.expired()]:
            del _entries[old]
        _entries[key] = _Entry(StorageWeakRef(owner.untyped_storage()), identity, mask, contents)


def recall(key: int, identity: Hashable, build: Callable[[], BuiltMask]) -> BuiltMask:
    """The plan under ``key``, or a new one if there is none (any more) for this ``identity``."""
    entry = _find(key, identity)
    return build() if entry is None else entry.mask


def shared(tensors: Sequence[Tensor], identity: Hashable, build: Callable[[], BuiltMask]) -> BuiltMask:
    """The plan that was made before from these very tensors with the same contents, or a new one.

    Contents are compared with copies: tensors can be written to without a trace (``.data``, memory shared with NumPy,
    the static memory of CUDA graphs).  Large ones (``_MOST_BYTES``) are not copied, and their plan is not kept.
    """
    if not tensors or sum(x.nbytes for x in tensors) > _MOST_BYTES:
        return build()
    identity = (identity, *((x.dtype, x.shape, x.device) for x in tensors))
    key = hash((identity, *(storage_key(x) for x in tensors)))
    entry = _find(key, identity)
    if entry is not None and all(torch.equal(*both) for both in zip(_pieces(tensors), entry.contents, strict=True)):
        return entry.mask
    mask = build()
    contents = (piece.clone() if piece.device.type == "cpu" else piece for piece in _pieces(tensors))
    remember(key, tensors[0], identity, mask, tuple(contents))
    return mask


def _find(key: int, identity: Hashable) -> _Entry | None:
    with _lock:
        entry = _entries.get(key)
    return entry if entry is not None and entry.identity == identity and not entry.owner.expired() else None


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' bytes: on a CPU one by one, on a GPU all together, so that it is waited for once."""
    found = [_bytes(x) for x in tensors if x.device.type == "cpu"]
    for device in dict.fromkeys(x.device for x in tensors if x.device.type != "cpu"):
        found.append(torch.cat([_bytes(x) for x in tensors if x.device == device]))
    return found


def _bytes(x: Tensor) -> Tensor:
    flat = (x.detach() if x.requires_grad else x).reshape(-1)
    if flat.stride(0) != 1:  # a strided line; a single element counts as contiguous, whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
