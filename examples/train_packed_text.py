"""Train a small GPT on packed real text; each step brings other documents, and so another mask.

    python examples/train_packed_text.py                    # about two minutes on two cores
    python examples/train_packed_text.py --compare-stock    # the same steps through stock attention: the losses agree

The text is the Python standard library's own source code. Attention is stock `flex_attention` with a document-causal
mask; `magi_flex.enable()` and `magi_flex.create_block_mask` are all that is special here.

Shape legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import magi_flex
from magi_flex import mods
from model import Attend, ModelConfig, Transformer, attend_flex
from packed_text import PackedBatch, packed_batches


@dataclass(frozen=True)
class History:
    """What one training run showed: the loss of each step, and seconds a step without the first, which compiles."""

    losses: list[float]
    seconds: list[float]
    compile_seconds: float
    graphs: int


def attend_dense(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask_11SS: Tensor) -> Tensor:
    """Stock attention that trains on a CPU: scaled_dot_product_attention with the mask as a dense table."""
    return F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, attn_mask=mask_11SS, enable_gqa=True)


def flex_mask(batch: PackedBatch, device: torch.device) -> Any:
    mask_mod = mods.document_causal(batch.documents.to(device))
    length = batch.tokens.shape[1]
    return magi_flex.create_block_mask(mask_mod, None, None, length, length, device=device)


def dense_mask(batch: PackedBatch, device: torch.device) -> Tensor:
    mask_mod = mods.document_causal(batch.documents.to(device))
    length = batch.tokens.shape[1]
    return create_mask(mask_mod, 1, 1, length, length, device=device)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth, then a half cosine to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(
    args: argparse.Namespace,
    attend: Attend,
    make_mask: Callable[[PackedBatch, torch.device], Any],
    report: Callable[[int, float, PackedBatch, float], None],
) -> History:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    config = ModelConfig(
        layers=args.layers, dim=args.dim, q_heads=args.q_heads, kv_heads=args.kv_heads, hidden_dim=8 * args.dim // 3
    )
    model = Transformer(config, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    torch._dynamo.reset()
    for block in model.blocks:  # all alike: one compilation serves every layer
        block.compile(fullgraph=True)
    torch._dynamo.utils.counters.clear()
    losses, seconds = [], []
    for step, batch in enumerate(itertools.islice(packed_batches(args.seq_len, args.seed), args.steps)):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        tokens, positions, targets = (x.to(device) for x in (batch.tokens, batch.positions, batch.targets))
        logits_BSV = model(tokens, positions, make_mask(batch, device))
        loss = F.cross_entropy(logits_BSV.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        report(step, losses[-1], batch, seconds[-1])
    return History(losses, seconds[1:], seconds[0], torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Progress:
    """A bar that redraws itself on a terminal, and a line now and then where the output is a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.steps, self.seq_len = args.steps, args.seq_len
        self.live = sys.stdout.isatty()

    def __call__(self, step: int, loss: float, batch: PackedBatch, seconds: float) -> None:
        done = step + 1
        bar = "█" * (24 * done // self.steps)
        rate = "compiling" if step == 0 else f"{self.seq_len / seconds:7,.0f} tokens/s"
        line = f"step {done:4d}/{self.steps} |{bar:<24}| loss {loss:.3f}  {batch.count:2d} docs  {rate}"
        last = done == self.steps
        if self.live:
            print(f"\r{line:<100}", end="\n" if last else "", flush=True)
        elif step == 0 or last or done % max(1, self.steps // 12) == 0:
            print(line, flush=True)


def summary(name: str, history: History, seq_len: int) -> str:
    first, last = history.losses[0], history.losses[-5:]
    text = f"{name}: loss {first:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)} steps)"
    if history.seconds:
        median = sorted(history.seconds)[len(history.seconds) // 2]
        text += f", {seq_len / median:,.0f} tokens/s (median step), first step with compilation"
        text += f" {history.compile_seconds:.1f} s"
    return f"{text}, {history.graphs} graph{'s' * (history.graphs != 1)} compiled"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a packed sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--q-heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compare-stock", action="store_true", help="then run the same steps through stock attention")
    parser.add_argument("--tolerance", type=float, default=0.02, help="--compare-stock: largest difference of a loss")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    magi_flex.enable()

    first_mask = mods.document_causal(next(packed_batches(args.seq_len, args.seed)).documents)
    call = {"heads": (args.q_heads, args.kv_heads), "head_dim": args.dim // args.q_heads, "device": args.device}
    print(magi_flex.explain(first_mask, args.seq_len, args.seq_len, name="document_causal", **call), end="\n\n")
    ours = train(args, attend_flex, flex_mask, Progress(args))
    print(summary("magi_flex", ours, args.seq_len))
    if not args.compare_stock:
        return 0

    print("\nThe same steps through stock attention: scaled_dot_product_attention with the mask as a dense table,")
    print("since stock flex_attention has no backward on a CPU")
    stock = train(args, attend_dense, dense_mask, Progress(args))
    print(summary("stock", stock, args.seq_len))
    largest = max(abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True))
    agree = largest <= args.tolerance
    verdict = "the losses agree" if agree else "THE LOSSES DIFFER"
    print(f"{verdict}: largest difference over {args.steps} steps {largest:.2e} (tolerance {args.tolerance:g})")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
