"""Everything that wants a GPU, in one call with a time limit: kernels are compiled, tests/gpu run, benchmarks run.

    python -m benchmarks.gpu_check OUT [--limit 570] [--only ffa] [--side-by-side]

What matters most comes first.  Every step writes its own log as it goes, and ``OUT/summary.json`` is written anew
after each of them, so that a run that is killed leaves what it has seen.  A test that hangs costs its file's time, is
named in the summary, and the rest of the file is run again without it.  Benchmarks write their results into OUT.
With ``--side-by-side`` all files of tests run at once, spread over the GPUs there are, and then one benchmark a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch

ROOT = Path(__file__).resolve().parents[1]
_FINISHED = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.MULTILINE)
# What tests/gpu/conftest.py says.
_LOST_GPU = re.compile(r"(tests/\S+::.+) lost the GPU \(")
_STARTED = re.compile(r"^(tests/\S+::.*?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: of the log, and what ``--only`` looks at.
        arguments: of Python.
        seconds: the most that it may take.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: int

    @property
    def is_test(self) -> bool:
        return "pytest" in self.arguments

    @property
    def all_gpus(self) -> bool:
        """Whether it uses every GPU that there is."""
        return "context-parallel" in self.name.replace("_", "-")


@dataclass
class Result:
    """What became of a step; ``tests`` counts outcomes."""

    name: str
    seconds: float
    outcome: str
    tests: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


# Files that exist are run in this order, other files of tests/gpu behind them.
TEST_SECONDS = {
    "test_ffa_backward.py": 240,
    "test_ffa_forward.py": 180,
    "test_triton.py": 180,
    "test_device_plans.py": 150,
    "test_compiled.py": 240,
    "test_fa4.py": 180,
}
OTHER_TEST_SECONDS = 120
# (module, arguments): likewise; "{out}" is the folder for results.
BENCHMARKS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    (
        "bench_ffa_backward",
        ("--lengths", "8192,32768", "--deterministic", "--softcap", "--rounds", "5", "--directory", "{out}"),
        150,
    ),
    (
        "bench_ffa_backward",
        ("--lengths", "8192", "--dims", "256,192:128,64", "--rounds", "5", "--directory", "{out}/dims"),
        120,
    ),
    ("bench_ffa", ("--lengths", "8192,32768", "--rounds", "5", "--directory", "{out}"), 120),
    ("bench_triton", ("--directory", "{out}"), 180),
    ("bench_device_plans", ("--directory", "{out}"), 120),
    ("bench_host", ("--directory", "{out}"), 60),
    ("bench_fa4", ("--directory", "{out}"), 180),
    ("bench_native_collectives", ("--directory", "{out}"), 60),
)


def steps(out: Path) -> list[Step]:
    """All steps, most important first."""
    found = [Step("compile-ffa", ("-m", "magi_flex.kernels.ffa_ahead", "--groups", "1,4,8"), 200)]
    files = {path.name: path for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))}
    for name in [*(n for n in TEST_SECONDS if n in files), *(n for n in files if n not in TEST_SECONDS)]:
        options = ("-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "--durations=10")
        path = str(files[name].relative_to(ROOT))
        seconds = TEST_SECONDS.get(name, OTHER_TEST_SECONDS)
        found.append(Step(f"tests-{files[name].stem}", ("-m", "pytest", *options, path), seconds))
    for number, (module, arguments, seconds) in enumerate(BENCHMARKS):
        if (ROOT / "benchmarks" / f"{module}.py").exists():
            filled = tuple(argument.format(out=out) for argument in arguments)
            found.append(Step(f"{module}-{number}", ("-m", f"benchmarks.{module}", *filled), seconds))
    if torch.cuda.device_count() > 1:
        module = "benchmarks.bench_context_parallel"
        ranks = ("--standalone", "--nproc-per-node", str(torch.cuda.device_count()))
        results = ("--directory", str(out), "--timeline", str(out))
        found.append(
            Step("bench_context_parallel", ("-m", "torch.distributed.run", *ranks, "-m", module, *results), 400)
        )
    return found


def run_step(step: Step, log: Path, seconds: float, skip: Sequence[str] = (), gpu: int | None = None) -> Result:
    """Runs it for at most that long.

    Args:
        log: where what it says goes.
        skip: tests that are left out.
        gpu: the only one that the process sees; None: all.
    """
    command = [sys.executable, "-u", *step.arguments, *(f"--deselect={test}" for test in skip)]
    environment = dict(os.environ) if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            code = process.wait(seconds)
            outcome = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            outcome = f"stopped after {seconds:.0f} s"
    text = log.read_text(errors="replace")
    result = Result(step.name, time.monotonic() - start, outcome)
    for test, verdict in _FINISHED.findall(text):
        result.tests[verdict] = result.tests.get(verdict, 0) + 1
        if verdict in ("FAILED", "ERROR"):
            result.failed.append(test)
    return result


def finished_and_last(log: Path, stopped: bool) -> tuple[list[str], str | None]:
    """Tests of a log that have an outcome, and the one that ended the process: it hung, or lost the GPU."""
    text = log.read_text(errors="replace")
    done = [test for test, _ in _FINISHED.findall(text)]
    if not stopped:
        lost = _LOST_GPU.search(text)
        return done, lost.group(1) if lost else None
    begun = _STARTED.findall(text)
    return done, begun[-1] if begun and text.rstrip().endswith(begun[-1]) else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for logs and results")
    parser.add_argument("--limit", type=float, default=570, help="seconds for everything")
    parser.add_argument("--side-by-side", action="store_true", help="tests at once, benchmarks one a GPU")
    parser.add_argument("--only", default="", help="comma separated: steps whose names contain one of these")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit
    wanted = [word for word in options.only.split(",") if word]
    results: list[Result] = []

    def left() -> float:
        return end - time.monotonic()

    lock = threading.Lock()

    def note(result: Result) -> None:
        with lock:
            results.append(result)
            (out / "summary.json").write_text(json.dumps([asdict(x) for x in results], indent=1) + "\n")
        tests = ", ".join(f"{count} {verdict.lower()}" for verdict, count in result.tests.items())
        print(
            f"{result.name}: {result.outcome}, {result.seconds:.0f} s {tests}", *result.failed, sep="\n  ", flush=True
        )

    def serve(step: Step, gpu: int | None) -> None:
        if left() < 5:
            return note(Result(step.name, 0, "no time left"))
        skip: list[str] = []
        for again in ("", "-again", "-again-2", "-again-3"):
            log = out / f"{step.name}{again}.log"
            result = run_step(step, log, min(step.seconds / (2 if again else 1), left()), skip, gpu)
            stopped = result.outcome.startswith("stopped")
            done, last = finished_and_last(log, stopped) if step.is_test else ([], None)
            if last is not None:
                result.failed.append(f"{last} ({'hung' if stopped else 'lost the GPU'})")
            note(result)
            if last is None or left() < 10:
                return
            skip += [*done, last]

    chosen = [s for s in steps(out) if not wanted or any(word in s.name for word in wanted)]
    if not options.side_by_side:
        for step in chosen:
            serve(step, None)
    else:
        gpus = range(torch.cuda.device_count())
        with ThreadPoolExecutor() as pool:
            tests = [s for s in chosen if not s.name.startswith("bench")]
            list(pool.map(lambda x: serve(x[1], None if x[1].all_gpus else gpus[x[0] % len(gpus)]), enumerate(tests)))
        free: SimpleQueue[int] = SimpleQueue()
        for gpu in gpus:
            free.put(gpu)

        def on_a_free_gpu(step: Step) -> None:
            gpu = free.get()
            serve(step, gpu)
            free.put(gpu)

        with ThreadPoolExecutor(len(gpus)) as pool:
            list(pool.map(on_a_free_gpu, [s for s in chosen if s.name.startswith("bench")]))
    return int(any(result.outcome != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
