"""What several operators of one CUDA graph derive from a mask, computed once: kept in memory that the graph owns.

Inside a graph nothing may be kept that lives longer than a capture, and what was derived in another run is not what a
replay needs.  So the graph brings the memory: a value of its own, made with the mask's intervals, written by the
operator that needs a plan first and read by those behind it.  Here is only noted what lies where, for one capture.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from magi_flex.kernels.cuda_driver import capture_id, current_stream

T = TypeVar("T")
_ALIGNMENT = 256
_BYTES_OF_A_ROW, _BYTES_OF_A_KEY = 32, 16  # for each interval: about what a plan of each direction takes


def scratch_bytes(shape: tuple[int, ...], kv_len: int) -> int:
    """Bytes that a mask's graph memory has, for intervals of ``[B, H, R, Q]``; what does not fit is not shared."""
    batch, heads, slots, q_len = shape
    padded = 1 << (slots - 1).bit_length()
    return batch * heads * padded * (_BYTES_OF_A_ROW * q_len + _BYTES_OF_A_KEY * kv_len) + (1 << 14)


@dataclass(frozen=True)
class _Slot:
    """Where a tensor lies."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class _Contents:
    owner: StorageWeakRef
    values: dict[Hashable, Any] = field(default_factory=dict)  # with slots in place of tensors
    used: int = 0


_contents: dict[tuple[int, int], _Contents] = {}
_lock = threading.Lock()


def shared(scratch: Tensor, what: Hashable, build: Callable[[], T]) -> T:
    """``build()``, or what it gave earlier in the same capture (or, uncaptured, while ``scratch`` has been alive).

    Args:
        scratch: uint8, contiguous, on the device of what ``build`` makes: dataclasses and tuples of tensors.
    """
    storage, base, capture = scratch.untyped_storage(), scratch.storage_offset(), _capture_of(scratch)
    if base % _ALIGNMENT or capture is None:
        return build()
    key = (storage._cdata, capture)
    with _lock:
        contents = _contents.get(key)
        if contents is None or contents.owner.expired():
            for old in [k for k, known in _contents.items() if known.owner.expired()]:
                del _contents[old]
            contents = _contents[key] = _Contents(StorageWeakRef(storage))

    def view(slot: _Slot) -> Tensor:
        # Not a view of the tensor: autograd, which saves it, would count what is written as a change.
        at = (base + slot.offset) // slot.dtype.itemsize
        return torch.empty(0, dtype=slot.dtype, device=scratch.device).set_(storage, at, slot.shape)

    if what in contents.values:
        return _mapped(contents.values[what], _Slot, view)
    value = build()
    used = contents.used

    def place(x: Tensor) -> _Slot:
        nonlocal used
        slot = _Slot(used, x.shape, x.dtype)
        used += -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT
        return slot

    slots = _mapped(value, Tensor, place)
    if used <= scratch.numel():
        targets: list[Tensor] = []
        _mapped(slots, _Slot, lambda slot: targets.append(view(slot)))
        sources: list[Tensor] = []
        _mapped(value, Tensor, sources.append)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        contents.used, contents.values[what] = used, slots
    return value


def _capture_of(scratch: Tensor) -> int | None:
    return capture_id(current_stream(scratch.device)) if scratch.is_cuda else 0


def _mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` of everything of this kind in it."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple):
        parts = [_mapped(x, kind, function) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, _Slot):
        parts = {f.name: _mapped(getattr(value, f.name), kind, function) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **parts)  # type: ignore[type-var]
    return value
