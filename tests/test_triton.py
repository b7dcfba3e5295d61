"""The triton backend without a GPU: routing, interpreted kernels, and kernels compiled for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from magi_flex.kernels import triton_configs
from magi_flex.kernels.request import RequestFacts
from magi_flex.kernels.route import explain_route, load, route
from magi_flex.kernels.triton_backend import TritonBackend
from magi_flex.kernels.triton_configs import (
    LARGEST_HEAD_DIM,
    Tiles,
    fit,
    packing,
    shared_bytes,
    split_count,
    tiles_for,
)

ROOT = Path(__file__).resolve().parents[1]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
GPU = RequestFacts(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    head_dim=128,
    v_head_dim=64,
    q_heads=8,
    kv_heads=2,
    score_steps=None,
    score_grads=True,
    needs_backward=True,
    has_bit_tiles=True,
)


def run(*command: str, timeout: int, **variables: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@needs_triton
def test_interpreted() -> None:
    output = run("-m", "pytest", "-q", "-p", "no:xdist", "tests/interpreted", timeout=900, TRITON_INTERPRET="1")
    assert " passed" in output and "skipped" not in output


def ahead_of_time(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Records of the kernels that were compiled."""
    output = run("-m", "tests.ahead_of_time", *arguments, timeout=600, TRITON_CACHE_DIR=str(folder))
    return [json.loads(line) for line in output.splitlines()]


@needs_triton
def test_compiled_for_hopper(tmp_path: Path) -> None:
    """A kernel that runs out of registers has every product wait for the one before: as many groups as products."""
    records = ahead_of_time(tmp_path, "90", "--head-dim", "64", "--hopper")
    three = ["forward_kernel", "kv_kernel", "q_kernel"]
    assert [record["kernel"] for record in records] == [three[0], "delta_kernel", *three[1:], *three]
    for record in records:
        assert record["spilled"] <= 128 and record["shared"] <= 227 << 10
        if record["kernel"] != "delta_kernel":
            assert record["cp.async"] and 0 < 2 * record["hgmma_groups"] <= record["hgmma"]


@needs_triton
def test_every_feature_compiles(tmp_path: Path) -> None:
    """The compiler is stricter than the interpreter."""
    records = ahead_of_time(tmp_path, "80", "--features")
    kernels = {record["kernel"] for record in records}
    assert kernels == {"forward_kernel", "delta_kernel", "kv_kernel", "q_kernel", "merge_kernel"}
    assert len(records) == 14 and all(record["spilled"] <= 128 for record in records)


def test_it_is_chosen_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load("triton"), TritonBackend)
    on_cpu = replace(GPU, device=torch.device("cpu"))
    assert len(dict(explain_route(on_cpu))["triton"]) == 1 and route(on_cpu).name == "tiled"
    monkeypatch.setattr(TritonBackend, "missing", lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    ran = replace(GPU, device=torch.device("cpu"), head_dim=72)
    assert route(ran).name == route(ran, "triton").name == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    not_run = replace(ran, head_dim=80)
    assert route(not_run).name == "tiled" and route(not_run, "triton").name == "triton"
    assert "compute capability 8.6 has not run on a GPU yet" in dict(explain_route(not_run))["triton"][0]


def test_objections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_configs, "shared_limit", lambda device: 227 << 10)
    backend = TritonBackend()
    assert backend.objections(GPU) == []
    assert backend.objections(replace(GPU, dtype=torch.float32, head_dim=1, v_head_dim=LARGEST_HEAD_DIM)) == []
    assert backend.objections(replace(GPU, score_ops=frozenset({"aten::tanh", "aten::index", "sum"}))) == []
    for facts, reason in (
        (replace(GPU, dtype=torch.float64), "not float64"),
        (replace(GPU, mixed_dtypes=True), "one dtype"),
        (replace(GPU, head_dim=LARGEST_HEAD_DIM + 1), "not 513 and 64"),
        (replace(GPU, score_ops=frozenset({"aten::bucketize"})), "aten::bucketize"),
        (replace(GPU, deterministic=True), "no fixed order"),
    ):
        (objection,) = backend.objections(facts)
        assert reason in objection
    assert backend.objections(replace(GPU, deterministic=True, score_grads=False)) == []
    monkeypatch.setattr(triton_configs, "shared_limit", lambda device: 99 << 10)
    wide = replace(GPU, head_dim=512, v_head_dim=512)
    assert backend.objections(wide) == []
    (objection,) = backend.objections(replace(wide, dtype=torch.float32))
    assert "too little shared memory for head dims 512 and 512 in float32" in objection
    assert "needs an NVIDIA GPU, not cpu" in str(backend.missing(torch.device("cpu"))) or "package triton" in str(
        backend.missing(torch.device("cpu"))
    )


def test_tiles_fit_into_shared_memory() -> None:
    cpu = torch.device("cpu")
    for direction in ("forward", "kv", "q"):
        for dtype in (torch.float32, torch.float16):
            for head_dim, v_dim in ((16, 16), (64, 64), (128, 64), (128, 128), (256, 256), (16, 512), (512, 512)):
                tiles = tiles_for(direction, dtype, head_dim, v_dim, cpu)
                for limit in (227 << 10, 163 << 10, 99 << 10):
                    smaller = fit(direction, tiles, head_dim, v_dim, dtype.itemsize, limit)
                    least = Tiles(16, 16, smaller.warps, 1)
                    needed = shared_bytes(direction, smaller, head_dim, v_dim, dtype.itemsize)
                    assert needed <= limit or smaller == least
                    assert 16 <= smaller.rows <= 128 and 16 <= smaller.keys <= 128 and smaller.stages >= 1


@needs_triton
def test_search_keeps_the_fastest_that_runs() -> None:
    from magi_flex.kernels.triton_search import candidates, search

    def time_ms(direction: str, dtype: torch.dtype, head_dim: int, tiles: Tiles) -> float:
        if tiles.stages == 4:
            raise RuntimeError("out of resources")
        return 1 / (tiles.rows * tiles.keys * tiles.stages) + tiles.warps

    best = search(time_ms, 227 << 10)
    assert best["forward:2:64"] == Tiles(128, 128, 4, 3) and len(best) == 18
    for head_dim in (64, 256):
        for tiles in candidates("kv", head_dim, 2, 99 << 10):
            assert shared_bytes("kv", tiles, head_dim, head_dim, 2) <= 99 << 10


def test_packing_and_splits() -> None:
    assert packing(q_len=1, group=8, mask_heads=1, rows=128) == (16, 8)
    assert packing(q_len=3, group=6, mask_heads=1, rows=128) == (16, 2)
    assert packing(q_len=5, group=8, mask_heads=8, rows=128) == (16, 1)
    assert packing(q_len=100, group=8, mask_heads=1, rows=64) == (64, 1)
    assert packing(q_len=17, group=4, mask_heads=1, rows=128) == (128, 4)
    assert split_count(programs=200, kv_len=1 << 20, keys=64, processors=132) == 1
    assert split_count(programs=8, kv_len=1 << 20, keys=64, processors=132) == 33
    assert split_count(programs=8, kv_len=300, keys=64, processors=132) == 1
