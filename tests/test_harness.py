"""The benchmark harness: what it writes is what was measured, in the documented format."""

from __future__ import annotations

import json

import pytest

from benchmarks import harness
from benchmarks.harness import Row, Timing, attention_tflops, call_ms, interleave, ratio, table, write_results
from benchmarks.workloads import document_lengths


def test_interleave_runs_the_candidates_in_turn() -> None:
    calls: list[str] = []
    timings = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1)
    assert calls == ["a", "b"] + ["a", "b"] * 3
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_calls_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "time_once", lambda work, device: (work(), 6.0)[1])
    done: list[str] = []
    ms = call_ms({"a": lambda: done.append("a"), "missing": None, "b": lambda: done.append("b")}, 3, 2, "cpu")
    assert done[-12:] == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3 and ms == {"a": 2000.0, "b": 2000.0}


def test_ratio_is_taken_within_rounds() -> None:
    timings = {"ours": Timing((2.0, 20.0, 6.0)), "theirs": Timing((1.0, 10.0, 2.0))}
    assert ratio(timings, "ours", "theirs") == 2.0
    assert timings["ours"].median_ms == 6000.0
    assert timings["ours"].min_ms == 2000.0


def test_rates_count_multiply_and_add() -> None:
    assert attention_tflops(10**9, 2, 64, 64, "fwd", 1000.0) == pytest.approx(4 * 64 * 2 * 1e9 / 1e12)
    forward = attention_tflops(10**9, 2, 64, 128, "fwd", 1000.0)
    backward = attention_tflops(10**9, 2, 64, 128, "bwd", 1000.0)
    assert attention_tflops(10**9, 2, 64, 128, "fwd+bwd", 1000.0) == pytest.approx(forward + backward)


def test_result_file_has_the_documented_fields(tmp_path) -> None:
    row = Row("attention", "cpu", "causal", 4096, "8:8", 64, "float32", "fwd", 12.34567, 0.1, {"sdpa": 0.05})
    path = write_results("sample", [row], tmp_path)
    record = json.loads(path.read_text())
    assert set(record) == {"machine", "date", "commit", "versions", "rows"}
    assert {"python", "torch"} <= set(record["versions"])
    assert record["rows"] == [
        {
            "bench": "attention",
            "backend": "cpu",
            "mask": "causal",
            "S": 4096,
            "heads": "8:8",
            "D": 64,
            "dtype": "float32",
            "direction": "fwd",
            "ms": 12.35,
            "tflops": 0.1,
            "beside": {"sdpa": 0.05},
        }
    ]
    assert "sdpa 0.05" in table([row])


@pytest.mark.parametrize("tokens", [4, 1000, 8192])
def test_document_lengths_fill_the_sequence(tokens: int) -> None:
    lengths = document_lengths(tokens, seed=3)
    assert sum(lengths) == tokens
    assert min(lengths) >= 1 and max(lengths) <= tokens // 4
    assert lengths == document_lengths(tokens, seed=3) != document_lengths(tokens, seed=4) or tokens == 4
