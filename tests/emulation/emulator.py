"""The Hopper kernels and their host code on a CPU: csrc/cuda/ffa compiled as C++ against tests/emulation/ptx.cuh.

What is left out: the hardware's memory model (proxy fences are not checked), its instruction set (see
tests/test_ffa_build.py for what the compiler makes of the kernels) and its rounding of approximate functions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from magi_flex.kernels import (
    contents,
    cuda_driver,
    ffa,
    ffa_backward,
    ffa_copy_rows,
    ffa_forward,
    ffa_gradient_q,
    ffa_plans,
    ffa_split,
)
from magi_flex.kernels.cuda_build import SOURCES, Cubin

HERE = Path(__file__).parent
PROCESSORS = 3  # of the emulated chip
COMPILER = shutil.which("g++")
_folder = tempfile.TemporaryDirectory(prefix="magi_flex-emulation-")


@functools.cache
def _build(source: str, options: tuple[str, ...], generated: str) -> str:
    """Path of the shared library of ``csrc/cuda/<source>`` with these macros and this text of generated.cuh."""
    path = SOURCES / source
    name = hashlib.sha256(repr((source, options, generated)).encode()).hexdigest()[:16]
    folder = Path(_folder.name) / name
    folder.mkdir()
    for file in (*path.parent.glob("*.cuh"), path):
        if file.name != "ptx.cuh":
            # Dynamic shared memory is the emulator's array.
            text = re.sub(
                r"extern __shared__ [^;]*?(\w+)\[\];", r"unsigned char* const \1 = machine::shared_memory;",
                file.read_text(),
            )  # fmt: skip
            (folder / file.name).write_text(text)
    (folder / "generated.cuh").write_text(generated)
    kernels = re.findall(r"__global__ void __launch_bounds__\([^;]*?\)\s+(\w+)\(const", path.read_text())
    launcher = (HERE / "launcher.cpp").read_text().replace("KERNELS", "\n".join(f"EMULATE({k})" for k in kernels))
    (folder / "launcher.cpp").write_text(launcher)
    for header in ("machine.h", "ptx.cuh"):
        shutil.copy(HERE / header, folder)
    command = [
        str(COMPILER), "-std=c++20", "-O1", "-w", "-fPIC", "-fno-gnu-unique", "-shared",
        f'-DKERNEL_SOURCE="{path.name}"', *options, "launcher.cpp", "-o", "kernel.so",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:5000]
    return str(folder / "kernel.so")


def _compile(source: str, defines: Mapping[str, object], generated: str = "") -> Cubin:
    options = (f"-D{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in defines.items())
    return Cubin(_build(source, tuple(options), generated).encode(), "")


class EmulatedKernel:
    """In the place of cuda_driver.Kernel."""

    seed = 0

    def __init__(self, code: bytes, name: str, shared_bytes: int | None = None) -> None:
        library = ctypes.CDLL(code.decode())
        self.name = name
        if shared_bytes is None:
            shared_bytes = ctypes.c_int.in_dll(library, f"{name}_shared_bytes").value
        assert shared_bytes <= 227 << 10, f"{name} needs {shared_bytes} bytes of shared memory"
        self.shared_bytes = shared_bytes
        self._run = getattr(library, f"emulate_{name}")
        self._run.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 4]
        self._run.restype = ctypes.c_char_p

    def launch(self, grid: int, threads: int, params: cuda_driver.ParameterBlock, stream: int) -> None:
        # Blocks that use static shared memory have it to themselves.
        resident = PROCESSORS if self.shared_bytes else 1
        message = self._run(params.address, grid, threads, resident, EmulatedKernel.seed)
        assert message is None, f"{self.name}: {message.decode()}"


def _tensor_map(x: Tensor, axes: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> bytes:
    sizes = [x.shape[axis] for axis in axes]
    strides = [x.stride(axis) * x.element_size() for axis in axes]
    assert len(axes) == 4 and max(box) <= 256 and box[0] * x.element_size() <= (swizzle or 1 << 20)
    return _MAP.pack(x.data_ptr(), *sizes, *strides, *box, x.element_size(), swizzle)


# Modules that have names of the driver or the compiler.
_USERS = (contents, cuda_driver, ffa, ffa_plans, ffa_forward, ffa_backward, ffa_gradient_q, ffa_split, ffa_copy_rows)
_MAP = cuda_driver.struct.Struct("<Q4Q4Q4III32x")


def _move_map(block: cuda_driver.ParameterBlock, index: int, address: int) -> None:
    ctypes.c_uint64.from_address(block.address + index * cuda_driver.TENSOR_MAP_BYTES).value = address


_empty = torch.empty


def _poisoned(*args: Any, **kwargs: Any) -> Tensor:
    """torch.empty, with NaN or the largest integers in it: nobody may read what nobody wrote."""
    x = _empty(*args, **kwargs)
    return x.fill_(torch.nan if x.is_floating_point() else 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


def install(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Until the test ends, backend "ffa" runs tensors on the CPU through the emulator."""
    EmulatedKernel.seed = seed
    monkeypatch.setattr(cuda_driver, "Kernel", EmulatedKernel)
    monkeypatch.setattr(cuda_driver, "tensor_map", _tensor_map)
    monkeypatch.setattr(cuda_driver.ParameterBlock, "move_map", _move_map)
    monkeypatch.setattr(cuda_driver, "fill_zero", lambda x, stream: x.zero_())
    monkeypatch.setattr(torch, "empty", _poisoned)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    for module in _USERS:
        if hasattr(module, "multiprocessors"):
            monkeypatch.setattr(module, "multiprocessors", lambda device: PROCESSORS)
        if hasattr(module, "compile_cubin"):
            monkeypatch.setattr(module, "compile_cubin", _compile)
