"""Copies of what tensors hold, to tell later whether they still do.

Bits are compared: tensors can be written to without a trace (``.data``, memory shared with NumPy, another library's
kernels, the static memory of CUDA graphs).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from magi_flex.kernels import cuda_driver, route
from magi_flex.kernels.cuda_build import compile_cubin
from magi_flex.kernels.request import Backend

Verdict = Callable[[], bool]
"""Waits for a GPU, and says whether the contents are the same."""

_EXACT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})  # equal: same bits
_PAIRS = 16  # of a launch
_PARAMS = struct.Struct(f"<{'2Qq' * _PAIRS}Qq")
_THREADS, _BLOCK = 256, 1 << 16  # bytes that a block compares, where there are blocks enough
_MOST_BLOCKS = 264


class Contents:
    """What tensors of one device held when this was made."""

    def compare(self, tensors: Sequence[Tensor]) -> bool | Verdict:
        """Whether ``tensors``, of the same shapes, hold the same; where a GPU is asked, what will tell."""
        raise NotImplementedError


def contents_of(tensors: Sequence[Tensor]) -> Contents:
    """Of tensors of one device."""
    device = tensors[0].device
    if device.type != "cuda":
        return _AtOnce(tensors)
    return _ByKernel(tensors) if len(tensors) <= _PAIRS and _has_kernel(device) else _ByTorch(tensors)


class _AtOnce(Contents):
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [_exact(x).clone() for x in tensors]

    def compare(self, tensors: Sequence[Tensor]) -> bool:
        return all(torch.equal(_exact(x), copy) for x, copy in zip(tensors, self._copies, strict=True))


class _ByTorch(Contents):
    """All tensors together, so that there are few operations."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copy = _joined(tensors)

    def compare(self, tensors: Sequence[Tensor]) -> Verdict:
        same = (_joined(tensors) == self._copy).all()
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(same, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(same.device))

        def wait() -> bool:
            copied.synchronize()
            return bool(host)

        return wait


class _ByKernel(Contents):
    """One launch, which writes into memory of the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
        self._sizes = [(x.data_ptr(), x.nbytes) for x in self._copies]
        blocks = -(-sum(x.nbytes for x in self._copies) // _BLOCK)
        self._grid = min(max(blocks, 1), _MOST_BLOCKS)
        self._device = tensors[0].device
        self._missing = (0,) * (3 * (_PAIRS - len(tensors)))
        self._params = cuda_driver.ParameterBlock(0, _PARAMS)
        self._lock = threading.Lock()  # calls write into the parameters

    def compare(self, tensors: Sequence[Tensor]) -> Verdict:
        given = [x if x.is_contiguous() else x.detach().contiguous() for x in tensors]
        values = [y for x, size in zip(given, self._sizes, strict=True) for y in (x.data_ptr(), *size)]
        with cuda_driver.on_device(self._device):
            answer = _Answer(self._device.index)
            with self._lock:
                self._params.set_rest(*values, *self._missing, answer.flag.address, len(given))
                stream = cuda_driver.current_stream(self._device)
                _kernel(self._device.index).launch(self._grid, _THREADS, self._params, stream)
            answer.flag.written.record()
        return answer


def _has_kernel(device: torch.device) -> bool:
    """Where ``ffa`` runs: it has been tried there alone."""
    ffa = route.load("ffa")
    return isinstance(ffa, Backend) and ffa.missing(device) is None


@functools.lru_cache(maxsize=16)
def _kernel(device_index: int) -> cuda_driver.Kernel:
    with torch.cuda.device(device_index):
        return cuda_driver.Kernel(compile_cubin("ffa/same_bytes.cu", {}).code, "ffa_same_bytes", 0)


class _Flag:
    """An int in memory of the host that kernels write to, and the event of the last launch that may."""

    def __init__(self) -> None:
        self._memory = torch.empty(1, dtype=torch.int32, pin_memory=True)
        self.address = self._memory.data_ptr()
        self.value = ctypes.c_int.from_address(self.address)
        self.written = torch.cuda.Event()


_free: dict[int, deque[_Flag]] = {}  # by device


def _take_flag(free: deque[_Flag]) -> _Flag:
    """A flag that no launch will write to."""
    try:
        flag = free.popleft()
    except IndexError:
        return _Flag()
    if flag.written.query():
        return flag
    free.append(flag)  # nobody waited for its last launch
    return _Flag()


class _Answer:
    """A launch's verdict.  Its flag serves another launch when this is not needed any more."""

    def __init__(self, device_index: int) -> None:
        self._free = _free.setdefault(device_index, deque())
        self.flag = _take_flag(self._free)
        self.flag.value.value = 1

    def __call__(self) -> bool:
        self.flag.written.synchronize()
        return self.flag.value.value == 1

    def __del__(self) -> None:
        self._free.append(self.flag)


def _exact(x: Tensor) -> Tensor:
    """A tensor that is equal where ``x`` holds the same bits."""
    return x if x.dtype in _EXACT else _bytes(x)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    as_they_are = tensors[0].dtype in _EXACT and all(x.dtype == tensors[0].dtype for x in tensors)
    return torch.cat([x.reshape(-1) if as_they_are else _bytes(x) for x in tensors])


def _bytes(x: Tensor) -> Tensor:
    flat = (x.detach() if x.requires_grad else x).reshape(-1)
    if flat.stride(0) != 1:  # a strided line; a single element counts as contiguous, whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
