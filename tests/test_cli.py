"""The command line: what it prints is what the library says; bad use gets one line, not a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import magi_flex
from magi_flex import cli, doctor, mods
from magi_flex.kernels import route


def test_doctor_as_a_module_in_a_fresh_process() -> None:
    done = subprocess.run(
        (sys.executable, "-m", "magi_flex", "doctor"),
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    for heading in ("Software", "Processor and native code", "GPU", "Distributed", "Attention backends"):
        assert heading in done.stdout
    assert (done.returncode == 1) == ("MISSING" in done.stdout)


def test_doctor_as_json(capsys) -> None:
    cli.main(["doctor", "--json"])
    checks = json.loads(capsys.readouterr().out)
    assert {"topic", "name", "ok", "detail", "remedy"} == set(checks[0])
    assert set(route.backend_names()) <= {check["name"] for check in checks}


def test_doctor_without_a_compiler_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    (found,) = [check for check in doctor.examine() if check.name == "C++ compiler"]
    assert found.ok is False and "/nowhere/g++" in found.detail and "apt-get install g++" in found.remedy


def test_doctor_refuses_an_old_torch(monkeypatch) -> None:
    monkeypatch.setattr(doctor.torch, "__version__", "2.10.1+cpu")
    (found,) = [check for check in doctor.examine() if check.name == "torch"]
    assert found.ok is False and "2.11" in found.remedy


def test_report_shows_remedies_under_what_is_missing() -> None:
    checks = [doctor.Check("A", "x", True, "fine"), doctor.Check("B", "yy", False, "gone", "get it")]
    lines = doctor.report(checks).split("\n")
    assert lines[0] == "A" and lines[1].split() == ["ok", "x", "fine"]
    assert lines[3] == "B" and lines[4].split() == ["MISSING", "yy", "gone"] and lines[5].strip() == "-> get it"


def test_explain_lists_the_masks(capsys) -> None:
    assert cli.main(["explain"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == list(mods.names())


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (129, 257)])
def test_explain_every_mask_by_name(q_len: int, kv_len: int, capsys) -> None:
    for name in mods.names():
        assert cli.main(["explain", name, "--q-len", str(q_len), "--kv-len", str(kv_len), "--device", "cpu"]) == 0, name
        assert f"{name}: {q_len} queries x {kv_len} keys" in capsys.readouterr().out


def test_explain_hands_the_call_on(capsys) -> None:
    call = ["--heads", "6:2", "--head-dim", "80", "--dtype", "float64", "--inference", "--device", "cpu"]
    assert cli.main(["explain", "causal", "--q-len", "64", *call]) == 0
    assert "for float64, heads 6:2, D=80, inference, on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "no_such_mask"], "no_such_mask"),
        (["explain", "causal", "--heads", "a:b"], "--heads: 'a:b' given"),
        (["explain", "causal", "--heads", "8:3"], "heads: (8, 3) given"),
        (["explain", "causal", "--q-len", "-4"], "-4"),
        (["bench", "no_such_benchmark"], "no_such_benchmark given, allowed are"),
    ],
)
def test_bad_use_is_one_line(arguments: list[str], message: str, capsys) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err and printed.err.count("\n") == 1


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, capsys) -> None:
    for name in ("matplotlib", "matplotlib.axes", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["explain", "causal", "--q-len", "8", "--device", "cpu", "--plot", "map.png"]) == 2
    assert "pip install 'magi-flex[plot]'" in capsys.readouterr().err


def test_bench_lists_the_scripts_of_the_checkout(capsys) -> None:
    assert cli.main(["bench", "--list"]) == 0
    names = capsys.readouterr().out.split()
    folder = Path(magi_flex.__file__).parents[1] / "benchmarks"
    assert names and all((folder / f"bench_{name}.py").exists() for name in names)


def test_bench_passes_over_what_does_not_fit_and_reports_failures(tmp_path, monkeypatch, capfd) -> None:
    root = Path(magi_flex.__file__).resolve().parents[1]
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "harness.py").write_text((root / "benchmarks" / "harness.py").read_text())
    (folder / "bench_big.py").write_text("from benchmarks.harness import leave\nleave('needs more')\n")
    (folder / "bench_good.py").write_text("print('measured')\n")
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "magi_flex" / "cli.py"))
    monkeypatch.setenv("PYTHONPATH", str(root))
    assert cli.main(["bench"]) == 0
    printed = capfd.readouterr().out
    assert "passed over: needs more" in printed and "measured" in printed
    (folder / "bench_bad.py").write_text("raise SystemExit(1)\n")
    assert cli.main(["bench", "bad"]) == 1
    assert "failed: bad" in capfd.readouterr().err
