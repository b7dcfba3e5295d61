"""What kernels derive from a plan: kept with it, made anew when its tensors change, never taken for another plan's."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from inductor_lowering.capture import trace_mask_mod
from magi_flex import call_mods, op_specs, ops, plan_memo
from magi_flex.bit_tiles import count_bits
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import contents, plan_cache
from magi_flex.kernels.plan_cache import _CAPACITY, derived, kept, nothing_kept
from magi_flex.mask_plan import MaskPlan
from magi_flex.mask_structure import Band
from magi_flex.op_specs import MaskSpec, ScoreSpec


class Counted:
    """Gives a plan's area, and counts how often."""

    def __init__(self, plan: MaskPlan) -> None:
        self.plan, self.calls = plan, 0

    def __call__(self) -> int:
        self.calls += 1
        return self.plan.area()


def test_follows_the_contents() -> None:
    plan = MaskPlan(RowIntervals.full(8, 8))
    area = Counted(plan)
    assert derived(plan, "area", area) == kept(plan, "area", area) == 64
    assert area.calls == 1
    plan.ends.sub_(4)
    assert derived(plan, "area", area) == derived(plan, "other", area) == derived(plan, "area", area) == 32
    assert area.calls == 3


def test_a_storage_that_is_replaced() -> None:
    """Memory freed by a plan that lives on is another plan's now, with as many changes counted."""
    plan = MaskPlan(RowIntervals.full(16, 4))
    assert derived(plan, "area", plan.area) == 64
    old = plan.ends.data_ptr()
    plan.ends.untyped_storage().resize_(0)
    plan.ends.untyped_storage().resize_(64 * 1024)
    plan.ends.untyped_storage().fill_(0)
    assert plan.ends.data_ptr() != old and derived(plan, "area", plan.area) == 0


def test_memory_that_is_used_again_is_another_plan() -> None:
    for length in range(1, 40):
        plan = MaskPlan(RowIntervals.full(16, length))
        assert derived(plan, "area", plan.area) == 16 * length
        del plan


def test_an_alias_of_the_same_memory_is_another_plan() -> None:
    """``.data`` counts changes from 0 again, so that neither address nor count tells the two masks apart."""
    plan = MaskPlan(RowIntervals.full(8, 8))
    assert derived(plan, "area", plan.area) == 64
    plan.ends.data.fill_(4)
    other = MaskPlan(RowIntervals(plan.starts.data, plan.ends.data, 8))
    assert derived(other, "area", other.area) == 32


def test_nothing_outlives_the_plan() -> None:
    plan = MaskPlan(RowIntervals.full(8, 8))
    owner = weakref.ref(derived(plan, "set", _Value))
    assert owner() is not None
    del plan
    gc.collect()
    assert owner() is None


class _Value:
    pass


def test_copies_are_without_what_cannot_be_copied() -> None:
    plan = MaskPlan(RowIntervals.full(8, 8), structure=Band(None, None))
    kept(plan, "lock", threading.Lock)
    program, _ = trace_mask_mod(lambda b, h, q, k: q >= k)
    program.memo["lock"] = threading.Lock()
    for copied in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert not copied.memo and copied.structure == plan.structure and torch.equal(copied.ends, plan.ends)
    assert pickle.loads(pickle.dumps(program)) == copy.deepcopy(program) == program


def test_layouts_without_end() -> None:
    plan = MaskPlan(RowIntervals.full(8, 8))
    for i in range(3 * _CAPACITY):
        assert kept(plan, i, lambda i=i: i) == i
    assert len(plan.memo) <= _CAPACITY


def test_streams_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stream has only enqueued, another would read too early."""
    stream = 1
    monkeypatch.setattr(plan_cache, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    starts = SimpleNamespace(device=torch.device("cuda", 0), data_ptr=lambda: 0, shape=(), _version=0)
    plan = SimpleNamespace(tensors=(starts,), counts_changes=True, memo={})
    first = kept(plan, "value", _Value)
    stream = 2
    second = kept(plan, "value", _Value)
    assert second is not first and kept(plan, "value", _Value) is second
    stream = 1
    assert kept(plan, "value", _Value) is first


def test_streams_do_not_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a plan that is freed is at once another's on the stream that made it, whatever reads it elsewhere."""
    first = torch.arange(5)
    program, captures = trace_mask_mod(lambda b, h, q, k: k >= first[q])
    spec = MaskSpec(program.to_json(), "t")
    stream = 1
    for module in (call_mods, op_specs, ops):
        monkeypatch.setattr(module, "stream_of", lambda device: stream)
    q, k = torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8)
    handle = ops.plan_handle(captures, [], spec.to_json(), 1, 1, 5, 5, q.device)

    def plan() -> MaskPlan:
        return call_mods.CallMods(q, k, handle, captures, [], spec.to_json(), ScoreSpec()).plan

    first_plan = plan()
    stream = 2
    second_plan = plan()
    assert second_plan is not first_plan and plan() is second_plan
    stream = 1
    assert plan() is spec.shared(captures, [], (1, 1, 5, 5), q.device).plan is first_plan


def test_nothing_is_kept_where_a_graph_owns_the_memory() -> None:
    plan = MaskPlan(RowIntervals.full(8, 8))
    area = Counted(plan)
    with nothing_kept(plan, None):
        assert derived(plan, "area", area) == kept(plan, "area", area) == 64
    assert area.calls == 2 and not plan.memo


@pytest.mark.parametrize("kv_len", [8, 0])
def test_plans_of_inference_are_kept(kv_len: int) -> None:
    """Inference tensors do not count their changes, so a mask's plan consists of others."""
    full = MaskSpec(None, "")
    with torch.inference_mode():
        plan = full.build([], [], 1, 1, 8, kv_len, torch.device("cpu")).plan
        area = Counted(plan)
        assert derived(plan, "area", area) == derived(plan, "area", area) == 8 * kv_len
        assert area.calls == 1
        theirs = MaskPlan(RowIntervals(torch.zeros(1, 1, 1, 4, dtype=torch.int32), torch.ones(1, 1, 1, 4).int(), 4))
        assert derived(theirs, "area", theirs.area) == 4
        theirs.ends.fill_(2)
        assert derived(theirs, "area", theirs.area) == 8


def test_calls_without_a_mask_share_a_plan() -> None:
    full = MaskSpec(None, "")
    cpu = torch.device("cpu")
    plan = full.build([], [], 2, 4, 16, 32, cpu).plan
    assert full.build([], [], 1, 8, 16, 32, cpu).plan is plan
    assert plan.to_dense().all() and plan.to_dense().shape == (1, 1, 16, 32)
    assert full.build([], [], 2, 4, 17, 32, cpu).plan is not plan


def test_contents_of_any_strides() -> None:
    """The bytes that new contents of captured tensors are known by: one element is contiguous, whatever its stride."""
    numbers = torch.arange(20, dtype=torch.int32)
    grid = numbers.view(4, 5)
    for x in (numbers[::4], numbers[4:5].as_strided((1,), (4,), 4), grid[:, :1], grid.T, numbers[:0], grid[0, 0]):
        assert torch.equal(contents._bytes(x).view(x.dtype), x.flatten())
    word = numbers[3:4].as_strided((1, 1), (7, 4), 3)
    assert count_bits(word).tolist() == [[2, 0, 0, 0]]


def test_dead_entries_go_while_others_live() -> None:
    """However many live, each new entry takes as little time, and those of freed tensors are dropped soon."""
    living = [torch.empty(1) for _ in range(200)]
    for i, x in enumerate(living):
        plan_memo.remember(("living", i), x, i)
    values = [Counted(MaskPlan(RowIntervals.full(4, 4))) for _ in range(300)]
    alive = [weakref.ref(x) for x in values]
    for i in range(len(values)):
        plan_memo.remember(("short", i), torch.empty(1), values.pop())
    assert sum(x() is not None for x in alive) <= len(living) // 2
    assert [plan_memo.recall(("living", i), lambda: -1) for i in range(len(living))] == list(range(len(living)))


def test_a_plan_is_certain_only_when_it_is_the_right_one() -> None:
    """Whatever goes wrong while it is waited for: then whoever comes next asks again."""
    stale, right = (op_specs.BuiltMask(MaskPlan(RowIntervals.full(4, 4))) for _ in range(2))
    answers: list[bool | None] = [None, False]

    def verdict() -> bool:
        answer = answers.pop(0)
        if answer is None:
            raise KeyboardInterrupt
        return answer

    def build() -> op_specs.BuiltMask:
        assert not handled.is_certain
        return right

    handled = plan_memo.HandledMask("any", stale, verdict)
    with pytest.raises(KeyboardInterrupt):
        handled.correct(build)
    assert not handled.is_certain and handled.mask is stale
    handled.correct(build)
    assert handled.is_certain and handled.mask is right and not answers
    handled.correct(build)


def test_a_plan_that_another_thread_corrects_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    stale, right = (op_specs.BuiltMask(MaskPlan(RowIntervals.full(4, 4))) for _ in range(2))
    handled = plan_memo.HandledMask("any", stale, lambda: False)
    ran = []

    class Mods:
        plan = property(lambda self: handled.mask.plan)

        def score(self) -> None:
            pass

        def correct(self) -> None:
            if not handled.is_certain:
                handled.correct(lambda: right)

    def run_forward(q: None, k: None, v: None, plan: MaskPlan, *settings: object) -> MaskPlan:
        ran.append(plan)
        Mods().correct()  # the other thread
        return plan

    spec = SimpleNamespace(score=ScoreSpec(), forward_settings=())
    monkeypatch.setattr(ops, "CallSpec", SimpleNamespace(from_json=lambda call: spec))
    monkeypatch.setattr(ops, "CallMods", lambda *args: Mods())
    monkeypatch.setattr(ops, "run_forward", run_forward)
    assert ops.attention(None, None, None, None, [], [], "", "", 1.0) is right.plan
    assert ran == [stale.plan, right.plan]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_keys_of_a_forked_process_are_its_own() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, next(plan_memo._keys).to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(child, 0)
    assert abs(int.from_bytes(os.read(read, 8), "little") - next(plan_memo._keys)) > 1 << 20
