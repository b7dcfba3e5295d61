"""The driver of the GPU tests and benchmarks: what it leaves behind when things go wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Step

# What `pytest -v` prints, with a test that hangs unless it is deselected.
PYTEST = """
import sys, time
for test, verdict in (("first", "PASSED"), ("fails", "FAILED"), ("hangs", ""), ("last", "PASSED")):
    name = "tests/test_some.py::test_" + test
    if "--deselect=" + name in sys.argv: continue
    print(name, end=" ", flush=True)
    if not verdict: time.sleep(100)
    print(verdict)
"""


def test_a_hanging_test_is_named_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        Step("tests", ("-c", PYTEST, "pytest"), 6),
        Step("left-out", ("-c", ""), 9),
        Step("tests-bench", ("-c", "print(7)"), 30),
    ]
    monkeypatch.setattr(gpu_check, "steps", lambda out: steps)
    out = tmp_path / "out"
    assert gpu_check.main([str(out), "--only", "tests", "--limit", "60"]) == 1
    first, again, bench = json.loads((out / "summary.json").read_text())
    assert first["outcome"].startswith("stopped") and first["tests"] == {"PASSED": 1, "FAILED": 1}
    assert first["failed"] == ["tests/test_some.py::test_fails", "tests/test_some.py::test_hangs (hung)"]
    assert again["outcome"] == "ok" and again["tests"] == {"PASSED": 1}
    assert bench["outcome"] == "ok" and (out / "tests-bench.log").read_text() == "7\n"


def test_every_step_exists(tmp_path: Path) -> None:
    found = gpu_check.steps(tmp_path)
    assert found[0].name == "compile-ffa" and found[1].name == "tests-test_ffa_backward"
    files = [path for step in found for path in step.arguments if path.startswith("tests/gpu/")]
    assert sorted(files) == sorted(f"tests/gpu/{path.name}" for path in Path("tests/gpu").glob("test_*.py"))
