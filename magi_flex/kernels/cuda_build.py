"""Compile the CUDA kernels of ``csrc/cuda`` at first use, and keep the machine code on disk.

NVRTC (it comes with torch's CUDA packages) is used where it is found, else ``nvcc``.  A cached file's name is a hash of
every source file of the kernel's folder, the options and the compiler's version, so that nothing stale is ever loaded.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import glob
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from magi_flex.kernels.cache_folder import cache_folder
from magi_flex.kernels.sources import native_sources

logger = logging.getLogger("magi_flex")

SOURCES = native_sources("cuda")


class CompileError(RuntimeError):
    """A CUDA kernel did not compile, or no compiler was found."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel source, and what the assembler said about it (registers, spills, warnings)."""

    code: bytes
    report: str

    @property
    def spill_bytes(self) -> int:
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", self.report))

    @property
    def registers(self) -> int | None:
        found = re.findall(r"Used (\d+) registers", self.report)
        return max(map(int, found)) if found else None

    @property
    def warnings(self) -> list[str]:
        """Performance warnings of the assembler (serialized wgmma and the like)."""
        return [line for line in self.report.splitlines() if "Potential Performance Loss" in line or "C7508" in line]


def cache_directory() -> Path:
    """Where machine code is kept; raises CompileError, see :func:`cache_folder`."""
    return cache_folder("cuda", CompileError)


def compile_cubin(source: str, defines: Mapping[str, object], arch: str = "sm_90a", generated: str = "") -> Cubin:
    """Machine code of ``csrc/cuda/<source>`` (from the cache where it is there).

    Args:
        source: path below ``csrc/cuda``, e.g. ``"ffa/forward.cu"``.
        defines: macros; bools become ``true`` / ``false``.
        arch: e.g. ``"sm_90a"``.
        generated: text of the header ``generated.cuh``, which the source may include.

    Raises:
        CompileError: no compiler was found, or the source does not compile (with the compiler's log).
    """
    path = SOURCES / source
    options = [
        f"-D{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in defines.items()
    ]
    compiler = find_compiler()
    digest = hashlib.sha256()
    for part in (compiler.version, arch, *sorted(options), generated):
        digest.update(part.encode() + b"\0")
    for file in sorted(path.parent.glob("*.cu*")):
        if file.suffix == ".cuh" or file == path:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    folder = cache_directory()
    name = f"{path.stem}-{arch}-{digest.hexdigest()[:32]}"
    code_file, report_file = folder / f"{name}.cubin", folder / f"{name}.txt"
    if code_file.exists() and report_file.exists():
        return Cubin(code_file.read_bytes(), report_file.read_text())
    start = time.perf_counter()
    cubin = compiler.compile(path, options, arch, generated)
    logger.info("compiled %s %s in %.1f s", source, " ".join(options), time.perf_counter() - start)
    _write_atomically(report_file, cubin.report.encode())
    _write_atomically(code_file, cubin.code)
    return cubin


def _write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


# ---- compilers ------------------------------------------------------------------------------------------------------


class Nvcc:
    """The command-line compiler of a CUDA toolkit."""

    def __init__(self, path: str) -> None:
        self.path = path
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"V(\d+\.\d+\.\d+)", answer)
        self.version = f"nvcc {found.group(1) if found else answer}"

    def compile(self, path: Path, options: list[str], arch: str, generated: str) -> Cubin:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "kernel.cubin"
            (Path(folder) / "generated.cuh").write_text(generated)
            number = arch.removeprefix("sm_")
            command = [
                self.path,
                "-std=c++17",
                f"-gencode=arch=compute_{number},code={arch}",
                "-cubin",
                "-Xptxas=-v",
                f"-I{path.parent}",
                f"-I{folder}",
                *(option.replace(",", r"\,") for option in options),  # nvcc takes a comma for the next option
                str(path),
                "-o",
                str(output),
            ]
            result = subprocess.run(command, capture_output=True, text=True)
            log = result.stdout + result.stderr
            if result.returncode:
                raise CompileError(f"{path.name} does not compile with {self.version}:\n{log}")
            return Cubin(output.read_bytes(), log)


class Nvrtc:
    """The run-time compilation library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"nvrtc {major.value}.{minor.value}"
        self.major = major.value

    def compile(self, path: Path, options: list[str], arch: str, generated: str) -> Cubin:
        headers = {file.name: file.read_text() for file in path.parent.glob("*.cuh")} | {"generated.cuh": generated}
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        program = ctypes.c_void_p()
        library = self._library
        library.nvrtcCreateProgram(
            ctypes.byref(program), path.read_bytes(), path.name.encode(), len(headers), texts, names
        )
        try:
            flags = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v", *options]
            arguments = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            code = library.nvrtcCompileProgram(program, len(flags), arguments)
            log = self._read(program, "ProgramLog")
            if code:
                raise CompileError(f"{path.name} does not compile with {self.version}:\n{log.decode()}")
            return Cubin(self._read(program, "CUBIN"), log.decode())
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw if what == "CUBIN" else buffer.value


def _nvrtc_candidates() -> list[str]:
    patterns = ("nvidia/cu*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
    found = [
        file for root in sys.path if root for pattern in patterns for file in glob.glob(os.path.join(root, pattern))
    ]
    named = ctypes.util.find_library("nvrtc")
    return sorted(found, reverse=True) + ([named] if named else [])


@functools.cache
def find_compiler() -> Nvrtc | Nvcc:
    """NVRTC of CUDA 12.4 or later from torch's packages or the system, else nvcc on the PATH or in /usr/local/cuda.

    Raises:
        CompileError: neither is there.
    """
    for candidate in _nvrtc_candidates():
        try:
            # NVRTC opens its built-in functions by bare name; they lie beside it, which the loader does not search.
            for builtins in glob.glob(os.path.join(os.path.dirname(candidate), "libnvrtc-builtins.so.*")):
                ctypes.CDLL(builtins)
            compiler = Nvrtc(ctypes.CDLL(candidate))
        except (OSError, AttributeError):
            continue
        if compiler.major >= 12:
            return compiler
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is not None:
        return Nvcc(nvcc)
    raise CompileError(
        "no CUDA compiler was found: install the nvidia-cuda-nvrtc package (it comes with torch's CUDA builds) "
        "or put nvcc on the PATH"
    )


def has_compiler() -> bool:
    """Whether :func:`compile_cubin` can compile at all."""
    try:
        find_compiler()
    except CompileError:
        return False
    return True
