"""``python -m magi_flex`` (or ``magi-flex``): doctor, explain, bench, simulate."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PASSED_OVER = 77  # exit status of a benchmark that this machine cannot run


def _parser() -> argparse.ArgumentParser:
    from magi_flex.distributed import simulate

    parser = argparse.ArgumentParser(prog="magi-flex", description="Attention from row intervals: a look inside.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine can run, and what is missing for the rest")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(run=_doctor)

    explain = commands.add_parser("explain", help="what a mask becomes, and which backend serves it")
    explain.add_argument("name", nargs="?", help="a mask of magi_flex.mods; without it the names are listed")
    explain.add_argument("--q-len", type=int, default=4096, metavar="N", help="query rows (default 4096)")
    explain.add_argument("--kv-len", type=int, metavar="N", help="keys (default: as many as query rows)")
    explain.add_argument("--heads", default="8:8", metavar="Q:KV", help="query and key/value heads (default 8:8)")
    explain.add_argument("--head-dim", type=int, default=64, metavar="D")
    explain.add_argument("--dtype", default="float32", choices=("float64", "float32", "bfloat16", "float16"))
    explain.add_argument("--inference", action="store_true", help="no backward is wanted")
    explain.add_argument("--device", help="default: cuda where there is one, else cpu")
    explain.add_argument("--plot", metavar="FILE", help="draw the tile map to this file (png, pdf, svg)")
    explain.set_defaults(run=_explain)

    bench = commands.add_parser("bench", help="run benchmark scripts of a checkout; results go to benchmarks/results")
    bench.add_argument("names", nargs="*", help="bench_NAME.py scripts to run (default: all that fit this machine)")
    bench.add_argument("--list", action="store_true", help="list the scripts")
    bench.set_defaults(run=_bench)

    simulate_parser = commands.add_parser("simulate", help="predict attention over many ranks, ours and other schemes")
    simulate.add_arguments(simulate_parser)
    simulate_parser.set_defaults(run=simulate.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; errors of use are printed without a traceback."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"magi-flex {args.command}: {error}", file=sys.stderr)
        return 2


def _doctor(args: argparse.Namespace) -> int:
    from magi_flex import doctor

    checks = doctor.examine()
    if args.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        print(doctor.report(checks))
    return 1 if any(check.ok is False for check in checks) else 0


def _heads(text: str) -> tuple[int, int]:
    q_heads, _, kv_heads = text.partition(":")
    try:
        return int(q_heads), int(kv_heads or q_heads)
    except ValueError:
        raise ValueError(f"--heads: {text!r} given; write QUERY:KEY, e.g. 64:8") from None


def _explain(args: argparse.Namespace) -> int:
    import torch

    import magi_flex
    from magi_flex import mods

    if args.name is None:
        print("\n".join(mods.names()))
        return 0
    kv_len = args.q_len if args.kv_len is None else args.kv_len
    q_heads, kv_heads = _heads(args.heads)
    explanation = magi_flex.explain(
        mods.by_name(args.name, args.q_len, kv_len),
        args.q_len,
        kv_len,
        H=q_heads,
        name=args.name,
        heads=(q_heads, kv_heads),
        head_dim=args.head_dim,
        dtype=getattr(torch, args.dtype),
        training=not args.inference,
        device=args.device,
    )
    print(explanation)
    if args.plot:
        print(f"tile map: {explanation.plot(args.plot)}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    if not scripts:
        raise FileNotFoundError(f"no benchmarks in {folder}: they are part of a checkout, not of an installed package")
    if args.list:
        print("\n".join(scripts))
        return 0
    unknown = [name for name in args.names if name not in scripts]
    if unknown:
        raise ValueError(f"names: {', '.join(unknown)} given, allowed are {', '.join(scripts)}")
    failed = []
    for name in args.names or scripts:
        print(f"== {name}", flush=True)
        done = subprocess.run((sys.executable, "-m", f"benchmarks.bench_{name}"), cwd=folder.parent)
        failed += [name] if done.returncode not in (0, PASSED_OVER) else []
    if failed:
        print(f"magi-flex bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
