"""Interleaved timing and the result format that every benchmark of this project writes.

A result file is ``{"machine", "date", "commit", "versions": {...}, "rows": [...]}``; a row is one :class:`Row`.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from magi_flex.cli import PASSED_OVER

RESULTS = Path(__file__).parent / "results"
Work = Callable[[], object]


@dataclass
class Row:
    """One measurement, and the same work done by others in the same run.

    Attributes:
        bench: what is measured: "attention", "plan", "dispatch", ...
        backend: what did the work: "cpu", "ffa", "fa4", "triton", "tiled", "symbolic", ...
        mask: the mask's name; ``S`` its length in tokens.
        heads: "query:key/value", e.g. "64:8"; D: head dim; dtype: "float32", "bfloat16", ...
        direction: "fwd", "bwd" or "fwd+bwd".
        ms: median milliseconds.
        tflops: 1e12 floating point operations a second over the attended pairs (None where that means nothing).
        beside: name -> the same work done otherwise, in tflops where ``tflops`` is given and in ms otherwise.
        more: whatever else the measurement has to say (memory, recompilations, ...), with the unit in the key.
    """

    bench: str
    backend: str
    mask: str
    S: int
    heads: str | None = None
    D: int | None = None
    dtype: str | None = None
    direction: str | None = None
    ms: float | None = None
    tflops: float | None = None
    beside: dict[str, float] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Seconds of each repetition, in the order they ran."""

    seconds: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)

    @property
    def min_ms(self) -> float:
        return 1e3 * min(self.seconds)


def leave(reason: str) -> NoReturn:
    """End a benchmark that this machine cannot run, so that ``magi-flex bench`` passes it over."""
    print(f"passed over: {reason}")
    sys.exit(PASSED_OVER)


def time_once(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 11,
    warmup: int = 2,
    seconds: float = 0.0,
    device: torch.device | str = "cpu",
) -> dict[str, Timing]:
    """Time the candidates in turn, round after round, so that a change of the machine's speed meets all of them alike.

    Args:
        candidates: name -> function of no arguments that does the work once.
        repeats: rounds at least; further ones follow until ``seconds`` have passed.
        warmup: calls of each candidate before the first round.
        device: "cuda" takes CUDA events, anything else the wall clock.
    """
    device = torch.device(device)
    for work in candidates.values():
        for _ in range(warmup):
            work()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    rounds = 0
    while rounds < repeats or time.perf_counter() - start < seconds:
        for name, work in candidates.items():
            samples[name].append(time_once(work, device))
        rounds += 1
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


def call_ms(works: Mapping[str, Work | None], calls: int, rounds: int, device: torch.device | str) -> dict[str, float]:
    """Median milliseconds of a call, of those works that are there, in turn.

    Args:
        calls: measured together, so that nobody waits for the host where they are short.
    """

    def several(work: Work) -> Work:
        return lambda: [work() for _ in range(calls)]

    candidates = {name: several(work) for name, work in works.items() if work is not None}
    timings = interleave(candidates, repeats=rounds, device=device)
    return {name: timing.median_ms / calls for name, timing in timings.items()}


def ratio(timings: Mapping[str, Timing], name: str, reference: str) -> float:
    """Median over rounds of time(name) / time(reference): steadier on a loaded machine than a ratio of medians."""
    pairs = zip(timings[name].seconds, timings[reference].seconds, strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def attention_tflops(area: int, heads: int, head_dim: int, v_head_dim: int, direction: str, ms: float) -> float:
    """Rate over the attended pairs: two matrix products forward, five backward (two floating point operations a MAC).

    Args:
        area: attended (query, key) pairs of one head, summed over the batch.
    """
    forward = 2 * (head_dim + v_head_dim)
    backward = 2 * (3 * head_dim + 2 * v_head_dim)
    per_pair = {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[direction]
    return area * heads * per_pair / (ms * 1e9)


def machine() -> str:
    """This machine in words: processor, cores, memory, ISA extensions that matter here, GPU."""
    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores", torch.backends.cpu.get_cpu_capability()]
    if hasattr(os, "sysconf"):
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        parts.append(f"{gib:.0f} GiB")
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, as far as it is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "flash-attn-4", "magi-attention"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checked-out commit, with "+" where tracked files differ from it; "unknown" outside of a repository."""
    root = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(("git", *args), cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_results(name: str, rows: list[Row], directory: Path = RESULTS) -> Path:
    """Write ``directory/name.json`` and return its path."""
    record = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "versions": versions(),
        "rows": [_compact(row) for row in rows],
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _compact(row: Row) -> dict[str, Any]:
    """The row without what it does not state, figures rounded to four digits."""
    stated = {key: value for key, value in dataclasses.asdict(row).items() if value not in (None, {})}
    return {key: _rounded(value) for key, value in stated.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def table(rows: list[Row]) -> str:
    """The rows as aligned text, for the terminal."""
    lines: list[tuple[str, ...]] = [
        ("bench", "backend", "mask", "S", "heads", "D", "dtype", "dir", "ms", "TFLOP/s", "beside")
    ]
    for row in rows:
        beside = "  ".join(f"{name} {value:.4g}" for name, value in row.beside.items())
        figures = (row.S, row.heads, row.D, row.dtype, row.direction, row.ms, row.tflops)
        cells = ["" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x) for x in figures]
        lines.append((row.bench, row.backend, row.mask, *cells, beside))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, [*widths, 0], strict=True)) for line in lines)
