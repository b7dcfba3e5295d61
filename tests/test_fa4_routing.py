"""What backend ``fa4`` says it serves, and its place among the backends."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from magi_flex.kernels import fa4, route
from magi_flex.kernels.fa4 import Fa4Backend, head_dim_objection
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.request import (
    Bias,
    Distance,
    RequestFacts,
    Softcap,
)

FACTS = RequestFacts(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    head_dim=128,
    v_head_dim=128,
    q_heads=8,
    kv_heads=2,
    score_steps=(),
    score_grads=False,
    needs_backward=True,
    has_bit_tiles=False,
)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"dtype": torch.float16}, None),
        ({"score_steps": (Softcap, Distance, Bias)}, None),
        ({"score_steps": None, "score_ops": frozenset({"aten::tanh", "aten::mul"})}, None),
        ({"deterministic": True, "needs_backward": False}, None),
        ({"index_map": True, "score_steps": (Softcap,)}, None),
        ({"dtype": torch.float32}, "serves bfloat16 and float16, not torch.float32"),
        ({"mixed_dtypes": True}, "one dtype"),
        ({"head_dim": 100}, "multiples of 8"),
        ({"has_bit_tiles": True}, "bit tiles"),
        ({"wide_results": True}, "inputs' dtype"),
        ({"max_score": True}, "largest scores"),
        ({"score_grads": True}, "gradients of what a score mod captures"),
        ({"deterministic": True}, "no fixed order"),
        ({"index_map": True, "score_steps": (Distance,)}, "local ones"),
        ({"index_map": True, "score_steps": None}, "local ones"),
        ({"score_steps": None, "score_ops": frozenset({"aten::erfinv"})}, "the score mod calls aten::erfinv"),
    ],
)
def test_objections(change: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "architecture", lambda device: 90)
    found = Fa4Backend().objections(replace(FACTS, **change))
    assert found == [] if reason is None else len(found) == 1 and reason in found[0]


def test_head_dims() -> None:
    served = [(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
    for arch, pair in itertools.product((90, 100, 103, 110), served):
        assert head_dim_objection(arch, *pair, needs_backward=False) is None
    assert head_dim_objection(90, 256, 256, True) is None
    assert "its backward for head dim 256" in str(head_dim_objection(100, 256, 256, True))
    for arch, pair in ((90, (264, 264)), (90, (64, 128)), (100, (192, 192)), (100, (256, 128)), (100, (100, 100))):
        assert head_dim_objection(arch, *pair, needs_backward=False)


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, gpu = Fa4Backend(), torch.device("cuda", 0)
    assert backend.missing(torch.device("cpu")) == "needs a CUDA device, not cpu"
    monkeypatch.setattr(fa4, "missing_package", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arch, fits in ((80, False), (90, True), (100, True), (103, True), (110, True), (120, False)):
        monkeypatch.setattr(fa4, "architecture", lambda device, arch=arch: arch)
        reason = backend.missing(gpu)
        assert reason is None if fits else f"this GPU has {arch // 10}.0" in str(reason)


def test_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    from magi_flex.kernels import fa4_package

    asked = fa4_package.missing_package.__wrapped__
    for release, reason in (("4.0.0b36", None), ("4.0.0b1", "not 4.0.0b1 (pip install 'magi-flex[fa4]')")):
        monkeypatch.setattr(fa4_package.importlib.metadata, "version", lambda name, release=release: release)
        assert asked() is None if reason is None else reason in str(asked())

    def absent(name: str) -> str:
        raise fa4_package.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fa4_package.importlib.metadata, "version", absent)
    assert asked() == "needs flash-attn-4 (pip install 'magi-flex[fa4]')"


def test_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    names = route.backend_names()
    assert names.index("ffa") + 1 == names.index("fa4") < names.index("triton")
    monkeypatch.setattr(fa4, "architecture", lambda device: 90)
    assert Fa4Backend().reservations(FACTS) == []
    assert "not been timed" in str(Fa4Backend().behind_stock(replace(FACTS, score_steps=None)))
    assert Fa4Backend().behind_stock(FACTS) is None
    (dims,) = Fa4Backend().reservations(replace(FACTS, head_dim=32, v_head_dim=32))
    assert "32 and 32" in dims
    monkeypatch.setattr(fa4, "architecture", lambda device: 103)
    assert Fa4Backend().reservations(FACTS) == ["its code for compute capability 10.3"]


def test_compiled_calls_leave_general_score_mods_to_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FfaBackend, "missing", lambda self, device: "absent")
    monkeypatch.setattr(Fa4Backend, "missing", lambda self, device: None)
    monkeypatch.setattr(fa4, "architecture", lambda device: 90)
    assert route.stock_is_faster(FACTS) is None
    assert "not been timed" in str(route.stock_is_faster(replace(FACTS, score_steps=None)))
