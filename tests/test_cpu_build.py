"""Building the CPU library: the cache, concurrent builds, no compiler, and the code of other instruction sets.

Vector widths and matrix tiles that this machine may not have are tested by emulation: the same source, compiled for
other lane counts and with AMX tiles in plain C++.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from magi_flex.kernels import jit
from magi_flex.kernels.cpu import CpuBackend
from magi_flex.kernels.sources import native_sources
from tests.cases.masks import make_mask
from tests.test_cpu_kernel import SCORE_CASES, causal_mask, check, random_inputs

needs_compiler = pytest.mark.skipif(jit.find_compiler() is None, reason="no C++ compiler")
IS_X86 = platform.machine() in ("x86_64", "AMD64")
NO_F16C = ("-mno-f16c",) if IS_X86 else ()  # so that float16 is converted in plain C++
x86 = pytest.mark.skipif(not IS_X86, reason="x86 instruction sets")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jit.load.cache_clear()
    yield tmp_path / "magi_flex" / "cpu"
    jit.load.cache_clear()


def fake_compiler(folder: Path, body: str) -> Path:
    """A compiler that copies an existing library to its -o argument, after ``body``."""
    library = jit.build()
    path = folder / "fake-g++"
    path.write_text(f'#!/bin/sh\n{body}\nfor last; do :; done\ncp "{library}" "$last"\n')
    path.chmod(0o755)
    return path


@needs_compiler
def test_one_build_however_many_ask(tmp_path: Path) -> None:
    count = tmp_path / "count"
    compiler = fake_compiler(tmp_path, f'echo built >> "{count}"; sleep 0.3')
    environment = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    root = Path(jit.__file__).parents[2]
    command = (sys.executable, "-m", "magi_flex.kernels.jit")
    processes = [
        subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    printed = {process.communicate()[0] for process in processes}
    assert all(process.returncode == 0 for process in processes) and len(printed) == 1
    assert count.read_text() == "built\n"
    library = Path(printed.pop().strip())
    assert library.exists() and [x.suffix for x in library.parent.iterdir() if x.suffix != ".lock"] == [".so"]


def test_a_temporary_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = jit.cache_directory()
    assert folder.is_dir() and folder.parent.parent == tmp_path
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 1 << 20)  # somebody else made ours
    (tmp_path / f"magi_flex-{1 << 20}").mkdir()
    with pytest.raises(jit.BuildError, match="belongs to another user"):
        jit.cache_directory()


def test_without_a_compiler(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "find_compiler", lambda: None)
    backend = CpuBackend()
    with caplog.at_level(logging.WARNING, logger="magi_flex"):
        reasons = {backend.missing(torch.device("cpu")) for _ in range(3)}
    (reason,) = reasons
    assert reason is not None and "no C++ compiler" in reason and "install" in reason
    assert len(caplog.records) == 1  # said once


@needs_compiler
def test_a_source_that_does_not_compile(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    reason = CpuBackend().missing(torch.device("cpu"))
    assert reason is not None and "no such thing" in reason
    assert not list(empty_cache.glob("*.so"))


def test_the_name_follows_sources_and_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = jit.library_name()
    monkeypatch.setattr(jit, "processor_features", lambda: "another processor")
    assert jit.library_name() != name
    monkeypatch.undo()
    assert jit.library_name() == name
    copy = tmp_path / "cpu"
    shutil.copytree(native_sources("cpu"), copy)
    monkeypatch.setattr(jit, "native_sources", lambda family: copy)
    assert jit.library_name() == name
    (copy / "simd.h").write_text((copy / "simd.h").read_text() + "\n// changed\n")
    assert jit.library_name() != name


@needs_compiler
@x86
@pytest.mark.parametrize(
    "options",
    [
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mamx-tile", "-mamx-bf16"),
        ("-march=x86-64",),
    ],
    ids=["avx512-and-amx", "sse2"],
)
def test_other_instruction_sets_compile(options: tuple[str, ...], tmp_path: Path) -> None:
    compiler = jit.find_compiler()
    source = native_sources("cpu") / "attention.cpp"
    command = (compiler, "-std=c++20", "-O0", "-Wall", "-Werror", "-Wno-psabi", *options, "-c", source)
    done = subprocess.run((*command, "-o", tmp_path / "x.o"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(
    scope="module",
    params=[("-DMAGI_LANES=16", "-DMAGI_EMULATE_AMX"), ("-DMAGI_LANES=4", *NO_F16C)],
    ids=["16-lanes-and-amx", "4-lanes"],
)
def other_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = jit.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("library") / "other.so"
    jit.compile_library(path, compiler, ("-O1", *request.param))
    return ctypes.CDLL(str(path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "dim", "v_dim"),
    [("causal", 64, 64), ("sink_and_window", 40, 24), ("document_causal", 16, 33), ("dense_table", 7, 16)],
)
def test_other_widths_and_tiles(
    other_library: ctypes.CDLL, name: str, dim: int, v_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "load", lambda: other_library)
    case = make_mask(name, 150, 213)
    q, k, v = random_inputs(case.batch, 2, 1, 150, 213, dim, v_dim, dtype)
    check(q, k, v, case.dense())


@pytest.mark.parametrize("score", ["softcap", "all_in_turn"])
def test_other_widths_with_score_steps(other_library: ctypes.CDLL, score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "load", lambda: other_library)
    steps, score_mod = SCORE_CASES[score]
    q, k, v = random_inputs(2, 4, 2, 150, 170, 16, 24, torch.bfloat16)
    check(q, k, v, make_mask("sink_and_window", 150, 170).dense(), score_mod=score_mod, steps=steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_widths_with_few_queries(
    other_library: ctypes.CDLL, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "load", lambda: other_library)
    for q_len, dim, v_dim in ((1, 64, 64), (3, 21, 40)):
        q, k, v = random_inputs(1, 4, 2, q_len, 5000, dim, v_dim, dtype)
        check(q, k, v, torch.ones(1, 1, q_len, 5000, dtype=torch.bool))


def test_other_widths_with_strides(other_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "load", lambda: other_library)
    q, k, v = random_inputs(1, 4, 2, 70, 45, 48, 32, torch.bfloat16)
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    check(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, causal_mask(70, 45))
