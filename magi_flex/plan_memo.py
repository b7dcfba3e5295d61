"""Plans that forward, backward and several layers share: kept as long as a tensor that stands for them is alive.

A key is only a memo.  Whoever asks passes what the plan was made from, and builds it again if the key is unknown (the
tensor was copied, or comes from another process).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from magi_flex.mask_plan import MaskPlan


@dataclass(frozen=True)
class _Entry:
    owner: StorageWeakRef
    identity: Hashable
    plan: MaskPlan


_entries: dict[int, _Entry] = {}
_lock = threading.Lock()


def new_key() -> int:
    """63 random bits, so that keys of different processes (a cached or pickled graph's tensors) do not meet."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def storage_key(owner: Tensor) -> int:
    """A key for ``owner``'s memory, unique as long as an entry holds a weak reference to it."""
    return owner.untyped_storage()._cdata


def remember(key: int, owner: Tensor, identity: Hashable, plan: MaskPlan) -> None:
    """Keep ``plan`` under ``key`` until ``owner``'s memory is freed; ``identity``: the mask and lengths it is for."""
    with _lock:
        for old in [k for k, entry in _entries.items() if entry.owner.expired()]:
            del _entries[old]
        _entries[key] = _Entry(StorageWeakRef(owner.untyped_storage()), identity, plan)


def recall(key: int, identity: Hashable, build: Callable[[], MaskPlan]) -> MaskPlan:
    """The plan under ``key``, or a new one if there is none (any more) for this ``identity``."""
    with _lock:
        entry = _entries.get(key)
    if entry is not None and entry.identity == identity and not entry.owner.expired():
        return entry.plan
    return build()
