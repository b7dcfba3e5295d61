"""Backend ``fa4`` without flash-attn-4: what it hands over, against a stand-in for the package's two functions.

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D head dim, E value head dim.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import fa4, fa4_masks, route
from magi_flex.kernels.fa4 import Fa4Backend, head_dim_objection
from magi_flex.kernels.fa4_masks import backward_mask, forward_mask
from magi_flex.kernels.fa4_score import KernelScore
from magi_flex.kernels.fa4_tiles import PADDING, BlockSize, backward_block, block_lists, forward_block, padded_bounds
from magi_flex.kernels.request import (
    AttentionRequest,
    Bias,
    Distance,
    Multiply,
    RequestFacts,
    ScoreProgram,
    ScoreStep,
    Softcap,
)
from magi_flex.mask_plan import MaskPlan
from magi_flex.mask_structure import Documents
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import dense_attention_with_gradients
from tests.torch_lanes import TorchLanes

BITS_MASKS = ("dense_table", "dilated", "bigbird", "selected_tokens", "natten_3d", "temporal_head")


def plan_of(mask_BHQK: Tensor) -> MaskPlan:
    return MaskPlan(RowIntervals.from_dense(mask_BHQK))


# ---- a stand-in for the package -------------------------------------------------------------------------------------


class Lists(NamedTuple):
    """flash_attn.cute.block_sparsity.BlockSparseTensorsTorch, as far as it is used."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


class Package:
    """``_flash_attn_fwd`` and ``_flash_attn_bwd`` on any device, by their documented meaning; counts the ways taken."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.ways: list[str] = []  # of each call of the two functions

        def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, None, None, None]:
            self._way(options)
            out, lse = options.pop("out"), options.pop("lse")
            # As the package does, for addresses that its kernels cannot take.
            aligned = [x if x.data_ptr() % 16 == 0 else x.clone() for x in (q, k, v)]
            compiled(self._flash_attn_fwd, self._kernel)(*aligned, out, lse, options)
            return out, lse, None, None, None

        def backward(*tensors: Tensor, **options: Any) -> None:
            self._bwd(*tensors, **options)

        self._flash_attn_fwd: Any = forward
        self._flash_attn_bwd: Any = backward
        self._bwd_preprocess, self._bwd_postprocess_convert = (types.SimpleNamespace() for _ in range(2))
        for function in (forward, backward, self._bwd_preprocess, self._bwd_postprocess_convert):
            function.compile_cache = {}  # type: ignore[union-attr]

    def scores(self, q: Tensor, k: Tensor, scale: float, options: dict[str, Any], backward: bool) -> tuple[Tensor, ...]:
        """Scores before the mod, after it, and the mask, ``[B, H, Q, K]``."""
        group = q.shape[2] // k.shape[2]
        before = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * scale
        batch, heads, q_len, kv_len = before.shape
        tables = options.get("aux_tensors", ())
        sizes = (batch, heads, q_len, kv_len)
        at = [
            torch.arange(n, dtype=torch.int32).view([-1 if i == j else 1 for j in range(4)])
            for i, n in enumerate(sizes)
        ]
        if backward and self.arch == 90 and group > 1:  # as the package has it: see Fa4Backend.backward
            at[1], at[2] = at[1] * group + at[2] % group, at[2] // group
        mod = options.get("score_mod")
        after = before if mod is None else mod(before, *at, None, tables).expand(before.shape)
        return before, after, self.mask(sizes, tables, options, backward)

    def mask(self, sizes: tuple[int, ...], tables: Any, options: dict[str, Any], transposed: bool) -> Tensor:
        batch, heads, q_len, kv_len = sizes
        row, key = torch.arange(q_len)[:, None], torch.arange(kv_len)
        mask = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool)
        right = 0 if options.get("causal") else options.get("window_size_right")
        left = options.get("window_size_left")
        if right is not None:
            mask = mask & (key <= row + kv_len - q_len + right)
        if left is not None:
            mask = mask & (key >= row + kv_len - q_len - left)
        lists = options.get("block_sparse_tensors")
        if lists is None:
            return mask
        partial, full = (visited(*pair, lists.block_size, sizes, transposed) for pair in (lists[:2], lists[2:4]))
        assert not (partial & full).any()
        at = [torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(sizes)]
        return full | (partial & options["mask_mod"](*at, tables))

    def _way(self, options: dict[str, Any]) -> None:
        packed = "packed " if "cu_seqlens_q" in options else ""
        flags = {k: v for k, v in options.items() if k in ("causal", "window_size_left", "window_size_right") and v}
        self.ways.append("bits" if "mask_mod" in options else f"{packed}{flags or 'full'}")

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: dict[str, Any]) -> None:
        """What the interface compiles and launches."""
        scale = options["softmax_scale"]
        assert scale > 0 or "score_mod" in options, "the kernel takes the largest score before it multiplies"
        if "cu_seqlens_q" not in options:
            lse.copy_(self._forward(q, k, v, out, options))
            return
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
        for begin, end in itertools.pairwise(options["cu_seqlens_q"].tolist()):
            assert end - begin <= options["max_seqlen_q"]
            part = slice(begin, end)
            lse[:, part] = self._forward(q[None, part], k[None, part], v[None, part], out[None, part], options)[0]

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: dict[str, Any]) -> Tensor:
        _, scores, mask = self.scores(q, k, options["softmax_scale"], options, backward=False)
        scores = scores.masked_fill(~mask, -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
        out.copy_(torch.einsum("bhqk,bkhe->bqhe", weights, v.repeat_interleave(q.shape[2] // k.shape[2], 2)))
        return lse

    def _bwd(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **options: Any) -> None:
        """As the package has it: one kernel prepares sums, one adds to them, a third one writes a result."""
        self._way(options)
        dq, dk, dv = (options.pop(name) for name in ("dq", "dk", "dv"))
        grouped = q.shape[-2] > k.shape[-2]
        delta, dq_sum = torch.empty_like(lse), torch.empty(q.shape)
        dk_sum, dv_sum = (torch.zeros(x.shape) if grouped else x for x in (dk, dv))
        given = [x if x.data_ptr() % 16 == 0 else x.clone() for x in (q, k, v, out, dout)]  # for its kernels

        compiled(self._bwd_preprocess, self._prepare)(*given[3:], delta, lse, dq_sum, options.pop("dlse"))
        compiled(self._flash_attn_bwd, self._gradients)(
            *given[:3], given[4], lse, delta, dq_sum, dk_sum, dv_sum, options, grouped
        )
        finish = compiled(self._bwd_postprocess_convert, self._finish)
        finish(dq_sum, dq)
        if grouped:
            finish(dk_sum, dk)
            finish(dv_sum, dv)

    @staticmethod
    def _prepare(out: Tensor, dout: Tensor, delta: Tensor, lse: Tensor, dq_sum: Tensor, dlse: Tensor | None) -> None:
        dq_sum.zero_()
        rows_last = (out * dout).sum(-1).transpose(-1, -2)
        delta.copy_(rows_last - (0 if dlse is None else dlse))

    @staticmethod
    def _finish(total: Tensor, result: Tensor) -> None:
        result.copy_(total)

    def _gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        options: dict[str, Any],
        adds: bool,
    ) -> None:
        parts = [slice(0, None)]
        if "cu_seqlens_q" in options:
            parts = [slice(*pair) for pair in itertools.pairwise(options["cu_seqlens_q"].tolist())]
            q, k, v, dout, dq, dk, dv, lse, delta = (x[None] for x in (q, k, v, dout, dq, dk, dv, lse, delta))
        for part in parts:
            rows = [x[:, part] for x in (q, k, v, dout)]
            found = self._backward(*rows, lse[:, :, part], delta[:, :, part], options)
            for result, x in zip((dq, dk, dv), found, strict=True):
                into = result[:, part]
                into.copy_(into + x if adds or result is dq else x)

    def _backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        options: dict[str, Any],
    ) -> list[Tensor]:
        assert options["softmax_scale"] > 0 or "score_mod" in options, "masked scores are -inf before it multiplies"
        assert self.arch != 90 or q.shape[2] == k.shape[2] or k.shape[3] == v.shape[3], "its rule for groups"
        # Sums lie in steps of 16 in one kernel and of 32 in those around it.
        assert self.arch != 90 or q.shape[3] % 32 == 0, "wrong gradients"
        scale, group = options["softmax_scale"], q.shape[2] // k.shape[2]
        before, after, mask = self.scores(q, k, scale, options, backward=True)
        shift = lse.masked_fill(lse == -math.inf, 0)[..., None]
        weights = (after.masked_fill(~mask, -math.inf) - shift).exp()
        keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
        d_scores = weights * (torch.einsum("bqhe,bkhe->bhqk", dout, values) - delta[..., None])
        if "score_mod_bwd" in options:
            tables, at = options.get("aux_tensors", ()), [torch.arange(n) for n in before.shape]
            places = [x.int().view([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(at)]
            d_scores = options["score_mod_bwd"](d_scores, before, *places, None, tables)
            d_scores = d_scores.expand(mask.expand(before.shape).shape).masked_fill(~mask, 0)
        dk, dv = (
            x.unflatten(2, (-1, group)).sum(3)
            for x in (
                torch.einsum("bhqk,bqhd->bkhd", d_scores, q) * scale,
                torch.einsum("bhqk,bqhe->bkhe", weights, dout),
            )
        )
        return [torch.einsum("bhqk,bkhd->bqhd", d_scores, keys) * scale, dk, dv]


def compiled(function: Any, kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel by way of the function's cache."""
    if "kernel" not in function.compile_cache:
        function.compile_cache["kernel"] = kernel
    return function.compile_cache["kernel"]


def visited(count: Tensor, blocks: Tensor, size: tuple[int, int], sizes: tuple[int, ...], transposed: bool) -> Tensor:
    """The pairs of all listed blocks, bool ``[B, H, Q, K]``."""
    assert count.dtype == blocks.dtype == torch.int32 and count.shape == blocks.shape[:3]
    q_len, kv_len = sizes[2:]
    columns = -(-q_len // size[0]) if transposed else -(-kv_len // size[1])
    assert blocks.shape[3] <= max(1, columns) and (count <= blocks.shape[3]).all()
    listed = torch.arange(blocks.shape[3]) < count[..., None]
    ascending = blocks[..., 1:] > blocks[..., :-1]
    assert (ascending | ~listed[..., 1:]).all()
    grid = torch.zeros(*blocks.shape[:3], columns + 1, dtype=torch.bool)
    grid.scatter_(3, torch.where(listed, blocks, columns).long(), True)
    grid = grid[..., :columns]
    grid = grid.transpose(2, 3) if transposed else grid
    grid = grid.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)
    assert grid.shape[2] >= q_len and grid.shape[3] >= kv_len
    return grid[:, :, :q_len, :kv_len]


class Device(types.ModuleType):
    """magi_flex.kernels.fa4_device on torch tensors."""

    def __init__(self) -> None:
        super().__init__("magi_flex.kernels.fa4_device")

    @staticmethod
    def interval_mask(slots: int, by_key: bool, packed: bool, by_line: bool) -> Callable[..., Tensor]:
        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor, tables: Any) -> Tensor:
            starts, ends = tables[:2]
            assert starts.shape[:3] == (b.numel(), h.numel(), slots) and (slots in (1, 2, 4) or slots >= 8)
            place, inside = (k, q) if by_key else (q, k)
            parts = [(inside >= starts[b, h, r, place]) & (inside < ends[b, h, r, place]) for r in range(slots)]
            return torch.stack(torch.broadcast_tensors(*parts)).any(0)

        return mask

    @staticmethod
    def score_mod(score: KernelScore, first: int) -> Callable[..., Tensor]:
        return lambda x, b, h, q, k, _, tables: score.forward(TorchLanes(), x, (b, h, q, k), tables[first:])

    @staticmethod
    def score_gradient(score: KernelScore, first: int) -> Callable[..., Tensor]:
        assert score.backward is not None
        backward = score.backward
        return lambda grad, x, b, h, q, k, _, tables: backward(TorchLanes(), grad, x, (b, h, q, k), tables[first:])


@pytest.fixture(params=[90, 100])
def standin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    here = Package(request.param)
    monkeypatch.setitem(sys.modules, "magi_flex.kernels.fa4_device", Device())
    order = types.SimpleNamespace(last_rows_first=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "magi_flex.kernels.fa4_hopper_order", order)
    monkeypatch.setattr(fa4, "architecture", lambda device: here.arch)
    monkeypatch.setattr(fa4, "_on", lambda device: contextlib.nullcontext())
    modules = types.SimpleNamespace(interface=here, block_sparsity=types.SimpleNamespace(BlockSparseTensorsTorch=Lists))
    monkeypatch.setattr(fa4, "package", lambda: modules)
    yield here


# ---- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(MASKS) - set(BITS_MASKS)))
def test_lists_and_bounds_are_the_mask(name: str) -> None:
    for arch, (q_len, kv_len) in itertools.product((90, 100), ((300, 300), (1, 129))):
        dense = make_mask(name, q_len, kv_len).dense()
        plan, sizes = plan_of(dense), dense.shape
        stand_in = Package(arch)
        for mask, backward in (
            (forward_mask(plan, arch, (128, 128), 4), False),
            (backward_mask(plan, arch, (128, 128)), True),
        ):
            assert mask.lists is not None and mask.block is not None and mask.bounds is not None
            options = {
                "block_sparse_tensors": Lists(*mask.lists, mask.block),
                "mask_mod": Device.interval_mask(mask.slots, mask.by_key, False, False),
            }
            tables = [x.expand(*sizes[:2], -1, -1) for x in mask.bounds]
            assert torch.equal(stand_in.mask(sizes, tables, options, backward), dense), (arch, backward)


def test_block_sizes() -> None:
    """They must be multiples of the kernels' tiles, as the package checks; these are its rules."""
    for head_dim, v_dim in ((64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        for arch in (90, 100):
            forward, backward = forward_block(arch, head_dim, v_dim, 10_000), backward_block(arch, head_dim, v_dim)
            assert forward.q % 64 == 0 and forward.kv % 16 == 0 and backward.q % 16 == 0 and backward.kv % 16 == 0
    assert forward_block(90, 64, 64, 999) == (192, 128) and forward_block(90, 128, 128, 999) == (128, 128)
    assert forward_block(100, 128, 128, 128) == (128, 128) and forward_block(100, 128, 128, 129) == (256, 128)
    assert backward_block(90, 128, 128) == (80, 128) and backward_block(100, 128, 128) == (128, 256)


def test_lists_of_any_width() -> None:
    """As while a CUDA graph is captured, when nobody can ask how long the longest list is; and plans with capacity."""
    plan = plan_of(make_mask("document_causal", 700).dense())
    block = BlockSize(64, 32)
    for transposed in (False, True):
        exact = block_lists(plan, block, transposed)
        wide = block_lists(plan, block, transposed, width=40)
        for x, y in zip(exact, wide, strict=True):
            assert torch.equal(x, y[..., : x.shape[-1]]) and (x.dim() == 3 or not y[..., x.shape[-1] :].any())


def test_bounds_are_padded() -> None:
    dense = make_mask("sink_and_window", 57).dense()
    intervals = RowIntervals.from_dense(dense | make_mask("all_images_mutual", 57).dense())
    starts, ends = padded_bounds(intervals)
    assert starts.shape == ends.shape and starts.shape[3] == 57 + PADDING
    assert starts.shape[2] in (1, 2, 4, 8, intervals.max_intervals) and intervals.max_intervals <= starts.shape[2]
    assert torch.equal(RowIntervals(starts[..., :57], ends[..., :57], 57).to_dense(), intervals.to_dense())
    assert (ends <= starts)[..., 57:].all() and (ends <= starts)[:, :, intervals.max_intervals :].all()


# ---- attention ------------------------------------------------------------------------------------------------------


def check(
    standin: Package,
    name: str,
    q_len: int,
    kv_len: int,
    steps: tuple[ScoreStep, ...] = (),
    score_mod: Any = None,
    scale: float = 0.3,
    group: int = 2,
    layout: str = "heads",
    expanded: bool = False,
    plan: MaskPlan | None = None,
    dims: tuple[int, int] = (32, 32),
) -> list[str]:
    """Run forward and backward against dense float64 attention; returns the ways taken."""
    case = make_mask(name, q_len, kv_len)
    dense = case.dense()
    batch = case.batch if case.batch > 1 else 2
    heads, group = (case.heads, 1) if case.heads > 1 else (2 * group, group)
    torch.manual_seed(0)

    def tensor(heads: int, rows: int, dim: int) -> Tensor:
        if layout == "rows":
            return torch.randn(batch, rows, heads, dim).transpose(1, 2)
        return torch.randn(batch, heads, rows, dim)

    q, k, v, d_out = (
        tensor(heads, q_len, dims[0]),
        tensor(heads // group, kv_len, dims[0]),
        tensor(heads // group, kv_len, dims[1]),
        None,
    )
    if expanded:
        k, v = (x[:1].expand(batch, -1, -1, -1) for x in (k, v))
    d_out, d_lse = tensor(heads, q_len, dims[1]), torch.randn(batch, heads, q_len)
    request = AttentionRequest(q, k, v, plan or plan_of(dense), scale, ScoreProgram(steps=steps), max_score=False)
    backend = Fa4Backend()
    result = backend.forward(request)
    exact = dense_attention_with_gradients(q, k, v, d_out, d_lse, dense, score_mod, (), scale)
    grads = backend.backward(request, result.out, result.lse, d_out, d_lse)
    for got, want, like in (
        (result.out, exact.out, q),
        (result.lse, exact.lse, None),
        (grads.dq, exact.dq, q),
        (grads.dk, exact.dk, k),
        (grads.dv, exact.dv, v),
    ):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
        if like is not None and not expanded:
            assert sorted(range(4), key=lambda d: got.stride(d)) == sorted(range(4), key=lambda d: like.stride(d))
    ways, standin.ways = standin.ways, []
    return ways


@pytest.mark.parametrize("standin", [90], indirect=True)
@pytest.mark.parametrize("name", sorted(set(MASKS) - set(BITS_MASKS)))
def test_every_mask(name: str, standin: Package) -> None:
    check(standin, name, 60, 133)


def test_lengths(standin: Package) -> None:
    for q_len, kv_len in ((1, 1), (1, 129), (129, 5), (257, 257)):
        check(standin, "sink_and_window", q_len, kv_len)
    check(standin, "per_batch_and_head_mix", 100, 100)


def test_own_ways(standin: Package) -> None:
    for name, q_len, kv_len, way in (
        ("full", 40, 70, "full"),
        ("causal", 70, 70, "{'causal': True}"),
        ("lower_right_causal", 40, 70, "{'causal': True}"),
        ("causal", 40, 70, "bits"),  # the package's causal ends at the last key
        ("key_padding", 70, 70, "bits"),
        ("nothing", 70, 70, "bits"),
    ):
        assert check(standin, name, q_len, kv_len) == [way] * 2, name
    (window,) = set(check(standin, "sliding_window", 70, 70))
    assert window.startswith("{'window_size_left': ")


def documents(batch: int, *lengths: int) -> tuple[MaskPlan, Tensor]:
    label = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = torch.arange(len(label))
    dense = (label[:, None] == label) & (row <= row[:, None])
    return plan_of(dense.expand(batch, 1, -1, -1)), dense


def test_packed_documents(standin: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4_masks, "LEAST_MEAN_DOCUMENT", 8)
    distance, bias = Distance(torch.tensor([0.1]), False), Bias(torch.randn(70), (0, 0, 1, 0), 0)
    slope, table = 0.1, bias.table
    for name, way in (("document", "packed full"), ("document_causal", "packed {'causal': True}")):
        assert check(standin, name, 70, 70, layout="rows", dims=(16, 16)) == [way] * 2
        # The batch is one sequence only where rows of neighbouring entries follow each other.
        assert check(standin, name, 70, 70, layout="rows") == [way] * 2
        assert check(standin, name, 70, 70, layout="heads") == ["bits"] * 2
    relative = check(standin, name, 70, 70, (distance,), lambda s, b, h, q, k: s + slope * (k - q), layout="rows")
    assert relative == [way] * 2
    assert check(standin, name, 70, 70, (bias,), lambda s, b, h, q, k: s + table[q], layout="rows") == ["bits"] * 2
    monkeypatch.setattr(fa4_masks, "LEAST_MEAN_DOCUMENT", 70)
    assert check(standin, "document", 70, 70, layout="rows") == ["bits"] * 2


def test_scores_scales_and_layouts(standin: Package) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    table = torch.randn(4, 60 + 90 - 1)
    for steps, mod in (
        ((Multiply(2.0),), lambda s, b, h, q, k: 2 * s),
        ((Softcap(1.5),), lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5)),
        ((Distance(-slopes, True),), lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()),
        (
            (Multiply(0.5), Bias(table.flatten(), (0, 149, 1, -1), 89), Softcap(2.0)),
            lambda s, b, h, q, k: 2 * torch.tanh((0.5 * s + table[h, q - k + 89]) / 2),
        ),
    ):
        for name in ("full", "sink_and_window"):
            check(standin, name, 60, 90, steps, mod)
    check(standin, "causal", 50, 50, scale=-0.4)
    check(standin, "sink_and_window", 50, 70, scale=-0.4)
    check(standin, "sink_and_window", 50, 50, scale=0.0)
    check(standin, "full", 50, 50, layout="rows", group=1)
    check(standin, "sink_and_window", 50, 70, dims=(32, 8))
    check(standin, "causal", 50, 50, layout="rows", dims=(16, 8), group=1)
    check(standin, "sink_and_window", 50, 70, dims=(40, 40))
    check(standin, "prefix_lm", 50, 50, expanded=True)


def test_nothing_to_do(standin: Package) -> None:
    for q_len, kv_len in ((0, 5), (5, 0)):
        q, k = torch.randn(1, 2, q_len, 8), torch.randn(1, 1, kv_len, 8)
        request = AttentionRequest(q, k, k, MaskPlan(RowIntervals.full(q_len, kv_len)), 1.0)
        result = Fa4Backend().forward(request)
        assert not result.out.any() and (result.lse == -math.inf).all()
        grads = Fa4Backend().backward(request, result.out, result.lse, torch.ones_like(result.out), None)
        assert not any(x.any() for x in (grads.dq, grads.dk, grads.dv))
    assert standin.ways == []


def test_a_known_structure_is_believed(standin: Package) -> None:
    """And one that is looked up is looked up once."""
    from magi_flex.op_specs import MaskSpec

    plan = MaskSpec(None, "").build([], [], 2, 4, 40, 70, torch.device("cpu")).plan
    assert plan.structure is not None and check(standin, "full", 40, 70, plan=plan) == ["full"] * 2
    plan, _ = documents(1, 30, 200)
    first = fa4_masks.structure_of(plan)
    assert isinstance(first, Documents) and fa4_masks.structure_of(plan) is first


def test_later_forward_calls_are_launches_alone(standin: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package's interface, on other tensors; unless something that the launch holds is another one."""
    monkeypatch.setattr(fa4_masks, "LEAST_MEAN_DOCUMENT", 8)
    document = plan_of(make_mask("document", 70).dense())
    for plan, batch in ((plan_of(make_mask("sink_and_window", 70).dense()), 2), (document, 1)):

        def forward(scale: float = 0.3, offset: int = 0, plan: MaskPlan = plan, batch: int = batch, **more: Any) -> int:
            tensors = [
                torch.randn(offset + batch * 70 * heads * 32)[offset:].view(batch, 70, heads, 32).transpose(1, 2)
                for heads in (4, 2, 2)
            ]
            request = AttentionRequest(*tensors, plan, scale, max_score=False, **more)  # type: ignore[misc]
            result = Fa4Backend().forward(request)
            mod = (lambda s, b, h, q, k: 2 * torch.tanh(s / 2)) if more else None
            exact = dense_attention_with_gradients(
                *tensors, torch.zeros_like(result.out), None, plan.intervals.to_dense(), mod, (), scale
            )
            torch.testing.assert_close(result.out.double(), exact.out, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(result.lse.double(), exact.lse, atol=2e-5, rtol=2e-5)
            calls, standin.ways = len(standin.ways), []
            return calls

        assert [forward() for _ in range(3)] == [1, 0, 0]
        assert forward(scale=0.2) == 1  # another argument of the kernel
        assert [forward(scale=-0.3) for _ in range(2)] == [1, 1]  # q changes its sign
        softcap = ScoreProgram(steps=(Softcap(2.0),))
        assert [forward(score=softcap) for _ in range(2)] == [1, 0]
        assert [forward(offset=1) for _ in range(2)] == [1, 1]  # copied, as kernels want aligned addresses
        assert [forward(), forward(score=softcap)] == [0, 0]
        plan.starts.add_(0)  # as if new documents were written there
        assert [forward() for _ in range(2)] == [1, 0]


# ---- routing --------------------------------------------------------------------------------------------------------

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
    assert route.reservation("fa4") is None
    monkeypatch.setattr(fa4, "architecture", lambda device: 90)
    assert Fa4Backend().reservations(FACTS) == []
    (general,) = Fa4Backend().reservations(replace(FACTS, score_steps=None))
    assert "general score mod" in general
    (dims,) = Fa4Backend().reservations(replace(FACTS, head_dim=32, v_head_dim=32))
    assert "32 and 32" in dims
    monkeypatch.setattr(fa4, "architecture", lambda device: 103)
    assert Fa4Backend().reservations(FACTS) == ["its code for compute capability 10.3"]
