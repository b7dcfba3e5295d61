"""A stand-in for flash-attn-4's two functions and for what its kernels call, on torch tensors.

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D head dim, E value head dim.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import fa4
from magi_flex.kernels.fa4_score import KernelScore
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS
from tests.torch_lanes import TorchLanes

# Masks whose rows are intervals, few enough for them.
INTERVAL_MASKS = sorted(
    set(MASKS) - {"dense_table", "dilated", "bigbird", "selected_tokens", "natten_3d", "temporal_head"}
)


def plan_of(mask_BHQK: Tensor) -> MaskPlan:
    return MaskPlan(RowIntervals.from_dense(mask_BHQK))


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
        self.base = math.e  # of the logarithms that forward kernels write, if they are compiled now

        def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, None, None, None]:
            self._way(options)
            out, lse = options.pop("out"), options.pop("lse")
            # As the package does, for addresses that its kernels cannot take.
            aligned = [x if x.data_ptr() % 16 == 0 else x.clone() for x in (q, k, v)]
            kernel = functools.partial(self._kernel, base=self.base)
            compiled(self._flash_attn_fwd, kernel)(*aligned, out, lse, options)
            return out, lse, None, None, None

        def backward(*tensors: Tensor, **options: Any) -> None:
            self._bwd(*tensors, **options)

        self._flash_attn_fwd: Any = forward
        self._flash_attn_bwd: Any = backward
        self._bwd_preprocess, self._bwd_postprocess_convert = (types.SimpleNamespace() for _ in range(2))
        for function in (forward, backward, self._bwd_preprocess, self._bwd_postprocess_convert):
            function.compile_cache = {}  # type: ignore[union-attr]

    @contextlib.contextmanager
    def adapted(self, last_rows_first: bool) -> Iterator[None]:
        """fa4_hopper_forward's, for this package."""
        self.base = 2.0
        yield
        self.base = math.e

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

    def _kernel(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: dict[str, Any], base: float
    ) -> None:
        """What the interface compiles and launches."""
        scale = options["softmax_scale"]
        assert scale > 0 or "score_mod" in options, "the kernel takes the largest score before it multiplies"
        if "cu_seqlens_q" not in options:
            lse.copy_(self._forward(q, k, v, out, options) / math.log(base))
            return
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
        for begin, end in itertools.pairwise(options["cu_seqlens_q"].tolist()):
            assert end - begin <= options["max_seqlen_q"]
            part = slice(begin, end)
            rows = self._forward(q[None, part], k[None, part], v[None, part], out[None, part], options)[0]
            lse[:, part] = rows / math.log(base)

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
    def kernel_key(what: str) -> str:
        return what

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


def install(arch: int, monkeypatch: pytest.MonkeyPatch) -> Package:
    """In the package's place, for compute capability ``arch`` / 10."""
    package = Package(arch)
    monkeypatch.setitem(sys.modules, "magi_flex.kernels.fa4_device", Device())
    forward = types.SimpleNamespace(adapted=package.adapted, writes_base_2=lambda: True)
    monkeypatch.setitem(sys.modules, "magi_flex.kernels.fa4_hopper_forward", forward)
    monkeypatch.setattr(fa4, "architecture", lambda device: arch)
    block_sparsity = types.SimpleNamespace(BlockSparseTensorsTorch=Lists)
    modules = types.SimpleNamespace(interface=package, block_sparsity=block_sparsity)
    monkeypatch.setattr(fa4, "package", lambda: modules)
    return package
