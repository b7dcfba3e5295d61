"""A call of flash-attn-4's kernels made again, without what its interface does in Python for each call.

The interface chooses kernels and builds their arguments in 0.1 to 0.2 ms, longer than a short attention runs.  All of
it depends on shapes, strides, options and the mask's tables, so the first call is watched: the interface looks compiled
kernels up in caches, which hand out ones that note their arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., object]
Layout = tuple[torch.Size, tuple[int, ...]]

_lock = threading.Lock()  # one call is watched at a time


@dataclass(frozen=True)
class KernelCall:
    """A compiled kernel, its arguments, and which of them to replace: places and numbers of tensors."""

    kernel: Kernel
    arguments: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Adaption:
    """How kernels differ from the package's own.

    Attributes:
        tracing: what they are traced in.
        key: tells them apart where compiled kernels are kept, on disk as well.
        base_2: they write logarithms to base 2, not natural ones.
    """

    tracing: AbstractContextManager[Any]
    key: str
    base_2: bool


@dataclass(frozen=True)
class Launch:
    """Kernels to be called in turn on new tensors.

    Attributes:
        calls: they number the given tensors first, then memory of their own: ``empty``, then ``zeroed``.
        empty, zeroed: (shape, strides) of float32 memory that the kernels share.
    """

    calls: tuple[KernelCall, ...]
    empty: tuple[Layout, ...] = ()
    zeroed: tuple[Layout, ...] = ()

    def __call__(self, *given: Tensor) -> None:
        """With other tensors of the same shapes, strides, dtypes, device and alignment."""
        tensors = list(given)
        kind = {"dtype": torch.float32, "device": given[0].device}
        tensors += [torch.empty_strided(*layout, **kind) for layout in self.empty]
        if self.zeroed:
            sizes = [shape.numel() for shape, _ in self.zeroed]
            parts = torch.zeros(sum(sizes), **kind).split(sizes)
            tensors += [part.as_strided(*layout) for part, layout in zip(parts, self.zeroed, strict=True)]
        for call in self.calls:
            arguments = list(call.arguments)
            for place, number in call.places:
                arguments[place] = tensors[number]
            call.kernel(*arguments)


def watched(
    work: Callable[[], object],
    looked_up_in: Sequence[Any],
    given: Sequence[Tensor],
    adaption: Adaption | None = None,
) -> Launch | None:
    """Do ``work``, a call of the interface on the ``given`` tensors.

    Args:
        looked_up_in: the functions in whose ``compile_cache`` it looks for its kernels.
        adaption: of the kernels that it is to use.
    Returns what was launched, or None if that cannot be made again.
    """
    calls: list[tuple[Kernel, tuple[Any, ...]]] = []
    tracing, key = (nullcontext(), None) if adaption is None else (adaption.tracing, adaption.key)
    with _lock, tracing, _watching(looked_up_in, key, calls):
        work()
    numbers = {x.data_ptr(): number for number, x in enumerate(given)}
    users: dict[int, list[int]] = {}  # address -> calls that are handed this memory, in turn
    own: dict[int, Tensor] = {}  # memory of the interface's own
    alike = True
    for at, (_, arguments) in enumerate(calls):
        for x in arguments:
            if isinstance(x, Tensor) and (x.data_ptr() in numbers or x.dtype != torch.int32):
                place = x.data_ptr()  # (Whole numbers are the mask's, which stays.)
                users.setdefault(place, []).append(at)
                before = given[numbers[place]] if place in numbers else own.setdefault(place, x)
                alike = alike and _kind(x) == _kind(before)
    # Where the interface made a copy of a given tensor, no kernel sees that one; what it allocates passes from one
    # kernel to another; a view of either kind of memory would be another tensor at the same address.
    repeatable = (
        alike
        and len(numbers) == len(given)
        and numbers.keys() <= users.keys()
        and all(x.dtype == torch.float32 and _is_dense(x) and len(users[place]) > 1 for place, x in own.items())
    )
    if not repeatable:
        return None
    # The first kernel fills what it is handed; the others add to memory that was zero.
    empty = [place for place in own if users[place][0] == 0]
    zeroed = [place for place in own if users[place][0] > 0]
    numbers |= {place: len(given) + number for number, place in enumerate((*empty, *zeroed))}
    return Launch(
        tuple(_template(kernel, arguments, numbers) for kernel, arguments in calls),
        tuple((own[place].shape, own[place].stride()) for place in empty),
        tuple((own[place].shape, own[place].stride()) for place in zeroed),
    )


def _kind(x: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return x.shape, x.stride(), x.dtype


def _is_dense(x: Tensor) -> bool:
    """Whether it fills its memory, in whatever order."""
    return torch.ops.aten.is_non_overlapping_and_dense(x)


def _template(kernel: Kernel, arguments: tuple[Any, ...], numbers: dict[int, int]) -> KernelCall:
    """The call without the numbered tensors, so that their memory is not held."""
    places = [
        (at, numbers[x.data_ptr()])
        for at, x in enumerate(arguments)
        if isinstance(x, Tensor) and x.data_ptr() in numbers
    ]
    replaced = {at for at, _ in places}
    kept = tuple(None if at in replaced else x for at, x in enumerate(arguments))
    return KernelCall(kernel, kept, tuple(places))


@contextmanager
def _watching(
    looked_up_in: Sequence[Any], key: str | None, calls: list[tuple[Kernel, tuple[Any, ...]]]
) -> Iterator[None]:
    caches = [function.compile_cache for function in looked_up_in]
    for function, cache in zip(looked_up_in, caches, strict=True):
        function.compile_cache = _Watch(cache, key, calls)
    try:
        yield
    finally:
        for function, cache in zip(looked_up_in, caches, strict=True):
            function.compile_cache = cache


class _Watch:
    """A cache of compiled kernels, in which those of this thread have the adaption's key beside their own.

    ``calls`` gets this thread's calls of the kernels that it hands out.
    """

    def __init__(self, cache: Any, adaption: str | None, calls: list[tuple[Kernel, tuple[Any, ...]]]) -> None:
        self.cache, self.adaption, self.calls, self.thread = cache, adaption, calls, threading.get_ident()

    def __contains__(self, key: object) -> bool:
        return self._own(key) in self.cache

    def __setitem__(self, key: object, kernel: Kernel) -> None:
        self.cache[self._own(key)] = kernel

    def _is_here(self) -> bool:
        return threading.get_ident() == self.thread

    def _own(self, key: object) -> object:
        return key if self.adaption is None or not self._is_here() else (self.adaption, key)

    def __getitem__(self, key: object) -> Kernel:
        kernel = self.cache[self._own(key)]

        def call(*arguments: Any) -> object:
            if self._is_here():
                self.calls.append((kernel, arguments))
            return kernel(*arguments)

        return call
