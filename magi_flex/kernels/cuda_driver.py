"""The few calls of the CUDA driver that our kernels need, through ctypes: modules, tensor maps, launches.

Everything runs in the current CUDA context (torch's primary context of the current device) and on a given stream.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from magi_flex.remember import remembered

TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# CUtensorMapDataType
_DATA_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
# CUtensorMapSwizzle, by bytes
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION_256 = 3
_MOST_MAPS = 1024
_maps: dict[Hashable, bytes] = {}  # a new mask's launches are mostly for tensors like those of the last one


class CudaDriverError(RuntimeError):
    """A call of the CUDA driver failed."""


@functools.cache
def _driver() -> ctypes.PyDLL:
    # PyDLL keeps the interpreter lock: our calls do not block, and a lock taken twice costs more than they do.
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise CudaDriverError(
            f"the CUDA driver library was not found ({error}): is an NVIDIA driver installed?"
        ) from error
    address, unsigned = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernel.argtypes = [address, *[unsigned] * 7, address, address, address]
    driver.cuTensorMapReplaceAddress.argtypes = [address, address]
    driver.cuMemsetD32Async.argtypes = [ctypes.c_uint64, unsigned, ctypes.c_size_t, address]
    driver.cuModuleLoadData.argtypes = [address, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [address, address, ctypes.c_char_p]
    driver.cuModuleGetGlobal_v2.argtypes = [address, address, address, ctypes.c_char_p]
    driver.cuMemcpyDtoH_v2.argtypes = [address, ctypes.c_uint64, ctypes.c_size_t]
    driver.cuFuncSetAttribute.argtypes = [address, ctypes.c_int, ctypes.c_int]
    return driver


def _check(code: int, call: str) -> None:
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    reason = text.value.decode() if text.value else "unknown error"
    raise CudaDriverError(f"{call} failed with error {code}: {reason}")


class Kernel:
    """A kernel of a loaded module (of the device that was current when it was loaded).

    Args:
        cubin: machine code.
        name: the kernel's ``extern "C"`` name.
        shared_bytes: dynamic shared memory of a launch; None: the value of the module's int ``<name>_shared_bytes``.
    """

    def __init__(self, cubin: bytes, name: str, shared_bytes: int | None = None) -> None:
        torch.cuda.current_stream()  # makes torch's context current
        driver = _driver()
        self._module = ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin), f"loading the module of {name}")
        self.function = ctypes.c_void_p()
        _check(
            driver.cuModuleGetFunction(ctypes.byref(self.function), self._module, name.encode()),
            f"looking up the kernel {name}",
        )
        self.name = name
        self.shared_bytes = self._read_int(f"{name}_shared_bytes") if shared_bytes is None else shared_bytes
        _check(
            driver.cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED_SIZE, self.shared_bytes),
            f"asking for {self.shared_bytes} bytes of shared memory for {name}",
        )

    def _read_int(self, symbol: str) -> int:
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        _check(
            _driver().cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), self._module, symbol.encode()),
            f"looking up {symbol}",
        )
        value = ctypes.c_int()
        _check(_driver().cuMemcpyDtoH_v2(ctypes.byref(value), address, 4), f"reading {symbol}")
        return value.value

    def launch(self, grid: int, threads: int, params: ParameterBlock, stream: int) -> None:
        """Launch ``grid`` blocks with one by-value parameter.

        Args:
            params: the parameter; the driver copies it before this returns.
            stream: a CUstream as an int (:func:`current_stream`).
        """
        code = _driver().cuLaunchKernel(
            self.function, grid, 1, 1, threads, 1, 1, self.shared_bytes, stream, params.pointers, None
        )
        if code:
            _check(code, f"launching {self.name}")


class ParameterBlock:
    """A kernel's by-value parameter: tensor maps first (each 128 bytes), then whatever ``struct`` packs.

    Args:
        maps: number of tensor maps at the front.
        rest: ``struct.Struct`` of what follows.

    Attributes:
        address: of the block; size: its bytes, a multiple of a tensor map's alignment.
    """

    def __init__(self, maps: int, rest: struct.Struct) -> None:
        size = maps * TENSOR_MAP_BYTES + rest.size
        self.size = -(-size // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
        self._memory = ctypes.create_string_buffer(self.size + _TENSOR_MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = -(-start // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
        self._offset = self.address - start
        self._rest_offset = self._offset + maps * TENSOR_MAP_BYTES
        self._rest = rest
        self._moved_to: list[int | None] = [None] * maps  # addresses that the maps were last moved to
        self.pointers = (ctypes.c_void_p * 1)(self.address)

    def set_map(self, index: int, encoded: bytes) -> None:
        """Sizes and strides of map ``index``; where the tensor lies is for :meth:`move_map` to say."""
        begin = self._offset + index * TENSOR_MAP_BYTES
        self._memory[begin : begin + TENSOR_MAP_BYTES] = encoded
        self._moved_to[index] = None

    def move_map(self, index: int, address: int) -> None:
        """Let map ``index`` describe another tensor of the same sizes and strides."""
        if self._moved_to[index] == address:
            return
        code = _driver().cuTensorMapReplaceAddress(self.address + index * TENSOR_MAP_BYTES, address)
        if code:
            _check(code, "moving a tensor map")
        self._moved_to[index] = address

    def set_rest(self, *values: int | float) -> None:
        self._rest.pack_into(self._memory, self._rest_offset, *values)

    def set_part(self, offset: int, part: struct.Struct, *values: int | float) -> None:
        """Set what ``part`` packs, ``offset`` bytes behind the maps."""
        part.pack_into(self._memory, self._rest_offset + offset, *values)


def tensor_map(x: Tensor, axes: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> bytes:
    """The 128 bytes of a CUtensorMap over a tensor like ``x``, wherever that lies (:meth:`ParameterBlock.move_map`);
    reads outside of the tensor give zeros, writes there are dropped.

    Args:
        x: float16, bfloat16 or float32, :func:`is_tma_ready`.
        axes: the axes of ``x``, innermost first (``x.stride(axes[0])`` is 1), at most five.
        box: elements of each axis that one copy moves, in the order of ``axes``.
        swizzle: width in bytes of the shared-memory swizzle (0, 32, 64, 128).
    """
    what = (x.dtype, x.shape, x.stride(), axes, box, swizzle)
    return remembered(_maps, what, lambda: _encode(x, axes, box, swizzle), _MOST_MAPS)


def _encode(x: Tensor, axes: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> bytes:
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
    address = -(-ctypes.addressof(memory) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
    rank = len(axes)
    # An axis of one element is never stepped along; its stride must be valid all the same.
    strides = [x.stride(axis) * x.element_size() if x.shape[axis] > 1 else 16 for axis in axes[1:]]
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        _DATA_TYPES[x.dtype],
        rank,
        ctypes.c_void_p(x.data_ptr()),
        (ctypes.c_uint64 * rank)(*(x.shape[axis] for axis in axes)),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        0,
        _SWIZZLES[swizzle],
        _L2_PROMOTION_256,
        0,
    )
    _check(code, f"encoding a tensor map of {tuple(x.shape)} with strides {x.stride()}")
    return ctypes.string_at(address, TENSOR_MAP_BYTES)


def is_tma_ready(x: Tensor) -> bool:
    """Whether ``x``'s last axis is contiguous and its address and other strides are multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and _is_layout_ready(x.shape, x.stride(), x.element_size())


@functools.lru_cache(maxsize=1024)
def _is_layout_ready(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    stepped = [stride * item for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    return (shape[-1] == 1 or strides[-1] == 1) and all(s % 16 == 0 and 0 < s < 1 << 40 for s in stepped)


_NOTHING: AbstractContextManager[None] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """The device, if it is a GPU, is current; nothing to do, which takes less time, where it is."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def current_stream(device: torch.device) -> int:
    """The current stream of a GPU, as :meth:`Kernel.launch` takes it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def stream_of(device: torch.device) -> int:
    """The current stream of a GPU; 0 for other devices, which have one order of work."""
    return current_stream(device) if device.type == "cuda" else 0


def capture_id(stream: int) -> int | None:
    """Which capture of a CUDA graph a stream is part of, a number above 0; 0: of none; None: the driver cannot tell."""
    ask = getattr(_driver(), "cuStreamGetCaptureInfo_v2", None)
    if ask is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    _check(code, "asking for a stream's capture")
    return number.value if status.value else 0


def fill_zero(x: Tensor, stream: int) -> None:
    """Zero a contiguous tensor of 4-byte elements on ``stream`` (a memset node under graph capture)."""
    code = _driver().cuMemsetD32Async(x.data_ptr(), 0, x.numel(), stream)
    if code:
        _check(code, "clearing a counter")
