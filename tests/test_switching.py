"""Switching on and off: enable, disable, the named backend, other joint passes, compile caches across processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.convert_frame import compile_lock
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import magi_flex
from inductor_lowering.install import magi_flex_backend
from inductor_lowering.joint_pass import JointPass
from inductor_lowering.torch_compat import tracing_alone
from magi_flex import ops
from magi_flex.kernels import tile_plans
from tests.compiling import attend, qkv


class Calls:
    def __init__(self) -> None:
        self.count = 0
        self.backends: list[str] = []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Counts our forward runs; leaves everything switched off."""
    seen, run = Calls(), ops.run_forward

    def counted(*args: Any) -> Any:
        seen.count += 1
        seen.backends.append(args[6])
        return run(*args)

    monkeypatch.setattr(ops, "run_forward", counted)
    assert not magi_flex.is_enabled()
    yield seen
    magi_flex.disable()


def train(function: Any) -> None:
    inputs = qkv(q_len=20)
    torch.autograd.grad(function(*inputs).sum(), inputs)


def test_states(calls: Calls) -> None:
    with magi_flex.enable() as state:
        assert magi_flex.is_enabled() and state is not None
        with magi_flex.enable(backend="tiled"):
            attend(*qkv(q_len=5))
        assert magi_flex.is_enabled()
        attend(*qkv(q_len=5))
    assert not magi_flex.is_enabled()
    assert calls.backends == ["tiled", "auto"]
    magi_flex.enable()
    magi_flex.enable()
    magi_flex.disable()
    assert not magi_flex.is_enabled() and inductor_config.joint_custom_pre_pass is None


def test_eager_calls_follow_the_switch(calls: Calls) -> None:
    with magi_flex.enable():
        train(attend)
    assert calls.count == 1
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        train(attend)
    attend(*qkv(q_len=20, grad=False))
    assert calls.count == 1


def test_a_compiled_function_follows_the_switch(calls: Calls) -> None:
    function = torch.compile(attend, fullgraph=True)
    inputs = qkv(q_len=20, grad=False)
    outs = [function(*inputs)]
    assert calls.count == 0
    with magi_flex.enable():
        outs.append(function(*inputs))
        assert calls.count == 1
        with magi_flex.enable(backend="tiled"):
            outs.append(function(*inputs))
            assert calls.backends == ["auto", "tiled"]
    outs.append(function(*inputs))
    assert calls.count == 2
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5)


def test_named_backend_acts_on_one_compilation(calls: Calls) -> None:
    magi_flex.enable()  # registers the name where the package is not installed
    magi_flex.disable()
    train(torch.compile(attend, backend="magi_flex", fullgraph=True))
    train(torch.compile(attend, backend=magi_flex_backend, fullgraph=True, options={"magi_backend": "tiled"}))
    train(torch.compile(attend, backend="magi_flex", mode="max-autotune-no-cudagraphs"))
    assert calls.backends == ["auto", "tiled", "auto"]
    assert not magi_flex.is_enabled()
    function = torch.compile(attend)
    function(*qkv(q_len=20, grad=False))
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        train(function)
    assert calls.count == 3


def test_other_threads_follow_the_switch(calls: Calls) -> None:
    """Each thread has an Inductor configuration of its own from torch 2.13 on; the switch is for all of them."""
    torch._dynamo.reset()
    function = torch.compile(attend, fullgraph=True)
    magi_flex.enable()
    with ThreadPoolExecutor(1) as thread, fresh_cache():
        thread.submit(train, function).result()
        assert calls.backends == ["auto"]
        magi_flex.enable(backend="tiled")
        thread.submit(train, function).result()
        assert calls.backends == ["auto", "tiled"]
        magi_flex.disable()
        with pytest.raises(Exception, match="backward on CPU"):
            thread.submit(train, function).result()
        thread.submit(function, *qkv(q_len=20, grad=False)).result()
        assert thread.submit(lambda: inductor_config.joint_custom_pre_pass).result() is None
    assert calls.count == 2


def test_threads_trace_one_at_a_time(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """FX keeps what it patches in globals; threads that traced mods of eager calls beside each other left it broken."""
    unlocked, trace = [], torch.fx.Tracer.trace

    def watched(*args: Any, **options: Any) -> Any:
        if not compile_lock._is_owned():
            unlocked.append("".join(traceback.format_stack()))
        return trace(*args, **options)

    monkeypatch.setattr(torch.fx.Tracer, "trace", watched)
    with magi_flex.enable():
        table = torch.randn(23, requires_grad=True)
        out = attend(*qkv(q_len=23, dim=7), lambda s, b, h, q, k: (s + table[k]).clamp(max=3))
        torch.autograd.grad(out.sum(), table)
    assert not unlocked, unlocked[0]


def test_an_eager_call_leaves_the_trace_of_another_thread_alone(calls: Calls) -> None:
    """The call waits for the trace: it would bring the flag of the trace back when it is over."""
    inputs = qkv(q_len=23, dim=7)
    with magi_flex.enable(), ThreadPoolExecutor(1) as thread:
        with tracing_alone():
            torch.fx._symbolic_trace._is_fx_tracing_flag = True
            try:
                call = thread.submit(attend, *inputs)
                with pytest.raises(TimeoutError):
                    call.result(timeout=0.2)
            finally:
                torch.fx._symbolic_trace._is_fx_tracing_flag = False
        call.result()
    assert not torch.fx._symbolic_trace._is_fx_tracing_flag


# ---- other joint passes ---------------------------------------------------------------------------------------------


class UserPass(CustomGraphPass):
    def __init__(self, name: str | None):
        self.name, self.graphs = name, 0

    def uuid(self) -> Any:
        return self.name

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs += any(node.target is torch.ops.higher_order.flex_attention for node in graph.nodes)


def test_a_pass_that_was_set_before_keeps_running(calls: Calls) -> None:
    torch._dynamo.reset()
    mine = UserPass("mine")
    with fresh_cache(), inductor_config.patch(joint_custom_pre_pass=mine):  # a cached graph runs no passes
        with magi_flex.enable():
            torch.compile(attend, fullgraph=True)(*qkv(q_len=21, grad=False))
            assert (mine.graphs, calls.count) == (1, 1)
        assert inductor_config.joint_custom_pre_pass is mine
        train(torch.compile(attend, fullgraph=True, backend=magi_flex_backend))
        assert (mine.graphs, calls.count) == (2, 2)


def test_a_pass_that_is_set_later_is_not_lost() -> None:
    mine = UserPass("mine")
    with inductor_config.patch(joint_custom_pre_pass=None):
        magi_flex.enable()
        inductor_config.joint_custom_pre_pass = mine
        magi_flex.disable()
        assert inductor_config.joint_custom_pre_pass is mine
        inductor_config.joint_custom_pre_pass = None


def test_cache_key() -> None:
    ours = JointPass("auto", [], "hash").uuid()
    assert ours != JointPass("tiled", [], "hash").uuid()
    assert ours != JointPass("auto", [], "other").uuid()
    assert ours != JointPass("auto", [UserPass("mine")], "hash").uuid()
    assert JointPass("auto", [UserPass(None)], "hash").uuid() is None
    assert JointPass("auto", [lambda graph: None], "hash").uuid() is None


CACHE_SCRIPT = """
import json
import torch
import magi_flex
from magi_flex import ops
from torch._dynamo.utils import counters
from tests.compiling import attend, qkv

runs, run = [], ops.run_forward
ops.run_forward = lambda *args: (runs.append(1), run(*args))[1]
record = []

def note(name, function, grad):
    torch._dynamo.reset()
    counters.clear()
    inputs = qkv(q_len=20, grad=grad)
    out = function(*inputs)
    if grad:
        torch.autograd.grad(out.sum(), inputs)
    record.append((name, len(runs), counters["inductor"]["fxgraph_cache_hit"]))
    runs.clear()

with magi_flex.enable():
    note("training", torch.compile(attend), True)
    note("inference", torch.compile(attend), False)
note("off", torch.compile(attend), False)
note("named", torch.compile(attend, backend="magi_flex"), True)
print(json.dumps(record))
"""


def test_warm_caches_in_a_new_process(tmp_path: Path) -> None:
    """Neither a cached stock graph nor one of ours is ever taken for the other."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    cold, warm = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", CACHE_SCRIPT], env=environment, check=True, capture_output=True, text=True
            ).stdout.splitlines()[-1]
        )
        for _ in range(2)
    )
    ran = [("training", 1), ("inference", 1), ("off", 0), ("named", 1)]
    assert [(name, runs) for name, runs, _ in cold] == ran
    assert [(name, runs) for name, runs, _ in warm] == ran
    assert cold[0][2] == 0 and all(hits > 0 for _, _, hits in warm)


def test_who_builds_plans() -> None:
    """The choice lasts as long as the state that it was made with; an unknown one changes nothing."""
    with pytest.raises(ValueError, match="plans: got 'gpu', allowed are auto, torch, device"):
        magi_flex.enable(plans="gpu")
    with magi_flex.enable(plans="device"):
        assert tile_plans.builder_choice() == "device"
        assert "built by torch" in str(tile_plans.objection(torch.device("cpu"), has_bit_tiles=False))
        with magi_flex.enable():
            assert tile_plans.builder_choice() == "auto"
        assert tile_plans.builder_choice() == "device"
    assert tile_plans.builder_choice() == "auto"
