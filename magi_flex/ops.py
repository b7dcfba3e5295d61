"""The ops that a compiled graph calls: torch.ops.magi_flex.*

They take a mask and a call's settings as spec strings (op_specs.py) plus the tensors and ints that the mods read, so
that a graph from a compile cache holds everything.  They have no autograd formula: the compiled backward calls its own
op.

Results have the strides that FlexAttention's ops promise, which a CallSpec gives as fill orders (fastest dimension
first), so that the graph's and the kernel's idea of them cannot differ, whatever layout the compiler chooses for the
inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from magi_flex import plan_memo
from magi_flex.call_mods import CallMods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import label_attention
from magi_flex.kernels.checks import Layout, check_inputs
from magi_flex.kernels.cuda_driver import stream_of
from magi_flex.kernels.graph_scratch import scratch_bytes
from magi_flex.kernels.label_attention import LabelledAttention
from magi_flex.kernels.layout import empty_in_order, in_order
from magi_flex.kernels.plan_cache import nothing_kept
from magi_flex.kernels.prepared import prepared_backward, prepared_forward
from magi_flex.kernels.request import IDENTITY, AttentionRequest, ScoreProgram
from magi_flex.kernels.route import facts_of, route
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import CallSpec, LabelledMask, MaskSpec
from magi_flex.plan_memo import HandledMask

_library = torch.library.Library("magi_flex", "DEF")  # noqa: TOR901

_library.define(
    "plan_handle(Tensor[] tensors, SymInt[] ints, str spec, SymInt batch, SymInt heads, SymInt q_len, SymInt kv_len, "
    "Device device) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),  # which Inductor does not tell from the handle: the tensors are on a GPU
)
# ``tensors`` and ``ints`` are those of the mask, then those of the score mod; ``mask`` a MaskSpec, ``call`` a CallSpec.
# Where ranks share the sequence every rank has to take part, also one that has no rows, whose results nobody reads:
# "sharded_" ops are the same with a side effect, so that no compiler drops them.
for _name in ("", "sharded_"):
    _library.define(
        f"{_name}attention(Tensor q, Tensor k, Tensor v, Tensor? plan, Tensor[] tensors, SymInt[] ints, str mask, "
        "str call, float scale) -> (Tensor, Tensor, Tensor)",
        tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
    )
    _library.define(
        f"{_name}attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? d_out, "
        "Tensor? d_lse, Tensor? plan, Tensor[] tensors, SymInt[] ints, str mask, str call, float scale) "
        "-> (Tensor, Tensor, Tensor, Tensor[])",
        tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
    )
for _op in (torch.ops.magi_flex.sharded_attention.default, torch.ops.magi_flex.sharded_attention_backward.default):
    torch.fx.has_side_effect(_op)
_library.define(
    "plan_intervals(Tensor[] tensors, int[] ints, str spec, int batch, int heads, int q_len, int kv_len, "
    "Device device) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "plan_labels(Tensor[] tensors, int[] ints, str spec, int batch, int heads, int q_len, int kv_len, Device device) "
    "-> Tensor[]"
)
_library.define(
    "planned_attention(Tensor q, Tensor k, Tensor v, Tensor[] intervals, int[] block_size, Tensor[] tensors, "
    "SymInt[] ints, str call, float scale) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.flexible_layout,),
)
_library.define(
    "planned_attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? d_out, Tensor? d_lse, "
    "Tensor[] intervals, int[] block_size, Tensor[] tensors, SymInt[] ints, str call, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor[])",
    tags=(torch.Tag.flexible_layout,),
)


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of lse and max_score."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- plans ----------------------------------------------------------------------------------------------------------


@torch.library.impl(_library, "plan_handle", "CompositeExplicitAutograd")
def plan_handle(
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    spec: str,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
) -> Tensor:
    """int64 [1] on the CPU: the key of the mask's plan, which lives as long as this tensor's memory.

    A mask that is the same as in an earlier call is not planned again.
    """
    sizes = (batch, heads, q_len, kv_len)
    mask, verdict = MaskSpec.from_json(spec).expected(tensors, ints, sizes, device)
    return plan_memo.new_handle(HandledMask((spec, *sizes, stream_of(device)), mask, verdict))


@torch.library.register_fake("magi_flex::plan_handle", lib=_library)
def _(tensors, ints, spec, batch, heads, q_len, kv_len, device):  # type: ignore[no-untyped-def]
    return torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.impl(_library, "plan_intervals", "CompositeExplicitAutograd")
def plan_intervals(
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    spec: str,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """(starts, ends) of a mask whose number of intervals is known, computed on the device without reading from it, and
    memory for what kernels derive from them.

    A step in a CUDA graph has no second chance, so block lists that change what the mask_mod says stop it.
    """
    intervals, agrees = MaskSpec.from_json(spec).static_intervals(tensors, ints, batch, heads, q_len, kv_len, device)
    if agrees is not None:
        torch._assert_async(
            agrees,
            "block_mask: its block lists change what its mask_mod says, which a plan inside a CUDA graph cannot serve; "
            "use magi_flex.enable(plans='torch') for this mask",
        )
    return intervals.starts.contiguous(), intervals.ends.contiguous(), _scratch(intervals)


@torch.library.register_fake("magi_flex::plan_intervals", lib=_library)
def _(tensors, ints, spec, batch, heads, q_len, kv_len, device):  # type: ignore[no-untyped-def]
    shape = MaskSpec.from_json(spec).static_shape(tensors, ints, batch, heads, q_len, kv_len)
    if isinstance(shape, str):
        raise RuntimeError(f"plan_intervals: the number of intervals depends on {shape}")
    return tuple(torch.empty(x, dtype=dtype, device=device) for x, dtype in interval_tensors(shape, kv_len))


def interval_tensors(shape: tuple[int, ...], kv_len: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what ``plan_intervals`` gives for starts of this shape."""
    return [(shape, torch.int32), (shape, torch.int32), ((scratch_bytes(shape, kv_len),), torch.uint8)]


def _scratch(intervals: RowIntervals) -> Tensor:
    size = scratch_bytes(tuple(intervals.starts.shape), intervals.kv_len)
    return torch.empty(size, dtype=torch.uint8, device=intervals.starts.device)


@torch.library.impl(_library, "plan_labels", "CompositeExplicitAutograd")
def plan_labels(
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    spec: str,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
) -> list[Tensor]:
    """As ``plan_intervals``, of a mask by labels (MaskSpec.labelled_mask), empty where the intervals are not the mask,
    and the tensors of a LabelledAttention, which then is."""
    mask = MaskSpec.from_json(spec).labelled_mask(tensors, ints, batch, heads, q_len, kv_len, device)
    return _label_values(mask, tensors)


def _label_values(mask: LabelledMask, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
    """What ``plan_labels`` gives: tensors that share no memory with its inputs or one another."""
    kv_len, labels = mask.intervals.kv_len, mask.labels
    found = [torch.where(mask.holds, mask.intervals.starts, kv_len), torch.where(mask.holds, mask.intervals.ends, 0)]
    found.append(_scratch(mask.intervals))
    taken = {x.untyped_storage()._cdata for x in inputs}
    for x in (labels.rest.starts, labels.rest.ends, labels.row_labels, labels.key_labels):
        storage = x.untyped_storage()._cdata
        shared = storage in taken or not x.is_contiguous()
        found.append(x.clone(memory_format=torch.contiguous_format) if shared else x)
        taken.add(storage)
    found.append((~mask.holds).to(torch.int32).view(1))
    return found if mask.blocks is None else [*found, mask.blocks]


@torch.library.register_fake("magi_flex::plan_labels", lib=_library)
def _(tensors, ints, spec, batch, heads, q_len, kv_len, device):  # type: ignore[no-untyped-def]
    mask = MaskSpec.from_json(spec).labelled_shapes(tensors, ints, batch, heads, q_len, kv_len)
    if isinstance(mask, str):
        raise RuntimeError(f"plan_labels: the mask is none by labels: {mask}")
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in label_tensors(mask)]


def label_tensors(mask: LabelledMask) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what ``plan_labels`` gives, for a mask on the meta device."""
    with unset_fake_temporarily():
        return [(tuple(x.shape), x.dtype) for x in _label_values(mask)]


# ---- attention ------------------------------------------------------------------------------------------------------


def _request(
    q: Tensor, k: Tensor, v: Tensor, plan: MaskPlan, scale: float, score: ScoreProgram, max_score: bool = False
) -> AttentionRequest:
    """Keys and values may have batch size 1 for all queries."""
    if k.shape[0] != q.shape[0]:
        check_inputs(Layout.of(q, k, v))
        k, v = (x.expand(q.shape[0], *x.shape[1:]) for x in (k, v))
    return AttentionRequest(q, k, v, plan, scale, score, max_score=max_score)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: MaskPlan,
    score: ScoreProgram,
    scale: float,
    backend: str,
    needs_backward: bool,
    out_order: Sequence[int],
    max_score: bool = True,
    labelled: LabelledAttention | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_score) as AttentionOutput has them, by the backend that serves the request.

    ``labelled``: the mask in place of ``plan``, where its flag says so.
    """
    prepared = None
    if score is IDENTITY and labelled is None and k.shape[0] == q.shape[0]:
        prepared = prepared_forward(q, k, v, plan, scale, backend, needs_backward, max_score)
    if prepared is not None:
        result = prepared(q, k, v)
    else:
        request = _request(q, k, v, plan, scale, score, max_score)
        result = route(facts_of(request, needs_backward), backend).forward(request)
        if labelled is not None:
            label_attention.forward(request, labelled, result)
    return in_order(result.out, out_order), result.lse, result.max_score


def run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    plan: MaskPlan,
    score: ScoreProgram,
    scale: float,
    backend: str,
    q_order: Sequence[int],
    k_order: Sequence[int],
    v_order: Sequence[int],
    labelled: LabelledAttention | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """(dq, dk, dv, gradients of the score mod's captures that want one, in order); ``labelled`` as in the forward."""
    d_out = torch.zeros_like(out) if d_out is None else d_out
    prepared = None
    if score is IDENTITY and labelled is None and d_lse is None and k.shape[0] == q.shape[0]:
        prepared = prepared_backward(q, k, v, out, lse, d_out, plan, scale, backend)
    if prepared is not None:
        grads = prepared(q, k, v, out, lse, d_out)
        return in_order(grads.dq, q_order), in_order(grads.dk, k_order), in_order(grads.dv, v_order), []
    request = _request(q, k, v, plan, scale, score)
    grads = route(facts_of(request, True), backend).backward(request, out, lse, d_out, d_lse)
    if labelled is not None:
        label_attention.backward(request, labelled, out, lse, d_out, d_lse, grads)
    dk, dv = (
        grad if grad.shape == x.shape else grad.sum(0, keepdim=True, dtype=stats_dtype(grad.dtype)).to(grad.dtype)
        for grad, x in ((grads.dk, k), (grads.dv, v))
    )
    captured = [grad.contiguous() for grad in grads.captures if grad is not None]
    return in_order(grads.dq, q_order), in_order(dk, k_order), in_order(dv, v_order), captured


class Runner(Protocol):
    """Who computes attention: this module with a plan, or magi_flex.distributed, where ranks share the sequence, with
    the handle of the mask's plans in its place."""

    def run_forward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]: ...
    def run_backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]: ...


_sharded: list[Runner] = []


def provide_sharded_attention(runner: Runner) -> None:
    """Who serves masks that are sharded (MaskSpec.sharded)."""
    _sharded[:] = [runner]


def runner_of(mask: MaskSpec) -> Runner:
    if not mask.sharded:
        return sys.modules[__name__]
    if not _sharded:
        raise RuntimeError(
            "block_mask: is a ContextParallel's, but magi_flex.distributed is not imported in this process"
        )
    return _sharded[0]


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor | None,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    mask: str,
    call: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A plan that was made before is taken at its word, and run again if its contents turn out to have changed: the
    host asks when there is work for the device meanwhile."""
    spec = CallSpec.from_json(call)
    mods = CallMods(q, k, plan, tensors, ints, mask, spec.score)
    settings, used = (mods.score(), scale, *spec.forward_settings), mods.plan
    result = run_forward(q, k, v, used, *settings)
    mods.correct()
    return result if mods.plan is used else run_forward(q, k, v, mods.plan, *settings)


@torch.library.impl(_library, "sharded_attention", "CompositeExplicitAutograd")
def sharded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor | None,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    mask: str,
    call: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = CallSpec.from_json(call)
    program = spec.score.build(tensors[1:], ints, None, q.device)  # which sees indices of the whole sequence
    run = runner_of(MaskSpec.from_json(mask)).run_forward
    return run(q, k, v, tensors[0], program, scale, *spec.forward_settings)


@torch.library.register_fake("magi_flex::sharded_attention", lib=_library)
@torch.library.register_fake("magi_flex::attention", lib=_library)
def _(q, k, v, plan, tensors, ints, mask, call, scale):  # type: ignore[no-untyped-def]
    return _fake_forward(q, v, call)


def _fake_forward(q: Tensor, v: Tensor, call: str) -> tuple[Tensor, Tensor, Tensor]:
    out = empty_in_order(q, (*q.shape[:3], v.shape[3]), *CallSpec.from_json(call).orders)
    lse = q.new_empty(q.shape[:3], dtype=stats_dtype(q.dtype))
    return out, lse, torch.empty_like(lse)


def _planned(
    intervals: Sequence[Tensor], block_size: Sequence[int], q: Tensor, k: Tensor
) -> tuple[MaskPlan, Tensor | None, LabelledAttention | None]:
    """The plan of given intervals (none: every pair attends), memory to share what is derived from it, and what takes
    its place where labels return."""
    kv_len = k.shape[2]
    if not intervals:
        return MaskPlan(RowIntervals.full(q.shape[2], kv_len, q.device)), None, None
    starts, ends, scratch, *labels = intervals
    labelled = LabelledAttention.from_tensors(labels, block_size, kv_len) if labels else None
    return MaskPlan(RowIntervals(starts, ends, kv_len)), scratch, labelled


@torch.library.impl(_library, "planned_attention", "CompositeExplicitAutograd")
def planned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Sequence[Tensor],
    block_size: Sequence[int],
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    call: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``attention``, with all of the plan in tensors of the graph, so that it can be captured and replayed;
    ``tensors`` and ``ints`` are the score mod's alone."""
    spec = CallSpec.from_json(call)
    program = spec.score.build(tensors, ints, (*q.shape[:3], k.shape[2]), q.device)
    plan, scratch, labelled = _planned(intervals, block_size, q, k)
    with nothing_kept(plan, scratch):
        return run_forward(q, k, v, plan, program, scale, *spec.forward_settings, labelled)


@torch.library.register_fake("magi_flex::planned_attention", lib=_library)
def _(q, k, v, intervals, block_size, tensors, ints, call, scale):  # type: ignore[no-untyped-def]
    return _fake_forward(q, v, call)


@torch.library.impl(_library, "planned_attention_backward", "CompositeExplicitAutograd")
def planned_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    intervals: Sequence[Tensor],
    block_size: Sequence[int],
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    call: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    spec = CallSpec.from_json(call)
    program = spec.score.build(tensors, ints, (*q.shape[:3], k.shape[2]), q.device)
    plan, scratch, labelled = _planned(intervals, block_size, q, k)
    with nothing_kept(plan, scratch):
        return run_backward(q, k, v, out, lse, d_out, d_lse, plan, program, scale, spec.backend, *spec.orders, labelled)


@torch.library.register_fake("magi_flex::planned_attention_backward", lib=_library)
def _(q, k, v, out, lse, d_out, d_lse, intervals, block_size, tensors, ints, call, scale):  # type: ignore[no-untyped-def]
    return _fake_backward(q, k, v, tensors, call)


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    plan: Tensor | None,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    mask: str,
    call: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    spec = CallSpec.from_json(call)
    mods = CallMods(q, k, plan, tensors, ints, mask, spec.score)
    mods.correct()
    given = (q, k, v, out, lse, d_out, d_lse)
    return run_backward(*given, mods.plan, mods.score(), scale, spec.backend, *spec.orders)


@torch.library.impl(_library, "sharded_attention_backward", "CompositeExplicitAutograd")
def sharded_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    plan: Tensor | None,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    mask: str,
    call: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    spec = CallSpec.from_json(call)
    program = spec.score.build(tensors[1:], ints, None, q.device)
    run = runner_of(MaskSpec.from_json(mask)).run_backward
    return run(q, k, v, out, lse, d_out, d_lse, tensors[0], program, scale, spec.backend, *spec.orders)


@torch.library.register_fake("magi_flex::sharded_attention_backward", lib=_library)
@torch.library.register_fake("magi_flex::attention_backward", lib=_library)
def _(q, k, v, out, lse, d_out, d_lse, plan, tensors, ints, mask, call, scale):  # type: ignore[no-untyped-def]
    return _fake_backward(q, k, v, tensors, call)


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], call: str
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    spec = CallSpec.from_json(call)
    order = spec.score.order
    captures = iter(tensors[len(tensors) - order.count("t") :])
    values = [next(captures) if kind == "t" else None for kind in order]
    wanted = [x for x, needed in zip(values, spec.score.needs_grad, strict=False) if needed]
    dq, dk, dv = (empty_in_order(x, x.shape, order) for x, order in zip((q, k, v), spec.orders, strict=True))
    return dq, dk, dv, [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted if x is not None]


# What compiled code calls by the name of torch.ops.magi_flex.direct, see inductor_lowering/direct_calls.py.
DIRECT = {f.__name__: f for f in (plan_handle, attention, attention_backward)}
torch.ops.magi_flex.direct = SimpleNamespace(**DIRECT)
