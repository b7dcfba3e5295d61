"""Which backend serves what, and when a compiled call is better left to PyTorch."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import magi_flex
from inductor_lowering import translate
from magi_flex.kernels import route as backend_registry
from magi_flex.kernels import triton_backend, triton_configs
from magi_flex.kernels.request import Backend, Bias, Distance, Multiply, RequestFacts, Softcap
from magi_flex.kernels.route import explain_route, route, stock_is_faster
from magi_flex.score_steps import step_types
from tests.compiling import attend, qkv

FACTS = RequestFacts(
    device=torch.device("cpu"),
    dtype=torch.float32,
    head_dim=64,
    v_head_dim=64,
    q_heads=8,
    kv_heads=2,
    score_steps=(),
    score_grads=False,
    needs_backward=True,
    has_bit_tiles=False,
)


def test_auto_takes_the_first_that_does_not_object() -> None:
    for facts in (
        FACTS,
        replace(FACTS, score_steps=None),
        replace(FACTS, score_grads=True),
        replace(FACTS, dtype=torch.float64),
        replace(FACTS, score_steps=(Softcap, Distance), needs_backward=False),
        replace(FACTS, has_bit_tiles=True),
    ):
        table = explain_route(facts)
        willing = [name for name, reasons in table if not reasons]
        assert willing[-1] == "tiled" and route(facts).name == willing[0]
        for name, reasons in table:
            if reasons:
                with pytest.raises(ValueError, match=f"backend: '{name}' was asked for but cannot serve"):
                    route(facts, name)
            else:
                assert route(facts, name).name == name


def test_what_has_not_run_is_taken_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def reservations(self: Backend, facts: RequestFacts) -> list[str]:
        return ["its kernel for head dims 57 and 64"] if facts.head_dim == 57 else []

    monkeypatch.setattr(type(backend_registry.load("cpu")), "missing", lambda self, device: None)
    monkeypatch.setattr(type(backend_registry.load("cpu")), "reservations", reservations)
    backend_registry.route.cache_clear()
    reserved = replace(FACTS, head_dim=57)
    assert dict(explain_route(reserved))["cpu"] == [
        "its kernel for head dims 57 and 64 has not run on a GPU yet, so it must be chosen by name (backend='cpu')"
    ]
    assert not dict(explain_route(reserved, "cpu"))["cpu"] and dict(explain_route(reserved, "tiled"))["cpu"]
    try:
        assert route(reserved).name == "tiled" and route(reserved, "cpu").name == "cpu"
        assert route(replace(FACTS, head_dim=59)).name == "cpu"
    finally:
        backend_registry.route.cache_clear()


def test_on_a_gpu_stock_kernels_beat_the_tiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from magi_flex.kernels.ffa import FfaBackend

    monkeypatch.setattr(FfaBackend, "missing", lambda self, device: None)
    gpu = replace(FACTS, device=torch.device("cuda", 0), dtype=torch.bfloat16, head_dim=128, v_head_dim=128)
    assert stock_is_faster(gpu) is None
    assert stock_is_faster(replace(gpu, score_steps=(Multiply,))) is None
    assert stock_is_faster(replace(gpu, score_steps=(Softcap, Bias), needs_backward=False)) is None
    assert stock_is_faster(replace(gpu, score_steps=None)) is None
    unknown = stock_is_faster(replace(gpu, score_steps=None, score_ops=frozenset({"aten::bucketize"})))
    assert unknown is not None and "ffa: cannot generate code for aten::bucketize" in unknown
    assert stock_is_faster(replace(gpu, score_grads=True)) is None
    assert "in no fixed order" in str(stock_is_faster(replace(gpu, score_grads=True, deterministic=True)))
    assert stock_is_faster(replace(gpu, head_dim=256, v_head_dim=256)) is None
    # What PyTorch's kernels do not serve either stays with ours.
    assert stock_is_faster(replace(gpu, dtype=torch.float64)) is None
    assert stock_is_faster(replace(gpu, score_steps=None, head_dim=8)) is None


def test_stock_keeps_what_triton_was_not_timed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from magi_flex.kernels.ffa import FfaBackend
    from magi_flex.kernels.triton_backend import TritonBackend

    monkeypatch.setattr(triton_configs, "shared_limit", lambda device: 227 << 10)
    monkeypatch.setattr(FfaBackend, "missing", lambda self, device: "is not there")
    monkeypatch.setattr(TritonBackend, "missing", lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = replace(FACTS, device=torch.device("cuda", 0), dtype=torch.bfloat16, score_steps=(), score_grads=True)
    for hopper, served in ((object(), True), (None, False)):
        monkeypatch.setattr(triton_backend, "_hopper_launch", lambda device, kernels=hopper: kernels)
        assert (stock_is_faster(gpu) is None) is served
    monkeypatch.setattr(triton_backend, "_hopper_launch", lambda device: object())
    for other in (dict(dtype=torch.float32), dict(v_head_dim=256), dict(score_steps=None)):
        assert "triton: only its Hopper kernels have been timed" in str(stock_is_faster(replace(gpu, **other)))
    bucketize = stock_is_faster(replace(gpu, score_ops=frozenset({"aten::bucketize"})))
    assert bucketize is not None and "triton: cannot generate code for aten::bucketize" in bucketize
    assert stock_is_faster(replace(gpu, deterministic=True)) is not None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "triton: its code for compute capability 8.0 has not run on a GPU yet" in str(stock_is_faster(gpu))


def test_steps_are_named_alike_before_and_after_they_are_made() -> None:
    recipe = [("multiply", 2.0), ("softcap", 3.0), ("distance", None, 1.0, True), ("constant", 1.0)]
    assert step_types(recipe) == (Multiply, Softcap, Distance, Bias)


def test_a_compiled_call_is_left_to_faster_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []

    def faster(facts: RequestFacts) -> str | None:
        seen.append(facts)
        return "for the test"

    monkeypatch.setattr(translate, "stock_is_faster", faster)
    q, k, v = qkv(grad=False)
    torch._dynamo.reset()
    with magi_flex.enable(), caplog.at_level(logging.INFO, "magi_flex"):
        with torch._inductor.config.patch(force_disable_caches=True):
            left = torch.compile(attend, fullgraph=True)(q, k, v, lambda score, b, h, i, j: 20 * torch.tanh(score / 20))
    assert [facts.score_steps for facts in seen] == [(Softcap,)] and not seen[0].needs_backward
    assert (
        "is left to PyTorch: its kernel is faster than those of ours that serve the call (for the test)" in caplog.text
    )
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT) / 4
    want = (20 * torch.tanh(scores / 20)).softmax(-1) @ v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(left.double(), want, atol=1e-5, rtol=1e-5)
