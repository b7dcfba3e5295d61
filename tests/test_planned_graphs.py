"""Graphs that hold a mask's whole plan in their tensors, as they are made for CUDA graphs; here they run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import magi_flex
from inductor_lowering import translate
from magi_flex import mods, ops
from magi_flex.kernels import label_attention
from magi_flex.kernels.cpu import CpuBackend
from magi_flex.kernels.label_attention import LabelledAttention
from magi_flex.kernels.request import AttentionOutput, AttentionRequest
from magi_flex.kernels.tiled_torch import TiledBackend
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import MaskSpec
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
    for op in (torch.ops.magi_flex.attention, torch.ops.magi_flex.attention_backward):
        assert torch.Tag.cudagraph_unsafe in op.default.tags
    for op in (torch.ops.magi_flex.planned_attention, torch.ops.magi_flex.planned_attention_backward):
        assert torch.Tag.cudagraph_unsafe not in op.default.tags


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
