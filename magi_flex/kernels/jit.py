"""Build the C++ attention library of ``csrc/cpu`` at first use, and keep it on disk.

The library has a plain C interface and includes no torch headers: it compiles in seconds and does not depend on torch's
version.  A file in the cache is named after everything that decides its code: the sources, the options and the
processor's features; so a changed source, or a home directory shared by unlike machines, never loads a stale build.

    python -m magi_flex.kernels.jit        # build ahead of time, e.g. when an image is made
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from magi_flex.kernels.cache_folder import cache_folder
from magi_flex.kernels.sources import native_sources

logger = logging.getLogger("magi_flex")

COMPILERS = ("g++", "clang++", "c++")
# No -ffast-math: infinities and NaN must keep their meaning, sums their order.
# Hidden symbols: two builds of the library in one process must not share their inline functions' statics.
OPTIONS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)
# Tried in turn: not every compiler knows the processor, and Apple's comes without OpenMP (std::thread takes over).
TARGETS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())


class BuildError(RuntimeError):
    """The native library can neither be built nor found in the cache."""


def cache_directory() -> Path:
    """Where builds are kept; raises BuildError, see :func:`cache_folder`."""
    return cache_folder("cpu", BuildError)


def processor_features() -> str:
    """What -march=native looks at: the architecture and the instruction sets that the operating system allows."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        wanted = ("flags", "Features", "model name", "CPU part", "CPU implementer")
        lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(wanted)]
    return "\n".join((platform.system(), platform.machine(), platform.processor(), *sorted(set(lines))))


def library_name() -> str:
    """File name of the library for these sources, these options and this processor."""
    digest = hashlib.sha256()
    for file in sorted(native_sources("cpu").glob("*.[ch]*")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(repr((OPTIONS, TARGETS, processor_features())).encode())
    return f"attention-{digest.hexdigest()[:32]}.so"


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX`` if it is set and exists, else the first of COMPILERS on the path."""
    candidates = (os.environ.get("CXX", ""), *COMPILERS)
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def compile_library(output: Path, compiler: str, extra: tuple[str, ...] = ()) -> None:
    """Compile ``csrc/cpu`` into ``output``.

    Raises:
        BuildError: no set of options compiles; the message ends with the compiler's first complaint.
    """
    source = native_sources("cpu") / "attention.cpp"
    complaint = ""
    for target in TARGETS:
        command = [compiler, *OPTIONS, *target, *extra, str(source), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        complaint = complaint or done.stderr
    raise BuildError(f"{compiler} cannot compile {source}:\n{complaint[-2000:]}")


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Only one process at a time inside, even where many start at once."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build() -> Path:
    """The library's path; compiles it if the cache does not have it.

    Raises:
        BuildError: it is not in the cache, and there is no compiler or the sources do not compile.
    """
    folder = cache_directory()
    path = folder / library_name()
    if path.exists():
        return path
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)}, and $CXX); install g++ or clang++")
    with _exclusive(folder / f"{path.stem}.lock"):
        if path.exists():  # another process was faster
            return path
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            unfinished = Path(temporary) / path.name
            compile_library(unfinished, compiler)
            os.replace(unfinished, path)  # atomic: no one ever sees half a library
        logger.info("built the CPU attention library in %.1f s: %s", time.perf_counter() - start, path)
    return path


@functools.cache
def load() -> ctypes.CDLL | BuildError:
    """The loaded library, or why there is none (said once, as a warning)."""
    try:
        import torch  # noqa: F401  first, so that both share one OpenMP runtime and its threads

        return ctypes.CDLL(str(build()))
    except (BuildError, OSError, ImportError) as error:
        logger.warning("the native CPU kernels are not available, a slower kernel takes over: %s", error)
        return error if isinstance(error, BuildError) else BuildError(str(error))


if __name__ == "__main__":
    print(build())
