"""Backend ``fa4``: flash-attn-4's kernels for Hopper and Blackwell, forward and backward.

Shape legend: B batch, H query heads, G key/value heads (H = G * group), Q query rows, K keys, D query/key head dim,
E value head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magi_flex.kernels.cuda_driver import on_device
from magi_flex.kernels.fa4_launch import Adaption, Launch, watched
from magi_flex.kernels.fa4_masks import KernelMask, backward_mask, flagged_mask, forward_mask
from magi_flex.kernels.fa4_package import missing_package, package
from magi_flex.kernels.fa4_score import KernelScore, kernel_score
from magi_flex.kernels.fa4_walk import unknown_operators
from magi_flex.kernels.ffa import positive_scale
from magi_flex.kernels.layout import empty_like_filled
from magi_flex.kernels.plan_cache import kept
from magi_flex.kernels.request import (
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Backend,
    Bias,
    Distance,
    RequestFacts,
)
from magi_flex.kernels.score_split import leading_factors

LOG2_E = math.log2(math.e)
ARCHITECTURES = (9, 10, 11)
# Head dims of keys and values whose kernels ran on a Hopper GPU.
_RUN_DIMS = ((64, 64), (72, 72), (80, 80), (96, 96), (128, 64), (128, 128), (192, 128), (256, 256))


class Fa4Backend(Backend):
    """Own flags and packed sequences where the mask is just that, else interval bits; see :meth:`objections`."""

    name = "fa4"

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"needs a CUDA device, not {device.type}"
        reason = missing_package()
        if reason is not None:
            return reason
        if not torch.cuda.is_available():
            return "needs a CUDA device, and torch sees none"
        major, minor = divmod(architecture(device), 10)
        if major not in ARCHITECTURES:
            return (
                f"needs compute capability 9, 10 or 11, this GPU has {major}.{minor}: for others flash-attn-4 lacks "
                f"block lists or a backward that takes a mask"
            )
        return None

    def objections(self, facts: RequestFacts) -> list[str]:
        found = []
        if facts.dtype not in (torch.bfloat16, torch.float16):
            found.append(f"serves bfloat16 and float16, not {facts.dtype}")
        if facts.mixed_dtypes:
            found.append("q, k and v must have one dtype")
        wrong_dims = head_dim_objection(
            architecture(facts.device), facts.head_dim, facts.v_head_dim, facts.needs_backward
        )
        if wrong_dims:
            found.append(wrong_dims)
        if facts.has_bit_tiles:
            found.append("masks with bit tiles are not in the kernel")
        if facts.wide_results:
            found.append("results are written in the inputs' dtype")
        if facts.max_score:
            found.append("the largest scores are not computed")
        if facts.score_grads:
            found.append("gradients of what a score mod captures are not computed")
        if facts.needs_backward and facts.deterministic:
            found.append("its backward sums the gradients of q in no fixed order")
        reads_place = facts.score_steps is None or any(step in (Distance, Bias) for step in facts.score_steps)
        if facts.index_map and reads_place:
            found.append("positions that a score mod sees must be the local ones")
        unknown = unknown_operators(facts.score_ops)
        if unknown:
            found.append(f"the score mod calls {', '.join(unknown)}")
        return found

    def reservations(self, facts: RequestFacts) -> list[str]:
        major, minor = divmod(architecture(facts.device), 10)
        if major != 9:
            return [f"its code for compute capability {major}.{minor}"]
        found = []
        dims = (facts.head_dim, facts.v_head_dim)
        if dims not in _RUN_DIMS:
            found.append(f"its kernel for head dims {dims[0]} and {dims[1]}")
        return found

    def behind_stock(self, facts: RequestFacts) -> str | None:
        if facts.score_steps is None:
            return "general score mods in it have not been timed beside PyTorch's kernels"
        return None

    def forward(self, request: AttentionRequest) -> AttentionOutput:
        q, k, v = request.q, request.k, request.v
        shape = torch.Size((*q.shape[:3], v.shape[3]))
        out = empty_like_filled(q, shape, q.dtype)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
        largest = torch.full_like(lse, math.nan) if request.max_score else torch.empty_like(lse)
        if out.numel() == 0 or k.shape[2] == 0:
            return AttentionOutput(out.zero_(), lse.fill_(-math.inf), largest.fill_(-math.inf))
        key = _launch_key(request, q, k, v)
        prepared = _Prepared() if key is None else kept(request.plan, key, _Prepared)
        with on_device(q.device), torch.no_grad():
            if prepared.launch is None:
                _first_forward(request, out, lse, prepared)
            else:
                lay, lay_rows = _LAYOUTS[prepared.packed]
                prepared.launch(lay(q), lay(k), lay(v), lay(out), lay_rows(lse))
                if not prepared.base_2:
                    lse.mul_(LOG2_E)
        return AttentionOutput(out, lse, largest)

    def backward(
        self,
        request: AttentionRequest,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
    ) -> AttentionGradients:
        q, k, v = request.q, request.k, request.v
        dq, dk, dv = (empty_like_filled(x, x.shape, x.dtype) for x in (q, k, v))
        gradients = AttentionGradients(dq, dk, dv, (None,) * len(request.score.captures))
        if d_out.numel() == 0 or k.shape[2] == 0:
            for x in (dq, dk, dv):
                x.zero_()
            return gradients
        key = _launch_key(request, q, k, v, out, d_out)
        prepared = _Prepared() if key is None else kept(request.plan, (key, d_lse is None), _Prepared)
        with on_device(q.device), torch.no_grad():
            rows = [lse / LOG2_E]
            if d_lse is not None:
                rows.append(torch.where(lse == -math.inf, 0, d_lse.float() * LOG2_E))
            if prepared.launch is None:
                _first_backward(request, out, d_out, rows, gradients, prepared)
            else:
                lay, lay_rows = _LAYOUTS[prepared.packed]
                prepared.launch(*[lay(x) for x in (q, k, v, out, d_out, dq, dk, dv)], *[lay_rows(x) for x in rows])
        return gradients


@dataclass
class _Prepared:
    """What the first call of its kind leaves for the next ones.

    Attributes:
        launch: None before the first call, and where every call differs; set last, as other threads look for it.
        packed: tensors go as packed sequences.
        base_2: the forward writes logarithms to base 2, not natural ones.
    """

    launch: Launch | None = None
    packed: bool = False
    base_2: bool = False


def _launch_key(request: AttentionRequest, *tensors: Tensor) -> Hashable | None:
    """Equal for calls that differ in what ``tensors`` hold alone; None where a call has tables of its own."""
    steps = request.score.steps
    if steps is None or any(isinstance(step, (Distance, Bias)) for step in steps):
        return None
    addresses = 0
    layout: list[Any] = []
    for x in tensors:
        addresses |= x.data_ptr()
        layout += (x.shape, x.stride(), x.dtype)
    return "fa4 launch", tuple(layout), addresses % 16, request.scale, steps


def _first_forward(request: AttentionRequest, out: Tensor, lse: Tensor, prepared: _Prepared) -> None:
    """Fill ``out`` and ``lse`` through the package's interface."""
    q, k, v = (without_broadcasts(x) for x in (request.q, request.k, request.v))
    scale, score = scale_and_score(request, backward=False)
    if score is None:
        q, scale = positive_scale(q, scale)
    arch, group = architecture(q.device), q.shape[1] // k.shape[1]
    mask = flagged_mask(request.plan, q.shape[0], can_pack((q, k, v, out), score))
    if mask is None:
        mask = forward_mask(request.plan, arch, (q.shape[3], v.shape[3]), group)
    packed = mask.documents is not None
    lay, lay_rows = _LAYOUTS[packed]
    rows = lay_rows(lse)  # its own memory where heads are not neighbours
    given = (lay(q), lay(k), lay(v), lay(out), rows)
    arguments = mask_arguments(mask, arch, backward=False) | score_arguments(mask, score, q, backward=False)
    forward = package().interface._flash_attn_fwd

    def work() -> None:
        forward(*given[:3], out=given[3], lse=rows, return_lse=True, softmax_scale=scale, **arguments)

    adaption = forward_adaption(mask, arch)
    launch = watched(work, (forward,), given, adaption)
    in_place = rows.data_ptr() == lse.data_ptr()
    if not in_place:
        lse.copy_(_rows_by_head(rows, q))
    prepared.base_2 = adaption is not None and adaption.base_2
    if not prepared.base_2:
        lse.mul_(LOG2_E)
    if in_place and all(x is y for x, y in zip((q, k, v), (request.q, request.k, request.v), strict=True)):
        prepared.packed, prepared.launch = packed, launch


def _first_backward(
    request: AttentionRequest,
    out: Tensor,
    d_out: Tensor,
    rows: list[Tensor],
    gradients: AttentionGradients,
    prepared: _Prepared,
) -> None:
    """Fill ``gradients`` through the package's interface.

    Args:
        rows: natural logarithms lse, and their gradient where there is one.
    """
    given_scale, score = scale_and_score(request, backward=True)
    # Masked scores are -inf before the kernel multiplies by the scale.
    q, scale = (request.q, given_scale) if score is not None else positive_scale(request.q, given_scale)
    arch, group = architecture(q.device), q.shape[1] // request.k.shape[1]
    dims = (q.shape[3], request.v.shape[3])
    spread = group > 1 and must_spread(arch, dims, score)
    k, v = (_spread(x, group) if spread else x for x in (request.k, request.v))
    padded = backward_dims(arch, *dims)
    tensors = [padded_to(without_broadcasts(x), padded[0]) for x in (q, k)]
    tensors += [padded_to(without_broadcasts(x), padded[1]) for x in (v, out, d_out.to(q.dtype))]
    wanted = (gradients.dq, gradients.dk, gradients.dv)
    direct = not spread and padded == dims
    results = wanted if direct else tuple(torch.empty_like(x) for x in tensors[:3])
    mask = flagged_mask(request.plan, q.shape[0], can_pack((*tensors, *results), score))
    if mask is None:
        mask = backward_mask(request.plan, arch, padded)
    packed = mask.documents is not None
    lay, lay_rows = _LAYOUTS[packed]
    given = (*(lay(x) for x in (*tensors, *results)), *(lay_rows(x) for x in rows))
    dq, dk, dv, lse, *d_lse = given[5:]
    arguments = mask_arguments(mask, arch, backward=True) | score_arguments(mask, score, q, backward=True)
    interface = package().interface

    def work() -> None:
        interface._flash_attn_bwd(
            *given[:5], lse, softmax_scale=scale, dq=dq, dk=dk, dv=dv, dlse=d_lse[0] if d_lse else None, **arguments
        )

    caches = (interface._bwd_preprocess, interface._flash_attn_bwd, interface._bwd_postprocess_convert)
    launch = watched(work, caches, given)
    if direct and all(x is y for x, y in zip(tensors, (request.q, request.k, request.v, out, d_out), strict=True)):
        prepared.packed, prepared.launch = packed, launch
    if scale != given_scale:
        results[0].mul_(given_scale / scale)
    if not direct:
        for total, parts in zip(wanted, results, strict=True):
            summed = parts if total.shape[1] == parts.shape[1] else parts.unflatten(1, (-1, group)).float().sum(2)
            total.copy_(summed[..., : total.shape[3]])


# ---- what is served -------------------------------------------------------------------------------------------------


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def architecture(device: torch.device) -> int:
    """Compute capability times ten."""
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def head_dim_objection(arch: int, head_dim: int, v_dim: int, needs_backward: bool) -> str | None:
    """Why the kernels for ``arch`` do not serve these head dims, or None."""
    given = f"{head_dim} and {v_dim}"
    if head_dim % 8 or v_dim % 8:
        return f"serves head dims that are multiples of 8, not {given}"
    if arch // 10 == 9:
        return None if v_dim <= head_dim <= 256 else f"serves head dims up to 256, the values' not larger, not {given}"
    if (head_dim, v_dim) == (256, 256):
        return "its backward for head dim 256 takes no block lists and no gradient of lse" if needs_backward else None
    if max(head_dim, v_dim) <= 128 or (head_dim, v_dim) == (192, 128):
        return None
    return f"serves head dims up to 128, 192 with 128, and 256, not {given}"


# ---- arguments ------------------------------------------------------------------------------------------------------


def scale_and_score(request: AttentionRequest, backward: bool) -> tuple[float, KernelScore | None]:
    """The scale with what the score mod multiplies it by first, and the rest of the score mod (None: nothing)."""
    batch, heads, q_len, _ = request.q.shape
    sizes = (batch, heads, q_len, request.k.shape[2])
    if request.score.steps is None:
        return request.scale, kernel_score(request.score, None, sizes, backward)
    scale, steps = leading_factors(request.scale, request.score.steps)
    return scale, kernel_score(request.score, steps, sizes, backward)


def mask_arguments(mask: KernelMask, arch: int, backward: bool, as_bits: bool = True) -> dict[str, Any]:
    """Arguments of the package's functions for the mask, without the tables.

    ``as_bits``: apply intervals as words of bits where the kernel allows it; else score by score (to compare with).
    """
    arguments = dict(mask.flags)
    if mask.documents is not None:
        bounds, longest = mask.documents.bounds, mask.documents.longest
        arguments |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
    if mask.lists is not None:
        from magi_flex.kernels.fa4_device import interval_mask

        in_words = arch // 10 != 9 and not backward
        arguments["mask_mod"] = interval_mask(
            mask.slots, mask.by_key, packed=as_bits and in_words, by_line=as_bits and not in_words
        )
        arguments["block_sparse_tensors"] = package().block_sparsity.BlockSparseTensorsTorch(
            mask_block_cnt=mask.lists.partial_count,
            mask_block_idx=mask.lists.partial,
            full_block_cnt=mask.lists.full_count,
            full_block_idx=mask.lists.full,
            block_size=mask.block,
        )
    return arguments


def forward_adaption(mask: KernelMask, arch: int) -> Adaption | None:
    """Hopper's forward writes logarithms to base 2, and takes the last rows of block lists first."""
    if arch // 10 != 9:
        return None
    from magi_flex.kernels.fa4_device import kernel_key
    from magi_flex.kernels.fa4_hopper_forward import adapted, writes_base_2

    has_lists, base_2 = mask.lists is not None, writes_base_2()
    return Adaption(adapted(has_lists), kernel_key(f"forward {has_lists} {base_2}"), base_2)


def score_arguments(mask: KernelMask, score: KernelScore | None, q: Tensor, backward: bool) -> dict[str, Any]:
    """Arguments for the score mod, and all tables: the mask's (for the batch and heads of ``q``), the score mod's."""
    tables = [_shared(x, q.shape[0], q.shape[1]) for x in mask.bounds or ()]
    arguments: dict[str, Any] = {}
    if score is not None:
        from magi_flex.kernels.fa4_device import score_gradient, score_mod

        arguments["score_mod"] = score_mod(score, len(tables))
        if backward:
            arguments["score_mod_bwd"] = score_gradient(score, len(tables))
        tables += score.tables
    if tables:
        arguments["aux_tensors"] = [kernel_table(x) for x in tables]
    return arguments


def kernel_table(table: Tensor) -> Tensor:
    """A table as a kernel takes it: with a dimension, and told which one is contiguous where several could be."""
    table = table.detach()
    table = table.view(1) if table.dim() == 0 else table
    contiguous = [dim for dim, stride in enumerate(table.stride()) if stride == 1]
    if contiguous:
        table.__leading_dim__ = contiguous[-1]  # type: ignore[attr-defined]
    return table


def _shared(bounds_BHRQ: Tensor, batch: int, heads: int) -> Tensor:
    """For so many batch entries and heads; strides of 0 (of 1 entry, too) are constants in a kernel."""
    strides = [0 if n == 1 else s for n, s in zip(bounds_BHRQ.shape[:2], bounds_BHRQ.stride(), strict=False)]
    return bounds_BHRQ.as_strided((batch, heads, *bounds_BHRQ.shape[2:]), (*strides, *bounds_BHRQ.stride()[2:]))


# ---- layouts --------------------------------------------------------------------------------------------------------


def must_spread(arch: int, dims: tuple[int, int], score: KernelScore | None) -> bool:
    """Whether the backward wants a key head for each query head.

    On Hopper its score mods get rows and heads as if grouped heads were packed, which they are not, and groups are for
    equal head dims of keys and values.
    """
    return arch // 10 == 9 and (dims[0] != dims[1] or (score is not None and score.reads_place))


def backward_dims(arch: int, head_dim: int, v_dim: int) -> tuple[int, int]:
    """Head dims that tensors are padded to, with zeros, for the backward.

    Up to 128, Hopper's kernel of release 4.0.0b36 lays sums out for head dims in steps of 16, and the kernels around it
    for steps of 32: where these differ its gradients are wrong.
    """
    if arch // 10 != 9:
        return head_dim, v_dim
    return -(-head_dim // 32) * 32, -(-v_dim // 32) * 32


def padded_to(x: Tensor, dim: int) -> Tensor:
    """``[B, heads, rows, dim]``; heads of a row next to each other in memory where anything is added."""
    if x.shape[3] == dim:
        return x
    return torch.nn.functional.pad(x.transpose(1, 2), (0, dim - x.shape[3])).transpose(1, 2)


def _spread(x: Tensor, group: int) -> Tensor:
    """``[B, G, K, dim]`` to ``[B, G * group, K, dim]``, heads next to each other in memory."""
    return x.transpose(1, 2).repeat_interleave(group, 2).transpose(1, 2)


def without_broadcasts(x: Tensor) -> Tensor:
    """The kernels' copy engines walk real strides."""
    strides = x.stride()
    if 0 not in strides:
        return x
    return x.contiguous() if any(s == 0 and n > 1 for s, n in zip(strides, x.shape, strict=True)) else x


def can_pack(tensors: Sequence[Tensor], score: KernelScore | None) -> bool:
    """Whether ``[B, heads, rows, dim]`` tensors are one sequence each as they lie, and the score mod allows it."""
    if score is not None and not score.relative:
        return False
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[2] * x.stride(2) for x in tensors)


def _by_row(x: Tensor) -> Tensor:
    """``[B, heads, rows, dim]`` to ``[B, rows, heads, dim]``."""
    return x.transpose(1, 2)


def _as_one_sequence(x: Tensor) -> Tensor:
    """``[B, heads, rows, dim]`` to ``[B * rows, heads, dim]``."""
    batch, heads, rows, dim = x.shape
    return x.as_strided((batch * rows, heads, dim), (x.stride(2), x.stride(1), x.stride(3)))


def _rows_of_one_sequence(x: Tensor) -> Tensor:
    """``[B, H, Q]`` to contiguous ``[H, B * Q]``."""
    return x.transpose(0, 1).flatten(1).contiguous()


def _rows_by_head(x: Tensor, q: Tensor) -> Tensor:
    """``[H, B * Q]`` to ``[B, H, Q]``."""
    batch, heads, q_len, _ = q.shape
    return x.view(heads, batch, q_len).transpose(0, 1)


# Whether sequences are packed -> layouts of q, k, v, out and their gradients, and of lse and its gradient.
_LAYOUTS: dict[bool, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    False: (_by_row, Tensor.contiguous),
    True: (_as_one_sequence, _rows_of_one_sequence),
}
