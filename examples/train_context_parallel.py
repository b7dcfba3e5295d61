"""The training of train_packed_text.py on several ranks: the sequence is shared, the parameters are sharded.

    torchrun --nproc-per-node 4 examples/train_context_parallel.py                       # gloo on CPUs, NCCL on GPUs
    torchrun --nproc-per-node 4 examples/train_context_parallel.py --compare-one-rank    # the losses agree

FSDP2 over the ranks, and context parallel attention over the same ranks.  Against the single-device script there are
four changes: `fully_shard`, `attend_local` as the model's attention, a `ContextParallel` from each step's mask, and
`cp.shard` for what the model and the loss read.

Shape legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import magi_flex
from magi_flex.distributed import ContextParallel, attend_local
from model import ModelConfig, Transformer, attend_flex
from packed_text import IGNORED, packed_batches
from train_packed_text import History, Progress, flex_mask, learning_rate, summary, train


def attend(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask: Any) -> Tensor:
    return attend_local(q_BHSD, k_BGSD, v_BGSD, block_mask=mask, enable_gqa=True)


def train_sharded(args: argparse.Namespace, mesh: DeviceMesh, report: Any) -> History:
    device, ranks = torch.device(args.device), mesh.size()
    torch.manual_seed(args.seed)
    config = ModelConfig(
        layers=args.layers, dim=args.dim, q_heads=args.q_heads, kv_heads=args.kv_heads, hidden_dim=8 * args.dim // 3
    )
    model = Transformer(config, attend).to(device)
    for block in model.blocks:
        block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    torch._dynamo.utils.counters.clear()
    losses, seconds = [], []
    for step, batch in enumerate(itertools.islice(packed_batches(args.seq_len, args.seed), args.steps)):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        cp = ContextParallel(mesh, flex_mask(batch, device))
        tokens, positions, targets = (
            cp.shard(x.to(device), dim=1).to_local() for x in (batch.tokens, batch.positions, batch.targets)
        )
        logits_BSV = model(tokens, positions, cp.block_mask)
        # FSDP2 averages gradients over the ranks, so each one scales its sum to the mean of the whole sequence.
        total = F.cross_entropy(logits_BSV.float().flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total * ranks / (batch.targets != IGNORED).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        losses.append(mean.item() / ranks)
        seconds.append(time.perf_counter() - start)
        report(step, losses[-1], batch, seconds[-1])
    return History(losses, seconds[1:], seconds[0], torch._dynamo.utils.counters["stats"]["unique_graphs"])


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a packed sequence, over all ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--q-heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare-one-rank", action="store_true", help="then run the same steps on one rank")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference of a loss")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    on_gpu = torch.cuda.is_available()
    args.device = "cpu"
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        args.device = str(device)
        dist.init_process_group("nccl", device_id=device)  # without it the first barrier may hang
    else:
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if not on_gpu and torch.get_num_threads() > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    magi_flex.enable()
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (ranks,), mesh_dim_names=("cp",))
    report = Progress(args) if rank == 0 else lambda *step: None
    ours = train_sharded(args, mesh, report)
    agree = True
    if rank == 0:
        print(summary(f"{ranks} ranks", ours, args.seq_len))
        if args.compare_one_rank:
            print("\nThe same steps on one rank")
            alone = train(args, attend_flex, flex_mask, report)
            print(summary("1 rank", alone, args.seq_len))
            largest = max(abs(a - b) for a, b in zip(ours.losses, alone.losses, strict=True))
            agree = largest <= args.tolerance
            verdict = "the losses agree" if agree else "THE LOSSES DIFFER"
            print(f"{verdict}: largest difference over {args.steps} steps {largest:.2e} (tolerance {args.tolerance:g})")
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
