"""Time flash-attn-4's kernels as backend "fa4" uses them, forward and backward, beside what the package does alone.

    python -m benchmarks.bench_fa4 [--lengths 8192,...] [--masks full,...,images] [--rounds 6]

Needs a GPU that flash-attn-4 has kernels for.  Everybody runs on a plan made before.  Sides:

    fa4          the backend as it is: flags, packed documents or interval bits
    flags        the package's kernels with its flags or packed sequences, where it has any for the mask
    elements     the package's kernels with an interval mask_mod called score by score, and lists of 128 x 128 blocks
    unmasked     the backend's kernels on the same blocks, none of which is masked (a wrong result): what masks without
                 flags could gain at most

The package's sides launch the compiled kernels without its interface, so that short calls do not wait for Python.  The
sides take turns, every second round backwards, and another one begins every two rounds: a GPU that was idle, or had
less to do, runs faster for a while.  "host_us" is what a call takes the host, on an idle GPU; for the package's sides
in its interface.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, Row, Work, attention_tflops, leave, table, write_results
from benchmarks.workloads import MASKS, document_lengths, mask_plan
from inductor_lowering.to_intervals import plan_from_mask_mod
from magi_flex import mods
from magi_flex.kernels import fa4
from magi_flex.kernels.fa4 import Fa4Backend, architecture, forward_adaption, mask_arguments, score_arguments
from magi_flex.kernels.fa4_launch import Adaption, watched
from magi_flex.kernels.fa4_masks import KernelMask, backward_mask, forward_mask
from magi_flex.kernels.fa4_tiles import BlockLists, BlockSize, block_lists, padded_bounds
from magi_flex.kernels.request import AttentionRequest
from magi_flex.mask_plan import MaskPlan
from magi_flex.mask_structure import Documents, find_structure

SAMPLE_MS = 4.0  # a side runs as long in a row, at least 2 calls
# Masks that the package has no flags for, beside block causal documents.
OTHERS = ("sink_window", "document_prefix_lm", "shared_prefix", "images")


def plan_of(mask: str, length: int) -> MaskPlan:
    """The mask's plan on the GPU."""
    if mask in MASKS:
        return mask_plan(mask, length)
    return plan_from_mask_mod(_mask_mod(mask, length), 1, 1, length, length, "cuda")


def _mask_mod(mask: str, length: int) -> mods.MaskMod:
    lengths = torch.tensor(document_lengths(length), device="cuda")
    number = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)
    if mask == "sink_window":
        return mods.sink_window(64, 1024)
    if mask == "document_prefix_lm":
        positions = torch.arange(length, device="cuda") - (lengths.cumsum(0) - lengths)[number]
        return mods.document_prefix_lm(number, positions, lengths // 4)
    if mask == "shared_prefix":
        prompt = torch.arange(length, device="cuda") < length // 4
        response = torch.arange(length, device="cuda") // max(1, length // 16)
        return mods.shared_prefix(torch.where(prompt, -1, response))
    # Images of 576 tokens in text of as many.
    place = torch.arange(length, device="cuda") // 576
    return mods.image_blocks(torch.where(place % 2 == 1, place, -1))


class Side(NamedTuple):
    """One way to do the work."""

    work: Work
    in_interface: Work


def elements(plan: MaskPlan, arch: int) -> tuple[KernelMask, KernelMask]:
    """For the forward and the backward: a mask_mod to be called score by score."""
    masks = []
    for backward in (False, True):
        block = BlockSize(128 if arch // 10 == 9 or backward else 256, 128)
        lists = block_lists(plan, block, transposed=backward)
        masks.append(KernelMask({}, None, padded_bounds(plan.intervals), False, lists, block))
    return masks[0], masks[1]


def package_masks(plan: MaskPlan, q: Tensor) -> dict[str, tuple[KernelMask, KernelMask]]:
    """Both, by the names of the sides of other benchmarks; wide heads have tiles that lists of 128 keys do not fit."""
    found = {"fa4_mask_mod": elements(plan, architecture(q.device)) if q.shape[-1] <= 128 else None, "fa4": flags(plan)}
    return {name: pair for name, pair in found.items() if pair is not None}


def flags(plan: MaskPlan) -> tuple[KernelMask, KernelMask] | None:
    """The same for the package's flags or packed sequences."""
    structure = find_structure(plan.intervals)
    if isinstance(structure, Documents):
        mask = KernelMask({"causal": structure.causal}, structure)
    elif structure is None:
        return None
    elif structure.is_causal:
        mask = KernelMask({"causal": True})
    else:
        mask = KernelMask({"window_size_left": structure.left, "window_size_right": structure.right})
    return mask, mask


def unmasked(plan: MaskPlan, arch: int, dims: tuple[int, int], group: int) -> tuple[KernelMask, KernelMask]:
    """The backend's own, with every block that is listed among the full ones."""
    masks = []
    for mask, length in (
        (forward_mask(plan, arch, dims, group), plan.kv_len),
        (backward_mask(plan, arch, dims), plan.q_len),
    ):
        assert mask.lists is not None and mask.block is not None
        partial_count, partial, full_count, full = mask.lists
        columns = -(-length // min(mask.block))
        listed = torch.zeros(*partial.shape[:3], columns + 1, dtype=torch.bool, device=partial.device)
        for count, blocks in ((partial_count, partial), (full_count, full)):
            used = torch.arange(blocks.shape[3], device=blocks.device) < count[..., None]
            listed.scatter_(3, torch.where(used, blocks, columns).long(), True)
        listed = listed[..., :columns]
        blocks = torch.sort(~listed, dim=3, stable=True).indices.to(torch.int32)
        lists = BlockLists(torch.zeros_like(partial_count), partial, listed.sum(3, dtype=torch.int32), blocks)
        masks.append(replace(mask, lists=lists))
    return masks[0], masks[1]


def forward_alone(
    mask: KernelMask, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, as_bits: bool = False
) -> Side:
    """The forward kernel; tensors are ``[1, rows, heads, dim]``, lse ``[1, heads, rows]``."""
    interface = fa4.package().interface
    given = _packed(mask, q, k, v, out, lse)

    def work() -> None:
        q, k, v, out, lse = given
        interface._flash_attn_fwd(
            q, k, v, out=out, lse=lse, return_lse=True, softmax_scale=q.shape[-1] ** -0.5, **arguments
        )  # fmt: skip

    arguments = _arguments(mask, q, False, as_bits)
    adaption = forward_adaption(mask, fa4.architecture(q.device)) if as_bits else None
    return _launched(work, (interface._flash_attn_fwd,), given, adaption)


def backward_alone(
    mask: KernelMask, q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, lse: Tensor, as_bits: bool = False
) -> Side:
    """The backward kernels; tensors as for :func:`forward_alone`, which has made out and lse."""
    interface = fa4.package().interface
    given = _packed(mask, q, k, v, out, d_out, *(torch.empty_like(x) for x in (q, k, v)), lse)

    def work() -> None:
        q, k, v, out, d_out, dq, dk, dv, lse = given
        interface._flash_attn_bwd(
            q, k, v, out, d_out, lse, softmax_scale=q.shape[-1] ** -0.5, dq=dq, dk=dk, dv=dv, **arguments
        )  # fmt: skip

    arguments = _arguments(mask, q, True, as_bits)
    functions = (interface._bwd_preprocess, interface._flash_attn_bwd, interface._bwd_postprocess_convert)
    return _launched(work, functions, given, None)


def _packed(mask: KernelMask, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x[0] for x in tensors) if mask.documents is not None else tensors


def _arguments(mask: KernelMask, q: Tensor, backward: bool, as_bits: bool) -> dict[str, Any]:
    of_mask = mask_arguments(mask, fa4.architecture(q.device), backward, as_bits)
    return of_mask | score_arguments(mask, None, q.transpose(1, 2), backward)


def _launched(work: Work, looked_up_in: tuple[Any, ...], given: tuple[Tensor, ...], adaption: Adaption | None) -> Side:
    launch = watched(work, looked_up_in, given, adaption)
    assert launch is not None
    return Side(functools.partial(launch, *given), work)


def alone(
    masks: tuple[KernelMask, KernelMask], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, as_bits: bool = False
) -> tuple[Side, Side]:
    """The kernels, forward and backward; tensors are ``[1, rows, heads, dim]``."""
    out, lse = torch.empty_like(d_out), torch.empty(1, q.shape[2], q.shape[1], device=q.device)
    forward = forward_alone(masks[0], q, k, v, out, lse, as_bits)
    return forward, backward_alone(masks[1], q, k, v, out, d_out, lse, as_bits)


def backend(plan: MaskPlan, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Side, Side]:
    """Forward and backward through the backend; ``[B, heads, rows, dim]``, rows before heads in memory."""
    request = AttentionRequest(q, k, v, plan, q.shape[3] ** -0.5, max_score=False)
    result = Fa4Backend().forward(request)

    def forward() -> None:
        Fa4Backend().forward(request)

    def backward() -> None:
        Fa4Backend().backward(request, result.out, result.lse, d_out, None)

    return Side(forward, forward), Side(backward, backward)


def timed(works: dict[str, Work], rounds: int) -> dict[str, float]:
    """Milliseconds of the GPU for a call, medians over ``rounds``."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    calls = {name: max(2, round(SAMPLE_MS / _sample(work, 1))) for name, work in works.items()}
    for number in range(rounds):
        first = number // 2 % len(names)
        order = names[first:] + names[:first]
        for name in reversed(order) if number % 2 else order:
            taken[name].append(_sample(works[name], calls[name]))
    return {name: statistics.median(of) for name, of in taken.items()}


def _sample(work: Work, calls: int) -> float:
    """Milliseconds of a call, behind one that goes ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def host_microseconds(work: Work, calls: int = 5) -> float:
    """Of one call, the least over some."""
    taken = []
    torch.cuda.synchronize()
    for _ in range(calls):
        start = time.perf_counter()
        work()
        taken.append(1e6 * (time.perf_counter() - start))
    return min(taken)


def measure(mask: str, length: int, heads: tuple[int, int], dims: tuple[int, int], rounds: int) -> list[Row]:
    torch.manual_seed(0)
    plan = plan_of(mask, length)
    if plan.bit_tiles is not None:
        print(f"left out: {mask} has bit tiles")
        return []
    sizes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1]))
    by_row = [torch.randn(1, length, n, dim, device="cuda", dtype=torch.bfloat16) for n, dim in sizes]
    by_head = [x.transpose(1, 2) for x in by_row]
    sides = {
        "fa4": backend(plan, *by_head),
        "elements": alone(elements(plan, fa4.architecture(by_row[0].device)), *by_row),
    }
    flagged = flags(plan)
    if flagged is None:
        bare = unmasked(plan, fa4.architecture(by_row[0].device), dims, heads[0] // heads[1])
        sides["unmasked"] = alone(bare, *by_row, as_bits=True)
    else:
        sides["flags"] = alone(flagged, *by_row)
    rows = []
    area = plan.area()
    for number, direction in enumerate(("fwd", "bwd")):
        here = {name: pair[number] for name, pair in sides.items()}
        ms = timed({name: side.work for name, side in here.items()}, rounds)
        rate = {name: attention_tflops(area, heads[0], *dims, direction, value) for name, value in ms.items()}
        beside = {name: value for name, value in rate.items() if name != "fa4"}
        more: dict[str, Any] = {
            "intervals": plan.intervals.max_intervals,
            "host_us": {name: round(host_microseconds(side.in_interface), 1) for name, side in here.items()},
        }
        more |= {"v_dim": dims[1]} if dims[0] != dims[1] else {}
        given = (f"{heads[0]}:{heads[1]}", dims[0], "bfloat16", direction)
        rows.append(Row("attention", "fa4", mask, length, *given, ms["fa4"], rate["fa4"], beside, more))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="8192,2048,32768,1024")
    parser.add_argument("--masks", default=",".join((*MASKS, *OTHERS)))
    parser.add_argument("--dims", default="128:128")
    parser.add_argument("--heads", default="64:8")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where fa4_attention.json is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        leave("needs a GPU of compute capability 9, 10 or 11")
    reason = Fa4Backend().missing(torch.device("cuda", 0))
    if reason is not None:
        leave(reason)
    heads, kv_heads = map(int, args.heads.split(":"))
    rows: list[Row] = []
    for pair in args.dims.split(","):
        head_dim, v_dim = map(int, pair.split(":"))
        for length in map(int, args.lengths.split(",")):
            for mask in args.masks.split(","):
                rows += measure(mask, length, (heads, kv_heads), (head_dim, v_dim), args.rounds)
                for row in rows[-2:]:
                    print(table([row]).splitlines()[-1], row.more, flush=True)
                write_results("fa4_attention", rows, args.directory)  # what a killed run has seen is kept
    print(table(rows))
    print("written:", write_results("fa4_attention", rows, args.directory))


if __name__ == "__main__":
    main()
