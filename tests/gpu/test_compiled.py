"""Training through torch.compile on a GPU: new documents in each step, CUDA graphs, and cases that cost users time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as stock
from torch import Tensor, nn

import magi_flex
from magi_flex import mods, ops
from magi_flex.canonical_mask import CanonicalMaskMod
from magi_flex.kernels import cuda_driver, device_plans, label_attention
from magi_flex.kernels.label_attention import LabelledAttention
from magi_flex.kernels.request import AttentionGradients, AttentionOutput, AttentionRequest
from magi_flex.kernels.route import facts_of, route
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import MaskSpec
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients
from tests.compiling import attend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
S, HEADS, KV_HEADS, DIM, WIDTH = 1024, 4, 2, 64, 256
STEPS = 50


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=100):
        yield


class Compilations:
    """Counts graphs that Dynamo compiles, Triton kernels that are compiled or loaded, and other kernels loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton import knobs

        self.kernels: Counter[str] = Counter()
        load = cuda_driver.Kernel.__init__

        def count_triton(*, fn: Any, **more: Any) -> None:
            self.kernels[str(fn.name)] += 1

        def count_load(kernel: Any, code: bytes, name: str, *args: Any, **options: Any) -> None:
            self.kernels[name] += 1
            load(kernel, code, name, *args, **options)

        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", count_triton)
        monkeypatch.setattr(cuda_driver.Kernel, "__init__", count_load)
        torch._dynamo.utils.counters.clear()

    def so_far(self) -> tuple[int, Counter[str]]:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], self.kernels.copy()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    return Compilations(monkeypatch)


# ---- training -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two blocks of attention and a feed-forward layer."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.options = {} if backend is None else {"kernel_options": {"magi_backend": backend}}
        self.embed = nn.Embedding(97, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(2))
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 97)

    def forward(self, tokens: Tensor, mask: Any) -> Tensor:
        x = self.embed(tokens)
        for project, hidden in zip(self.projections, self.hidden, strict=True):
            heads = project(nn.functional.rms_norm(x, (WIDTH,))).unflatten(-1, (-1, DIM)).transpose(1, 2)
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
            x = x + attend(q, k, v, None, mask, **self.options).transpose(1, 2).flatten(2)
            x = x + hidden(nn.functional.silu(x))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def document_ids(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    cuts = int(torch.randint(1, 9, (), generator=generator))
    cut = torch.randint(1, S, (cuts,), generator=generator)
    return (torch.arange(S)[:, None] >= cut).sum(1).cuda()


def stock_mask(ids: Tensor) -> Any:
    return stock.create_block_mask(mods.document_causal(ids), None, None, S, S, "cuda")


def our_mask(ids: Tensor) -> Any:
    return magi_flex.create_block_mask(mods.document_causal(ids), None, None, S, S, "cuda")


def key_range_mask(ids: Tensor) -> Any:
    first = torch.searchsorted(ids, ids)
    return stock.create_block_mask(lambda b, h, q, k: (k >= first[q]) & (k <= q), None, None, S, S, "cuda")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("make", [stock_mask, our_mask], ids=["stock", "ours"])
def test_contents_written_without_a_trace(make: Any, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call after that is right, be the device idle or busy, and no other call runs twice."""
    runs: list[int] = []
    run = ops.run_forward
    monkeypatch.setattr(ops, "run_forward", lambda *args: (runs.append(1), run(*args))[1])
    torch.manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    leaves = [torch.randn(1, h, S, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in sizes]
    d_out, ballast = torch.randn_like(leaves[0]), torch.randn(8192, 8192, device="cuda")
    function, row, counts = torch.compile(attend, fullgraph=True), torch.arange(S, device="cuda"), []
    ids = document_ids(0)
    mask = make(ids)
    for step in (0, 0, 1, 1, 2):
        overwrite(ids, mask, document_ids(step), make(document_ids(step)))
        dense = ((ids[:, None] == ids) & (row[:, None] >= row)).view(1, 1, S, S)
        for _ in range(20 * busy):
            torch.mm(ballast, ballast)
        runs.clear()
        with magi_flex.enable():
            out = function(*leaves, None, mask)
        counts.append(len(runs))
        grads = torch.autograd.grad(out, leaves, d_out)
        exact = dense_attention_with_gradients(*leaves, d_out, mask_BHQK=dense)
        for got, right in zip((out, *grads), (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
            assert (got.double() - right).norm() < 1e-2 * right.norm(), step
    assert counts == [1, 1, 2, 1, 2]


def overwrite(ids: Tensor, mask: Any, new_ids: Tensor, new_mask: Any) -> None:
    """Other contents in the memory of a mask and of what it captures; nothing counts the change."""
    ids.data.copy_(new_ids)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        getattr(mask, name).data.copy_(getattr(new_mask, name))
    if isinstance(mask.mask_mod, CanonicalMaskMod):
        mask.mask_mod.starts.data.copy_(new_mask.mask_mod.starts)
        mask.mask_mod.ends.data.copy_(new_mask.mask_mod.ends)


MASKS = {"stock": stock_mask, "ours": our_mask, "key range": key_range_mask}


def losses_and_gradients(function: Any, model: nn.Module, tokens: Tensor, mask: Any) -> list[Tensor]:
    torch.compiler.cudagraph_mark_step_begin()
    loss = function(tokens, mask)
    return [x.clone() for x in (loss.detach(), *torch.autograd.grad(loss, list(model.parameters())))]


@pytest.mark.parametrize("plans", ["auto", "torch"])
@pytest.mark.parametrize("make", MASKS)
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [(torch.bfloat16, None), (torch.bfloat16, "reduce-overhead"), (torch.float32, None)],
    ids=["bf16", "bf16 in graphs", "fp32"],
)
def test_new_documents_in_every_step(
    compilations: Compilations, dtype: torch.dtype, mode: str | None, make: str, plans: str
) -> None:
    """Training agrees with PyTorch's own kernels, and after its first step nothing is compiled any more."""
    torch.manual_seed(0)
    ours, theirs = (Model(backend).to("cuda", dtype) for backend in (None, "stock"))
    theirs.load_state_dict(ours.state_dict())
    with magi_flex.enable(plans=plans):
        function = torch.compile(ours, fullgraph=True, dynamic=False, mode=mode)
        reference = torch.compile(theirs, fullgraph=True, dynamic=False)
        seen = None
        for step in range(STEPS):
            tokens = torch.randint(0, 97, (1, S), generator=torch.Generator().manual_seed(step)).cuda()
            mask = MASKS[make](document_ids(step))
            got = losses_and_gradients(function, ours, tokens, mask)
            if step % 24 == 0:
                counted = compilations.so_far()
                wanted = losses_and_gradients(reference, theirs, tokens, mask)
                for a, b in zip(got, wanted, strict=True):
                    error = (a.double() - b.double()).norm() / b.double().norm()
                    assert error < (4e-2 if dtype == torch.bfloat16 else 1e-4), (step, a.shape, float(error))
                if seen is not None:
                    assert counted == seen
                seen = compilations.so_far()
        assert compilations.so_far() == seen
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


# ---- labels in CUDA graphs ------------------------------------------------------------------------------------------


LABELS = ("packed", "scattered", "packed again", "padding", "shuffled", "scattered again")


def labels_of(kind: str, size: int) -> Tensor:
    ids = torch.arange(size, device="cuda") // 150
    if kind.startswith("scattered"):
        return torch.arange(size, device="cuda") * 7919 % 5
    if kind == "padding":
        return torch.where(torch.arange(size, device="cuda") % 97 == 0, -1, ids)
    return {"packed": ids, "packed again": ids * 2 // 3}.get(kind, ids * 5 % 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_labels_that_return_inside_a_graph(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """One CUDA graph serves packed documents and labels in any order, and the host makes no plan."""
    size = 600
    built: list[int] = []
    tile_plans: list[int] = []
    build_mask, build = MaskSpec.build, device_plans.build_device_plan
    monkeypatch.setattr(MaskSpec, "build", lambda *args: built.append(1) or build_mask(*args))
    monkeypatch.setattr(device_plans, "build_device_plan", lambda *args: tile_plans.append(1) or build(*args))
    leaves = inputs(1, 4, 2, size, size, 64, 64, dtype)

    def two_layers(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        one = attend(q, k, v, None, mask)
        return one / 2 + attend(q, k, v * 2, None, mask) / 4

    with magi_flex.enable(plans="device"):
        function = torch.compile(two_layers, mode="reduce-overhead", fullgraph=True, dynamic=False)
        for kind in (*LABELS, *LABELS):
            ids = labels_of(kind, size)
            mask = stock_mask_of(ids)
            dense = (ids[:, None] == ids) & torch.ones(size, size, dtype=torch.bool, device="cuda").tril()

            def step(q: Tensor, k: Tensor, v: Tensor, _: None, mask: Any) -> Tensor:
                torch.compiler.cudagraph_mark_step_begin()
                return function(q, k, v, mask)

            check(step, leaves, dense[None, None], mask)
    assert not built
    # When the graphs are warmed up and when they are captured: of the forward pass, and for both ways to the gradient
    # of q, between which the device chooses, key tiles for each and row tiles for one.
    assert len(tile_plans) <= 2 * 4
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def stock_mask_of(ids: Tensor) -> Any:
    return stock.create_block_mask(mods.document_causal(ids), None, None, len(ids), len(ids), "cuda")


def test_labels_compute_nothing_if_not_wanted() -> None:
    """The kernels for labels that return, on a GPU: over results that are right, and over poison."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = 300
    for dtype, dim in ((torch.bfloat16, 128), (torch.float32, 64), (torch.float16, 256), (torch.bfloat16, 32)):
        q, k, v, d_out = (
            torch.randn(2, heads, size, dim, generator=generator, device="cuda").to(dtype) for heads in (4, 2, 2, 4)
        )
        rest = MaskPlan.from_dense(torch.ones(1, 1, size, size, dtype=torch.bool, device="cuda").tril()).intervals
        ids = labels_of("scattered", size).view(1, 1, -1)
        wanted = torch.zeros(1, dtype=torch.int32, device="cuda")
        mask = LabelledAttention(rest, ids, ids, None, (1, 1), wanted)
        request = AttentionRequest(q, k, v, MaskPlan(rest), dim**-0.5)
        result = AttentionOutput(torch.full_like(q, 7), *torch.full((2, 2, 4, size), 7.0, device="cuda").unbind())
        grads = AttentionGradients(*(torch.full_like(x, 7) for x in (q, k, v)))
        for flag in (0, 1):
            wanted.fill_(flag)
            label_attention.forward(request, mask, result)
            label_attention.backward(request, mask, result.out, result.lse, d_out, None, grads)
            got = [result.out, grads.dq, grads.dk, grads.dv]
            if not flag:
                assert all((x == 7).all() for x in (*got, result.lse, result.max_score))
        dense = rest.to_dense() & (ids[..., None] == ids[:, :, None])
        near, exact = (
            dense_attention_with_gradients(q, k, v, d_out, None, dense, dtype=x) for x in (dtype, torch.float64)
        )
        for x, name in zip(got, ("out", "dq", "dk", "dv"), strict=True):
            assert_within_factor(x, getattr(near, name), getattr(exact, name), floor=1e-5 if dim == 64 else 2e-3)


# ---- cases that cost users time -------------------------------------------------------------------------------------


def inputs(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, v_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim))
    return [torch.randn(s, generator=generator, device="cuda").to(dtype).requires_grad_() for s in shapes]


def check(function: Callable[..., Tensor], leaves: list[Tensor], dense: Tensor | None, mask: Any) -> list[Tensor]:
    """Output and gradients, as near to float64 as dense attention of the same precision."""
    out = function(*leaves, None, mask)
    d_out = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(out.dtype)
    got = [out, *torch.autograd.grad(out, leaves, d_out)]
    near, exact = (
        dense_attention_with_gradients(*leaves, d_out, None, dense, dtype=dtype)
        for dtype in (leaves[0].dtype, torch.float64)
    )
    floor = 1e-5 if leaves[0].dtype == torch.float32 else 2e-3
    for x, name in zip(got, ("out", "dq", "dk", "dv"), strict=True):
        assert_within_factor(x, getattr(near, name), getattr(exact, name), floor=floor)
    return got


@pytest.fixture
def compiled() -> Iterator[Callable[..., Tensor]]:
    with magi_flex.enable():
        yield torch.compile(attend, fullgraph=True, dynamic=False)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


@pytest.mark.parametrize("make", [stock.create_block_mask, magi_flex.create_block_mask], ids=["stock", "ours"])
def test_mask_of_another_length(compiled: Callable[..., Tensor], make: Any) -> None:
    """A mask for other lengths is refused; cropped (torch 2.11: to whole blocks) it is right in both directions."""
    for mask_q, mask_kv, length in ((4096, 4096, 2048), (128, 256, 2)):
        mask = make(causal, 2, None, mask_q, mask_kv, device="cuda")
        with pytest.raises(Exception, match="block_mask was created for"):
            compiled(*inputs(2, 4, 2, length, length, 64, 64, torch.bfloat16), None, mask)
    cropped = make(causal, 2, None, 4096, 4096, device="cuda")._adjust(1024, 1024)
    dense = torch.ones(1024, 1024, dtype=torch.bool, device="cuda").tril()
    check(compiled, inputs(2, 4, 2, 1024, 1024, 64, 64, torch.bfloat16), dense, cropped)


@pytest.mark.parametrize("make", [stock.create_block_mask, magi_flex.create_block_mask], ids=["stock", "ours"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_example_that_is_all_padding(make: Any, dtype: torch.dtype) -> None:
    lengths = torch.tensor([300, 0, 257], device="cuda")
    mask = make(lambda b, h, q, k: k < lengths[b], 3, None, 300, 300, device="cuda")
    dense = torch.arange(300, device="cuda") < lengths.view(3, 1, 1, 1)
    leaves = inputs(3, 4, 2, 300, 300, 64, 64, dtype)

    def with_lse(*args: Any) -> Any:
        return attend(*args, return_aux=stock.AuxRequest(lse=True))

    with magi_flex.enable():
        out, *grads = check(torch.compile(attend, fullgraph=True), leaves, dense, mask)
        _, aux = torch.compile(with_lse, fullgraph=True)(*leaves, None, mask)
    assert (out[1] == 0).all() and (aux.lse[1] == -math.inf).all()
    assert all((grad[1] == 0).all() for grad in grads)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_rows_times_strides_past_31_bits(backend: str) -> None:
    """Keys and values stored [rows, batch, dim], the rows' stride times their number beyond 2^31 elements."""
    rows, batch, dim = 24000, 704, 128
    assert rows * batch * dim > 1 << 31
    k, v = (torch.empty(rows, batch, dim, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    k, v = (x.permute(1, 0, 2)[:, None].detach().requires_grad_() for x in (k, v))
    q = torch.randn(batch, 1, 16, dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with magi_flex.enable(backend=backend):
        out = attend(q, k, v)
        d_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v), d_out)
    for b in (0, 350, batch - 1):
        part = [x.detach()[b : b + 1] for x in (q, k, v)]
        near, exact = (
            dense_attention_with_gradients(*part, d_out[b : b + 1], dtype=dtype)
            for dtype in (torch.bfloat16, torch.float64)
        )
        got = [x[b : b + 1] for x in (out, *grads)]
        for x, name in zip(got, ("out", "dq", "dk", "dv"), strict=True):
            assert_within_factor(x, getattr(near, name), getattr(exact, name), floor=2e-3)


def test_forward_and_backward_have_tiles_of_their_own(compiled: Callable[..., Tensor]) -> None:
    ids = torch.arange(512, device="cuda") // 170
    mask = magi_flex.create_block_mask(mods.document_causal(ids), None, None, 512, 512, "cuda")
    dense = (ids[:, None] == ids) & torch.ones(512, 512, dtype=torch.bool, device="cuda").tril()
    check(compiled, inputs(1, 4, 2, 512, 512, 192, 128, torch.bfloat16), dense, mask)


def test_fresh_tensors_compile_nothing(compilations: Compilations) -> None:
    """Two backward passes of equal shapes."""
    with magi_flex.enable():
        function = torch.compile(attend, fullgraph=True, dynamic=False)
        counts = []
        for _ in range(3):
            leaves = inputs(1, 4, 2, 384, 384, 64, 64, torch.bfloat16)
            mask = magi_flex.create_block_mask(causal, None, None, 384, 384, "cuda")
            torch.autograd.grad(function(*leaves, None, mask).float().sum(), leaves)
            counts.append(compilations.so_far())
    assert counts[0] == counts[1] == counts[2] and counts[0][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lengths_and_layouts(dtype: torch.dtype) -> None:
    """One compiled function for any length, over poisoned memory: rows before heads, keys that all batch entries share,
    values out of wider rows, documents of which some attend to nothing."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    with magi_flex.enable():
        function = torch.compile(attend, fullgraph=True, dynamic=True)
        for length in (129, 1, 5, 127, 257, 1025, 2046):
            q, k = random(2, length, 4, 64).transpose(1, 2), random(1, 2, length, 64).expand(2, -1, -1, -1)
            v = random(2, 2, length, 96)[..., 16:80]
            ids = torch.arange(length, device="cuda") // 50
            mask = stock.create_block_mask(
                lambda b, h, q, k, ids=ids: (ids[q] == ids[k]) & (ids[q] != 1) & (k <= q),
                None,
                None,
                length,
                length,
                "cuda",
            )
            dense = (ids[:, None] == ids) & (ids != 1)[:, None]
            dense &= torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
            poison = torch.full((64 << 20,), math.nan, device="cuda")
            del poison
            check(function, [x.requires_grad_() for x in (q, k, v)], dense[None, None], mask)


def test_eager_calls() -> None:
    ids = torch.arange(700, device="cuda") // 257
    mask = magi_flex.create_block_mask(mods.document_causal(ids), None, None, 700, 700, "cuda")
    dense = (ids[:, None] == ids) & torch.ones(700, 700, dtype=torch.bool, device="cuda").tril()
    with magi_flex.enable():
        check(attend, inputs(2, 6, 2, 700, 700, 64, 64, torch.bfloat16), dense, mask)


@pytest.mark.skipif(not HOPPER, reason="the first choice is Hopper's")
def test_the_fastest_backend_is_taken() -> None:
    q, k, v = inputs(1, 4, 2, 128, 128, 64, 64, torch.bfloat16)
    request = AttentionRequest(
        q, k, v, MaskPlan.from_dense(torch.ones(1, 1, 128, 128, dtype=torch.bool, device="cuda")), 0.125
    )
    assert route(facts_of(request, True)).name == "ffa"
