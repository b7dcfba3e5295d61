"""Graphs that hold a mask's whole plan in their tensors, as they are made for CUDA graphs; here they run on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import magi_flex
import magi_flex.distributed.context_ops  # these two for their operators
import magi_flex.distributed.group_ops
from inductor_lowering import static_intervals, translate
from inductor_lowering.capture import trace_mask_mod
from magi_flex import mods, ops
from magi_flex.kernels import label_attention
from magi_flex.kernels.cpu import CpuBackend
from magi_flex.kernels.label_attention import LabelledAttention
from magi_flex.kernels.layout import dense_order
from magi_flex.kernels.request import AttentionOutput, AttentionRequest
from magi_flex.kernels.tiled_torch import TiledBackend
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import CallSpec, MaskSpec, ScoreSpec
from tests.cases.score_programs import traced_score
from tests.compiling import check_training, qkv

S = 70


class Counts:
    """What runs: plans of a mask, attention with the plan in the graph, plans that look at data."""

    intervals = attention = looked = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """As on a GPU with plans that are built there."""
    seen = Counts()
    static_intervals, planned, build = MaskSpec.static_intervals, ops._planned, MaskSpec.build

    def count_intervals(self: MaskSpec, *args: Any) -> Any:
        seen.intervals += args[-1].type != "meta"
        return static_intervals(self, *args)

    def count_attention(*args: Any) -> Any:
        seen.attention += 1
        return planned(*args)

    def count_looks(self: MaskSpec, *args: Any) -> Any:
        seen.looked += 1
        return build(self, *args)

    monkeypatch.setattr(MaskSpec, "static_intervals", count_intervals)
    monkeypatch.setattr(MaskSpec, "build", count_looks)
    monkeypatch.setattr(ops, "_planned", count_attention)
    monkeypatch.setattr(translate, "objection", lambda device, has_bit_tiles: None)
    monkeypatch.setattr(CpuBackend, "never_waits", True)
    monkeypatch.setattr(TiledBackend, "never_waits", True)  # where there is no compiler
    with magi_flex.enable(), inductor_config.patch({"triton.cudagraphs": True}):
        yield seen


def two_layers(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: BlockMask) -> Tensor:
    """Attention, as the mean of two layers that share the mask."""
    one = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    return one / 2 + flex_attention(q, k, v * 2, block_mask=block_mask, enable_gqa=True) / 4


def first_keys(cut: int) -> Tensor:
    """First key of each row's document, of two documents."""
    return torch.where(torch.arange(S) < cut, 0, cut)


def key_range_mask(first: Tensor) -> BlockMask:
    return create_block_mask(lambda b, h, q, k: (k >= first[q]) & (k <= q), None, None, S, S, "cpu", BLOCK_SIZE=16)


def test_new_documents_in_every_step(counts: Counts) -> None:
    """The plan is made once a step, by operations of the graph, and the graph is compiled once."""
    compiler = CompileCounterWithBackend("inductor")
    function = torch.compile(two_layers, fullgraph=True, dynamic=False, backend=compiler)
    inputs = qkv(q_len=S)
    for step, cut in enumerate((20, 33, 69), start=1):
        first = first_keys(cut)
        row = torch.arange(S)
        dense = (row >= first[:, None]) & (row <= row[:, None])
        check_training(function, inputs, dense.view(1, 1, S, S), key_range_mask(first))
        assert (counts.intervals, counts.attention, counts.looked) == (step, 4 * step, 0)
    assert compiler.frame_count == 1


def test_canonical_mask(counts: Counts) -> None:
    function = torch.compile(two_layers, fullgraph=True, dynamic=False)
    for cut in (20, 40):
        mask_mod = mods.document_causal((torch.arange(S) >= cut).int())
        mask = magi_flex.create_block_mask(mask_mod, None, None, S, S, "cpu")
        dense = magi_flex.plan(mask).to_dense()
        looked, intervals = counts.looked, counts.intervals
        check_training(function, qkv(q_len=S), dense, mask)
        assert (counts.looked, counts.intervals) == (looked, intervals + 1)


def test_lists_that_change_the_mask_stop_the_graph(counts: Counts) -> None:
    function = torch.compile(two_layers, fullgraph=True, dynamic=False)
    mask = key_range_mask(first_keys(20))
    fewer = BlockMask.from_kv_blocks(
        mask.kv_num_blocks.clamp(max=1), mask.kv_indices, None, None, (16, 16), mask.mask_mod, (S, S)
    )
    with pytest.raises(RuntimeError, match="block_mask: its block lists change what its mask_mod says"):
        function(*qkv(q_len=S), None, fewer)


def test_intervals_that_depend_on_data(counts: Counts) -> None:
    """Document ids may come in any order: such a mask is looked at, outside of the CUDA graph."""
    function = torch.compile(two_layers, fullgraph=True, dynamic=False)
    ids = torch.randint(0, 3, (S,), generator=torch.Generator().manual_seed(0))
    mask = create_block_mask(mods.document_causal(ids), None, None, S, S, "cpu", BLOCK_SIZE=16)
    dense = (ids[:, None] == ids) & torch.ones(S, S, dtype=torch.bool).tril()
    check_training(function, qkv(q_len=S), dense.view(1, 1, S, S), mask)
    assert counts.attention == 0 and counts.looked == 1


def test_which_ops_a_cuda_graph_may_hold() -> None:
    """Those that look at nothing and keep nothing; Inductor captures what is not tagged and has an input on a GPU."""
    in_graphs = {"plan_intervals", "plan_labels", "planned_attention", "planned_attention_backward", "shard_offset"}
    names = [
        name.removeprefix("magi_flex::") for name in torch._C._dispatch_get_all_op_names() if "magi_flex::" in name
    ]
    assert in_graphs < set(names) and "plan_handle" in names and "localize_handle" in names
    for name in names:
        unsafe = torch.Tag.cudagraph_unsafe in getattr(torch.ops.magi_flex, name).default.tags
        assert unsafe == (name not in in_graphs), name


class Allocations(TorchDispatchMode):
    """Sees what operators return that is not in the memory of ``before``."""

    def __init__(self, before: Sequence[Tensor]) -> None:
        super().__init__()
        self.before = {x.untyped_storage()._cdata for x in before}
        self.memory: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        found = (x.untyped_storage() for x in tree_leaves(results) if isinstance(x, Tensor))
        self.memory += [StorageWeakRef(x) for x in found if x._cdata not in self.before]
        return results

    def alive(self) -> int:
        return sum(not x.expired() for x in self.memory)


@pytest.mark.parametrize("kind", ["no mask", "key range", "labels"])
def test_nothing_is_kept_of_what_a_cuda_graph_owns(kind: str) -> None:
    """Neither of a capture nor of the run before it, which only the memory's owner tells from another; nor until a
    garbage collection, behind which what lies there may be something else's."""
    size = 53
    q, k, v = qkv(q_len=size, grad=False)
    order = tuple(dense_order(q))
    row = torch.arange(size)
    masks = {
        "key range": lambda b, h, q, k: (k >= row[q] // 20 * 20) & (k <= q),
        "labels": lambda b, h, q, k: (row[q] // 20 == row[k] // 20) & (k <= q),
    }
    program, captures = trace_mask_mod(masks.get(kind, masks["labels"]))
    mask = MaskSpec(program.to_json(), "t" * len(captures)).to_json()
    make_plan = {"key range": ops.plan_intervals, "labels": ops.plan_labels}.get(kind, lambda *args: ())
    learned = [torch.randn(4, 8).requires_grad_(), torch.rand(4).requires_grad_()]
    score = traced_score(
        lambda table, slopes: mods.chain(mods.t5_bias(table), mods.alibi(slopes)), learned, learned=True
    )
    assert score.forward is not None and score.joint is not None
    spec = ScoreSpec(score.forward.to_json(), score.joint.to_json(), "tt", score.needs_grad)
    forward, backward = (CallSpec(spec, "tiled", (order,) * n).to_json() for n in (1, 3))

    def run() -> int:
        of_score = [x.detach().clone() for x in learned]
        plan = list(make_plan(captures, [], mask, 2, 4, size, size, q.device))[:3]
        results = [*ops.planned_attention(q, k, v, plan, [], of_score, [], forward, 0.25)]
        given = (q, k, v, *results[:2], results[0], None)
        results += ops.planned_attention_backward(*given, plan, [], of_score, [], backward, 0.25)
        return seen.alive()

    seen = Allocations((q, k, v, *captures, *learned))
    run()  # makes constants
    gc.disable()
    try:
        with seen:
            assert run()
            static_intervals._indices.cache_clear()  # which are on the CPU
        assert not seen.alive()
    finally:
        gc.enable()


@pytest.fixture
def labels_served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """As if there were a GPU for attention by labels, which a compile cache does not know; what was wanted of it."""
    wanted: list[bool] = []

    def forward(request: AttentionRequest, mask: LabelledAttention, results: AttentionOutput) -> None:
        wanted.append(bool(mask.wanted))
        if wanted[-1]:
            right = TiledBackend().forward(exact(request, mask))
            for x, y in zip((results.out, results.lse, results.max_score), vars(right).values(), strict=True):
                x.copy_(y)

    def backward(request: AttentionRequest, mask: LabelledAttention, *given: Any) -> None:
        *given, results = given  # type: ignore[assignment]
        wanted.append(bool(mask.wanted))
        if wanted[-1]:
            right = TiledBackend().backward(exact(request, mask), *given)
            for name in ("dq", "dk", "dv"):
                getattr(results, name).copy_(getattr(right, name))

    def exact(request: AttentionRequest, mask: LabelledAttention) -> AttentionRequest:
        dense = mask.rest.to_dense() & (mask.row_labels[..., None] == mask.key_labels[:, :, None])
        if mask.blocks is not None:
            state = mask.blocks.repeat_interleave(mask.block_size[0], 2).repeat_interleave(mask.block_size[1], 3)
            state = state[..., :S, :S]
            dense = (state == 2) | ((state == 1) & dense)
        return replace(request, plan=MaskPlan.from_dense(dense))

    monkeypatch.setattr(label_attention, "objections", lambda facts: [])
    monkeypatch.setattr(label_attention, "forward", forward)
    monkeypatch.setattr(label_attention, "backward", backward)
    with inductor_config.patch(force_disable_caches=True):
        yield wanted


def test_labels(counts: Counts, labels_served: list[bool]) -> None:
    """Packed documents are intervals of the graph; where labels return, the graph's other kernels do the work."""
    compiler = CompileCounterWithBackend("inductor")
    function = torch.compile(two_layers, fullgraph=True, dynamic=False, backend=compiler)
    row = torch.arange(S)
    for ids, returns in ((row // 20, False), (row % 3, True), (row // 33, False), (9 - row // 10, False)):
        mask = create_block_mask(mods.document_causal(ids), None, None, S, S, "cpu", BLOCK_SIZE=16)
        dense = (ids[:, None] == ids) & torch.ones(S, S, dtype=torch.bool).tril()
        labels_served.clear()
        check_training(function, qkv(q_len=S), dense.view(1, 1, S, S), mask)
        assert labels_served == [returns] * 4
    fewer = BlockMask.from_kv_blocks(
        mask.kv_num_blocks.clamp(max=1),
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        (16, 16),
        mask.mask_mod,
        (S, S),
    )
    wanted = dense_of_lists(fewer) & dense
    labels_served.clear()
    check_training(function, qkv(q_len=S), wanted.view(1, 1, S, S), fewer)
    assert labels_served == [True] * 4
    assert counts.looked == 0 and compiler.frame_count == 1


def dense_of_lists(mask: BlockMask) -> Tensor:
    return mask.to_dense()[0, 0].bool().repeat_interleave(16, 0).repeat_interleave(16, 1)[:S, :S]


def test_no_mask(counts: Counts) -> None:
    function = torch.compile(two_layers, fullgraph=True, dynamic=False)
    check_training(function, qkv(q_len=S), None)
    assert (counts.attention, counts.intervals, counts.looked) == (4, 0, 0)
