"""The driver of the GPU tests and benchmarks: what it leaves behind when things go wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import Step
from tests.gpu.conftest import pytest_runtest_makereport

# What `pytest -v` prints, with tests that hang and that lose the GPU unless they are deselected.
PYTEST = """
import sys, time
for test, verdict in (
    ("first", "PASSED"), ("fails", "FAILED"), ("hangs", ""), ("between", "PASSED"), ("loses[a - b]", "FAILED"),
    ("last", "PASSED"),
):
    name = "tests/test_some.py::test_" + test
    if "--deselect=" + name in sys.argv: continue
    print(name, end=" ", flush=True)
    if not verdict: time.sleep(100)
    print(verdict)
    if "loses" in test:
        print("!!!! Interrupted: " + name + " lost the GPU (an illegal access): run the tests behind it !!!!")
        sys.exit(2)
"""


def test_what_ends_a_process_is_named_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        Step("tests", ("-c", PYTEST, "pytest"), 6),
        Step("left-out", ("-c", ""), 9),
        Step("tests-bench", ("-c", "print(7)"), 30),
    ]
    monkeypatch.setattr(gpu_check, "steps", lambda out: steps)
    out = tmp_path / "out"
    assert gpu_check.main([str(out), "--only", "tests", "--limit", "60"]) == 1
    first, again, third, bench = json.loads((out / "summary.json").read_text())
    assert first["outcome"].startswith("stopped") and first["tests"] == {"PASSED": 1, "FAILED": 1}
    assert first["failed"] == ["tests/test_some.py::test_fails", "tests/test_some.py::test_hangs (hung)"]
    assert again["outcome"] == "exit 2" and again["tests"] == {"PASSED": 1, "FAILED": 1}
    assert again["failed"][-1] == "tests/test_some.py::test_loses[a - b] (lost the GPU)"
    assert third["outcome"] == "ok" and third["tests"] == {"PASSED": 1}
    assert bench["outcome"] == "ok" and (out / "tests-bench.log").read_text() == "7\n"


def test_a_session_ends_when_the_gpu_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore of it")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for failure, stops in ((object(), True), (None, False)):
        item: Any = SimpleNamespace(nodeid="tests/gpu/test_some.py::test_x", session=SimpleNamespace(shouldstop=False))
        hook = pytest_runtest_makereport(item, cast(Any, SimpleNamespace(excinfo=failure)))
        next(hook)
        with pytest.raises(StopIteration, match="the report"):
            hook.send("the report")
        if stops:
            assert "test_x lost the GPU (CUDA error: an illegal memory access)" in item.session.shouldstop
        else:
            assert item.session.shouldstop is False


def test_every_step_exists(tmp_path: Path) -> None:
    found = gpu_check.steps(tmp_path)
    assert found[0].name == "compile-ffa" and found[1].name == "tests-test_ffa_backward"
    files = [path for step in found for path in step.arguments if path.startswith("tests/gpu/")]
    assert sorted(files) == sorted(f"tests/gpu/{path.name}" for path in Path("tests/gpu").glob("test_*.py"))
