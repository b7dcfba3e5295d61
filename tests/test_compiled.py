"""Compiled flex_attention with our kernels: forward, backward, masks of any origin, shapes, statistics, sharing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as stock
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import magi_flex
from inductor_lowering.capture import trace_mask_mod
from inductor_lowering.tile_program import joint_program, score_program
from magi_flex import ops, plan_memo
from magi_flex.kernels.layout import dense_order
from magi_flex.op_specs import CallSpec, MaskSpec, ScoreSpec
from tests.cases.masks import make_mask
from tests.cases.reference import assert_within_factor, dense_attention, dense_attention_with_gradients
from tests.compiling import attend, check_training, qkv


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    with magi_flex.enable(), torch._dynamo.config.patch(recompile_limit=100):
        yield


@pytest.fixture(scope="module")
def static() -> Any:
    return torch.compile(attend, fullgraph=True, dynamic=False)


@pytest.fixture(scope="module")
def dynamic() -> Any:
    return torch.compile(attend, fullgraph=True, dynamic=True)


def block_mask(case: Any, make: Any = stock.create_block_mask, **options: Any) -> Any:
    batch = case.batch if case.batch > 1 else None
    heads = case.heads if case.heads > 1 else None
    return make(case.mask_mod, batch, heads, case.q_len, case.kv_len, device="cpu", **options)


class Calls:
    """Counts what the compiled graphs run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.plans = self.forward = self.backward = 0

        def counted(name: str, function: Any) -> Any:
            def call(*args: Any) -> Any:
                setattr(self, name, getattr(self, name) + 1)
                return function(*args)

            return call

        build = counted("plans", ops.MaskSpec.build)
        full = ops.MaskSpec.build
        monkeypatch.setattr(ops.MaskSpec, "build", lambda spec, *args: (full if spec.is_full else build)(spec, *args))
        monkeypatch.setattr(ops, "run_forward", counted("forward", ops.run_forward))
        monkeypatch.setattr(ops, "run_backward", counted("backward", ops.run_backward))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize("make", [stock.create_block_mask, magi_flex.create_block_mask], ids=["stock", "ours"])
def test_training(dynamic: Any, calls: Calls, make: Any) -> None:
    for name, q_len, kv_len in (("document_causal", 129, 129), ("document_causal", 257, 257), ("causal", 65, 130)):
        case = make_mask(name, q_len, kv_len)
        check_training(dynamic, qkv(q_len=q_len, kv_len=kv_len), case.dense(), block_mask(case, make))
    assert (calls.plans, calls.forward, calls.backward) == (3, 3, 3)


def test_a_mask_that_stays_is_planned_once(dynamic: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its contents change, be it without a trace.  Compiled code calls our functions themselves."""
    direct, called = torch.ops.magi_flex.direct, []
    for name, function in vars(direct).copy().items():
        monkeypatch.setattr(direct, name, lambda *args, n=name, f=function: (called.append(n), f(*args))[1])
    ids = torch.arange(129) // 50
    mask = stock.create_block_mask(lambda b, h, q, k: ids[q] >= ids[k], None, None, 129, 129, device="cpu")
    for _ in range(3):
        check_training(dynamic, qkv(), (ids[:, None] >= ids)[None, None], mask)
    assert calls.plans == 1 and called == 3 * ["plan_handle", "attention", "attention_backward"]
    mask.kv_indices.data.copy_(mask.kv_indices.data.flip(-1))
    mask.kv_num_blocks.data.fill_(2)
    ids.data.copy_(torch.arange(129) // 30)
    check_training(dynamic, qkv(), (ids[:, None] >= ids)[None, None], mask)
    assert calls.plans == 2


def test_contents_that_are_compared_later(dynamic: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a call runs by the plan from before, and again if that turns out to be another mask's; not where a
    score mod could then be asked for pairs that the mask leaves out."""
    noted = plan_memo._noted

    def later(tensors: Any, identity: Any) -> Any:
        entry = plan_memo._find(plan_memo._key(tensors, identity))
        return None if entry is None else (entry.value, lambda: noted(tensors, identity) is not None)

    monkeypatch.setattr(plan_memo, "_noted", later)
    ids, table = torch.arange(129) // 50, torch.linspace(-1, 1, 3)
    mask = stock.create_block_mask(lambda b, h, q, k: ids[q] >= ids[k], None, None, 129, 129, device="cpu")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[ids[q] % 3]

    forwards = []
    for given in (None, score_mod):
        for documents in (50, 50, 30, 30):
            ids.data.copy_(torch.arange(129) // documents)
            if documents == 30:
                mask.kv_indices.data.copy_(torch.tensor([[0, 1], [0, 1]]))
                mask.kv_num_blocks.data.fill_(2)
            before = calls.forward
            check_training(dynamic, qkv(), (ids[:, None] >= ids)[None, None], mask, given)
            forwards.append(calls.forward - before)
    assert forwards == [1, 1, 2, 1] + [1, 1, 1, 1]


def test_training_without_mask(static: Any, calls: Calls) -> None:
    check_training(static, qkv(q_len=37), None)
    assert (calls.plans, calls.forward, calls.backward) == (0, 1, 1)


def test_inference(dynamic: Any, calls: Calls) -> None:
    case = make_mask("document_causal", 129)
    inputs = qkv(grad=False)
    out = dynamic(*inputs, None, block_mask(case))
    assert_within_factor(
        out, *(dense_attention(*inputs, case.dense(), dtype=t).out for t in (torch.float32, torch.float64)), floor=1e-6
    )
    assert (calls.plans, calls.forward, calls.backward) == (1, 1, 0)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_statistics_and_gradient_through_lse(compiled: bool) -> None:
    case = make_mask("key_padding", 66, 90)
    q, k, v = qkv(batch=case.batch, q_len=66, kv_len=90)

    def function(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Any:
        return attend(q, k, v, None, block_mask, return_aux=stock.AuxRequest(lse=True, max_scores=True))

    function = torch.compile(function, fullgraph=True) if compiled else function
    out, aux = function(q, k, v, block_mask(case))
    exact = dense_attention(q.double(), k.double(), v.double(), case.dense())
    for actual, right in ((aux.lse, exact.lse), (aux.max_scores, exact.max_score)):
        torch.testing.assert_close(actual.double(), right * math.log(2), atol=1e-5, rtol=1e-5)
    assert not aux.max_scores.requires_grad
    seen = aux.lse > -math.inf
    d_out, d_lse = torch.randn_like(out), torch.randn_like(aux.lse) * seen
    grads = torch.autograd.grad((out, aux.lse), (q, k, v), (d_out, d_lse))
    right = dense_attention_with_gradients(q, k, v, d_out, d_lse * math.log(2), case.dense())
    for actual, exact_grad in zip(grads, (right.dq, right.dk, right.dv), strict=True):
        torch.testing.assert_close(actual.double(), exact_grad, atol=1e-5, rtol=1e-5)
    with warnings.catch_warnings(action="ignore"):  # return_lse is deprecated
        _, lse = attend(q, k, v, None, block_mask(case), return_lse=True)
    torch.testing.assert_close(lse, aux.lse)


def test_only_lse_is_used() -> None:
    """The output has no gradient at all."""
    q, k, v = qkv(q_len=20)
    lse = torch.compile(lambda *x: attend(*x, return_aux=stock.AuxRequest(lse=True))[1].lse, fullgraph=True)
    grads = torch.autograd.grad(lse(q, k, v).sum(), (q, k))
    right = torch.autograd.grad(dense_attention(q, k, v).lse.sum() * math.log(2), (q, k))
    torch.testing.assert_close(grads, right, atol=1e-5, rtol=1e-5)


# ---- shapes, dtypes, layouts ----------------------------------------------------------------------------------------


def test_any_whole_head_ratio_and_a_mask_per_query_head(static: Any) -> None:
    """9 query and 3 key heads, 5 tokens; the mask is indexed by the query head; V has another dim."""
    allowed = torch.rand(9, 5, 5) < 0.6
    mask = magi_flex.create_block_mask(lambda b, h, q, k: allowed[h, q, k], None, 9, 5, 5, device="cpu")
    check_training(static, qkv(heads=9, kv_heads=3, q_len=5, dim=64, v_dim=32), allowed[None], mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(static: Any, dtype: torch.dtype) -> None:
    case = make_mask("causal", 65)
    out = check_training(static, qkv(q_len=65, dtype=dtype), case.dense(), block_mask(case))
    assert out.dtype == dtype


def test_autocast(dynamic: Any) -> None:
    inputs = qkv(q_len=65)
    with torch.autocast("cpu", torch.bfloat16):
        compiled, eager = dynamic(*inputs), attend(*inputs)
    low = [x.to(torch.bfloat16) for x in inputs]
    assert compiled.dtype == eager.dtype == torch.bfloat16
    torch.testing.assert_close(compiled, attend(*low))
    torch.testing.assert_close(eager, attend(*low))


def test_results_follow_the_stride_order_of_the_query(dynamic: Any) -> None:
    """Heads behind tokens in memory, as a projection leaves them; also what a compiled producer hands over."""
    q, k, v = (torch.randn(2, 33, heads, 16).transpose(1, 2).requires_grad_() for heads in (4, 2, 2))
    out = check_training(dynamic, (q, k, v), None)
    assert out.stride() == attend(q, k, v).stride() == q.stride()

    def project(x: Tensor, weight: Tensor) -> Tensor:
        heads = (x @ weight).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        out = attend(*heads)
        return out.transpose(1, 2).flatten(2)

    x, weight = torch.randn(2, 33, 20), torch.randn(20, 192, requires_grad=True)
    compiled = torch.compile(project, fullgraph=True)(x, weight)
    plain = project(x, weight)
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)
    grads = [torch.autograd.grad(y.square().sum(), weight)[0] for y in (compiled, plain)]
    torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-4)


def test_keys_shared_by_the_batch(static: Any) -> None:
    case = make_mask("causal", 40)
    mask = stock.create_block_mask(case.mask_mod, 3, None, 40, 40, device="cpu")
    (q, _, _), (_, k, v) = qkv(batch=3, q_len=40), qkv(batch=1, q_len=40)
    for function in (static, attend):
        out = function(q, k, v, None, mask)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        right = dense_attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), case.dense()).out
        torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)
        exact = torch.autograd.grad(right.square().sum(), (q, k, v))
        torch.testing.assert_close(grads, exact, atol=1e-4, rtol=1e-4)


# ---- several layers, checkpoints, recompilation ---------------------------------------------------------------------


class Layers(torch.nn.Module):
    """Blocks with residual attention; ``masks`` take turns."""

    def __init__(self, count: int, wrap: Any = None):
        super().__init__()
        self.projections = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(count))
        self.wrap = wrap

    def block(self, projection: torch.nn.Module, x: Tensor, mask: Any) -> Tensor:
        heads = projection(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + attend(*heads, None, mask).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, masks: Any) -> Tensor:
        for i, projection in enumerate(self.projections):
            mask = masks[i % len(masks)]
            x = self.block(projection, x, mask) if self.wrap is None else self.wrap(self.block, projection, x, mask)
        return x


def gradients(model: torch.nn.Module, function: Any, x: Tensor, masks: Any) -> list[Tensor]:
    return list(torch.autograd.grad(function(x, masks).square().sum(), list(model.parameters())))


def test_layers_share_plans(calls: Calls) -> None:
    torch.manual_seed(0)
    model = Layers(4)
    masks = [block_mask(make_mask(name, 65)) for name in ("document", "sliding_window")]
    x = torch.randn(2, 65, 32)
    compiled = gradients(model, torch.compile(model, fullgraph=True), x, masks)
    assert (calls.plans, calls.forward, calls.backward) == (2, 4, 4)
    for actual, right in zip(compiled, gradients(model, model, x, masks), strict=True):
        torch.testing.assert_close(actual, right, atol=1e-3, rtol=1e-4)


def save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op == torch.ops.higher_order.flex_attention
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing(calls: Calls, selective: bool) -> None:
    """Plain: attention runs again in the backward, with the plan of the forward.  Selective: its result is kept."""
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, save_attention)} if selective else {}
    torch.manual_seed(0)
    model = Layers(2, partial(checkpoint, use_reentrant=False, **contexts))
    masks = [block_mask(make_mask("document", 65))]
    x = torch.randn(2, 65, 32)
    compiled = gradients(model, torch.compile(model, fullgraph=True), x, masks)
    assert (calls.plans, calls.forward, calls.backward) == (1, 2 if selective else 4, 2)
    model.wrap = None
    for actual, right in zip(compiled, gradients(model, model, x, masks), strict=True):
        torch.testing.assert_close(actual, right, atol=1e-3, rtol=1e-4)


def test_recompilation() -> None:
    """New contents never compile again, nor do new lengths after the second ones."""
    counter = CompileCounterWithBackend("inductor")
    function = torch.compile(attend, fullgraph=True, backend=counter, dynamic=True)

    def step(length: int, seed: int) -> None:
        case = make_mask("document_causal", length, seed=seed)
        mask = block_mask(case, magi_flex.create_block_mask)
        torch.autograd.grad(function(*(inputs := qkv(q_len=length)), None, mask).sum(), inputs)

    for length, seed in ((150, 0), (150, 1), (257, 2)):
        step(length, seed)
    compiled = counter.frame_count
    for length, seed in ((257, 3), (130, 4), (400, 5)):
        step(length, seed)
    assert counter.frame_count == compiled <= 2


def test_ops_agree_with_their_fakes() -> None:
    case = make_mask("document", 20)
    program, captures = trace_mask_mod(case.mask_mod)
    mask = MaskSpec(program.to_json(), "t").to_json()
    q, k, v = (torch.randn(2, 20, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
    order = tuple(dense_order(q))
    plan_args = (list(captures), [], mask, 2, 4, 20, 20, torch.device("cpu"))
    handle = torch.ops.magi_flex.plan_handle(*plan_args)
    scalars = [torch.zeros(()), *(torch.zeros((), dtype=torch.int32) for _ in range(4))]
    bias = torch.randn(4, 5)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        return score + torch.ops.aten.index(bias, [h, k * 0])

    def joint(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grad: Tensor, bias: Tensor) -> Any:
        scattered = torch.ops.flex_lib.zeros_and_scatter(bias.shape, [h, k * 0], grad)
        return grad, None, None, None, None, scattered

    forward = score_program(make_fx(score_mod, tracing_mode="fake")(*scalars, bias))
    backward = joint_program(make_fx(joint, tracing_mode="fake")(*scalars, torch.zeros(()), bias))
    score = ScoreSpec(forward.to_json(), backward.to_json(), "t", (True,))
    carried = (handle, [*captures, bias], [], mask)
    args = (q, k, v, *carried, CallSpec(score, "tiled", (order,), max_score=True).to_json(), 0.25)
    out, lse, _ = torch.ops.magi_flex.attention(*args)
    assert out.stride() == q.stride()
    given = (q, k, v, out, lse, torch.randn_like(out), None)
    backward_args = (*given, *carried, CallSpec(score, "tiled", (order, order, order)).to_json(), 0.25)
    for name, arguments in (("plan_handle", plan_args), ("attention", args), ("attention_backward", backward_args)):
        op = getattr(torch.ops.magi_flex, name).default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_kernel_options_choose(calls: Calls) -> None:
    inputs = qkv(q_len=20, grad=False)
    right = attend(*inputs)

    def run(function: Any = attend, **options: Any) -> Tensor:
        compiled = torch.compile(lambda *x: function(*x, kernel_options=options), fullgraph=True)
        return compiled(*inputs)

    torch.testing.assert_close(run(magi_backend="tiled"), right)
    before = calls.forward
    torch.testing.assert_close(run(magi_backend="stock"), right)
    torch.testing.assert_close(attend(*inputs, kernel_options={"magi_backend": "stock"}), right)
    torch.testing.assert_close(attend(*inputs, kernel_options={"BACKEND": "TRITON"}), right)
    assert calls.forward == before
    torch.testing.assert_close(run(BLOCK_M=64), right)
    assert calls.forward == before + 1
    with pytest.raises(Exception, match="allowed are auto"):
        run(magi_backend="fastest")
    with pytest.raises(Exception, match="contradict"):
        run(magi_backend="tiled", BACKEND="TRITON")
    with pytest.raises(ValueError, match="allowed are auto"):
        magi_flex.enable(backend="fastest")
