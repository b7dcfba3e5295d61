"""``python -m magi_flex simulate``: predictions for a mask on many ranks, as a table, JSON, a trace and a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from magi_flex.distributed.cost_model import Costs, Shape
from magi_flex.distributed.mask_forms import to_intervals
from magi_flex.distributed.simulator import Cluster, Pass, Simulation
from magi_flex.distributed.timeline import COMPUTE, NETWORK, REDUCTION, chrome_trace
from magi_flex.distributed.workloads import (
    LONG_CONTEXT_CORPUS,
    document_mask,
    draw_document_lengths,
    read_length_bins,
)
from magi_flex.intervals import RowIntervals

COLORS = {COMPUTE: "#3b6fb6", NETWORK: "#e0a030", REDUCTION: "#b0508c"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "mask",
        nargs="?",
        default="document_causal",
        help="full, causal, documents, document_causal (documents drawn from a length distribution; the default), or a "
        "mask of magi_flex.mods",
    )
    parser.add_argument("--tokens", type=int, help="length of the sequence (default: 8192 a rank)")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--heads", default="64:8", metavar="Q:KV", help="query and key/value heads (default 64:8)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--element-size", type=int, default=2, metavar="BYTES", help="of q, k and v (default 2)")
    parser.add_argument("--lengths", metavar="CSV", help='columns range ("[shortest, longest]") and number')
    parser.add_argument("--window", type=int, help="document_causal: at most so many keys back")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn documents")
    defaults = Costs()
    figures = (
        ("--forward-tflops", defaults.forward_flops / 1e12, "the kernel's rate"),
        ("--backward-tflops", defaults.backward_flops / 1e12, "the kernel's rate"),
        ("--node-gbs", defaults.node_bandwidth / 1e9, "GB/s of a rank inside its node"),
        ("--network-gbs", defaults.network_bandwidth / 1e9, "GB/s of a rank over the network"),
        ("--latency-us", defaults.latency * 1e6, "of a collective"),
        ("--launch-us", defaults.launch * 1e6, "of a kernel"),
        ("--part-us", defaults.part * 1e6, "of cutting a pass into one part more"),
        ("--memory-tbs", defaults.memory_bandwidth / 1e12, "TB/s of a rank's own memory"),
    )
    for name, value, text in figures:
        parser.add_argument(name, type=float, default=value, help=f"{text} (default {value:g})")
    parser.add_argument("--json", metavar="FILE", help="write the predictions ('-': to the terminal)")
    parser.add_argument("--trace", metavar="FILE", help="write our slowest rank's timeline as a Chrome trace")
    parser.add_argument("--plot", metavar="FILE", help="draw rates, bytes and our timeline (png, pdf, svg)")


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for arguments that do not fit together."""
    try:
        q_heads, kv_heads = (int(x) for x in args.heads.split(":"))
    except ValueError as error:
        raise ValueError(f"--heads: got {args.heads!r}; give query and key/value heads as 64:8") from error
    if kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"--heads: got {args.heads!r}; key/value heads must divide query heads")
    costs = Costs(
        args.forward_tflops * 1e12,
        args.backward_tflops * 1e12,
        args.node_gbs * 1e9,
        args.network_gbs * 1e9,
        args.latency_us * 1e-6,
        args.launch_us * 1e-6,
        args.part_us * 1e-6,
        args.memory_tbs * 1e12,
    )
    cluster = Cluster(args.ranks, args.ranks_per_node, costs)
    shape = Shape(q_heads, kv_heads, args.head_dim, args.head_dim, 1, args.element_size)
    tokens = 8192 * args.ranks if args.tokens is None else args.tokens
    simulation = Simulation(_mask(args, tokens), cluster, shape)
    passes = {"forward": simulation.run(), "backward": simulation.run(backward=True)}
    record = {
        "mask": args.mask,
        "tokens": tokens,
        "area": simulation.area,
        "cluster": {"ranks": args.ranks, "ranks_per_node": args.ranks_per_node, **vars(costs)},
        "shape": vars(shape),
        "passes": [p.as_dict() for direction in passes.values() for p in direction],
    }
    if args.json == "-":
        print(json.dumps(record, indent=1))
    else:
        title = f"{args.mask}, {tokens:,} tokens on {args.ranks} ranks ({cluster.nodes} nodes), heads {args.heads}"
        print(f"{title}, D={args.head_dim}; predicted")
        for name, rows in passes.items():
            print(f"\n{name}\n{table(rows)}")
        if args.json:
            Path(args.json).write_text(json.dumps(record, indent=1))
    if args.trace:
        spans = {i: direction[0].timeline for i, direction in enumerate(passes.values())}
        Path(args.trace).write_text(json.dumps(chrome_trace(spans)))
    if args.plot:
        draw(passes, f"{args.mask}, {tokens:,} tokens, {args.ranks} ranks", args.plot)
    return 0


def _mask(args: argparse.Namespace, tokens: int) -> RowIntervals:
    if args.mask == "full":
        return RowIntervals.full(tokens, tokens)
    if args.mask == "causal":
        return document_mask([tokens])
    if args.mask in ("documents", "document_causal"):
        bins = read_length_bins(args.lengths) if args.lengths else LONG_CONTEXT_CORPUS
        lengths = draw_document_lengths(tokens, args.seed, bins)
        return document_mask(lengths, args.mask == "document_causal", args.window)
    from magi_flex import mods
    from magi_flex.block_mask import plan

    if args.mask not in mods.names():
        names = ", ".join(sorted({*mods.names(), "documents"}))
        raise ValueError(f"mask: got {args.mask!r}, allowed are {names}")
    return to_intervals(plan(mods.by_name(args.mask, tokens, tokens), tokens, tokens, device="cpu"))


def table(passes: Sequence[Pass]) -> str:
    """The predictions as text, a row a scheme."""
    columns = (("ms", 10), ("TFLOP/s", 10), ("imbalance", 11), ("node MB", 11), ("network MB", 12), ("stages", 8))
    head = f"{'scheme':<16}" + "".join(f"{name:>{width}}" for name, width in columns) + f"{'exposed':>9}"
    lines = [head, "-" * len(head)]
    for p in passes:
        if p.seconds is None:
            lines.append(f"{p.scheme:<16}{'-':>10}  {p.why_not}")
            continue
        exposed = f"{100 * p.exposed / p.seconds:.0f}%"
        lines.append(
            f"{p.scheme:<16}{1e3 * p.seconds:>10.2f}{p.tflops:>10.0f}{p.imbalance:>11.3f}{p.node_bytes / 1e6:>11.1f}"
            f"{p.network_bytes / 1e6:>12.1f}{p.stages:>8}{exposed:>9}"
        )
    return "\n".join(lines)


def draw(passes: dict[str, list[Pass]], title: str, path: str) -> None:
    """Rates and bytes of every scheme, and our slowest rank's timeline."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot: needs matplotlib; install it with: pip install 'magi-flex[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 7), layout="constrained")
    names = [p.scheme for p in passes["forward"]]
    place = torch.arange(len(names)).tolist()
    for i, (direction, rows) in enumerate(passes.items()):
        color = ("#3b6fb6", "#8fb3dd")[i]
        where = [x + 0.4 * (i - 0.5) for x in place]
        axes[0, 0].barh(where, [p.tflops or 0 for p in rows], 0.38, color=color, label=direction)
        axes[0, 1].barh(where, [p.network_bytes / 1e6 for p in rows], 0.38, color=color, label=direction)
        _draw_timeline(axes[1, i], direction, rows[0])
    for axis, label in ((axes[0, 0], "TFLOP/s a rank"), (axes[0, 1], "MB over the network, busiest rank")):
        axis.set_yticks(place, names)
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_timeline(axis: Any, direction: str, ours: Pass) -> None:
    lanes = [COMPUTE, NETWORK, REDUCTION]
    for span in ours.timeline:
        width = (span.end - span.begin) / 1e3
        bar = axis.barh(
            lanes.index(span.lane), width, 0.7, span.begin / 1e3, color=COLORS[span.lane], edgecolor="white"
        )
        if width > 0.1 * (ours.seconds or 1) * 1e3:
            axis.bar_label(bar, [span.name.replace("gradients of ", "").replace("keys of ", "")], label_type="center",
                           color="white", fontsize=8)  # fmt: skip
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.set_title(f"{direction}, our slowest rank", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
