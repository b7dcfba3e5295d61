"""Do all ranks plan the same thing?  A cheap checksum of what each was given, compared before anything is exchanged.

The first collective of a planning has the same shape whatever the input, so that ranks with different masks get an
error each instead of waiting for each other.

Shape legend: P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.intervals import RowIntervals

WORDS = 2048
_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))  # odd constants of SplitMix64, as int64


def device_types(group: dist.ProcessGroup) -> list[str]:
    """The devices that the group's backends serve, such as ["cpu", "cuda"]."""
    return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of a planning have to be for this group's collectives: on the CPU if it serves that."""
    types = device_types(group)
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` of every rank (equal shapes), ``[P, ...]`` on the CPU.  A collective."""
    device = group_device(group)
    gathered = torch.empty(group.size(), *x.shape, dtype=x.dtype, device=device)
    if x.numel():
        dist.all_gather(list(gathered.unbind(0)), x.to(device).contiguous(), group=group)
    return gathered.cpu()


def _weights(count: int, device: torch.device) -> Tensor:
    x = torch.arange(1, count + 1, device=device) * _MIX[0]
    x = (x ^ (x >> 30)) * _MIX[1]
    return (x ^ (x >> 27)) | 1


def tensor_checksum(x: Tensor) -> int:
    """64 bits that depend on every element of an int32 tensor and its place; two reads of the tensor.

    Sums over rows and over columns of the data laid out as a matrix of 64-bit words, each mixed with random weights:
    arithmetic modulo 2^64, so the same on every device.
    """
    flat = x.contiguous().view(-1)
    if flat.storage_offset() % 2:
        flat = flat.clone()  # so that pairs of numbers are aligned words
    whole = len(flat) - len(flat) % (2 * WORDS)
    words = flat[:whole].view(torch.int64).view(-1, WORDS)
    last = torch.nn.functional.pad(flat[whole:], (0, whole + 2 * WORDS - len(flat))).view(torch.int64)
    rows, columns = torch.cat((words.sum(1), last.sum().view(1))), words.sum(0) + last
    total = (rows * _weights(len(rows), x.device)).sum() ^ ((columns * _weights(WORDS, x.device)).sum() >> 1)
    return int(total)


def mask_checksum(mask: RowIntervals) -> Tensor:
    """int64 ``[7]``: shape, length and contents of a mask."""
    return torch.tensor(
        [*mask.starts.shape, mask.kv_len, tensor_checksum(mask.starts), tensor_checksum(mask.ends)], dtype=torch.int64
    )


def require_agreement(group: dist.ProcessGroup, what: str, values: Sequence[Tensor | int]) -> None:
    """Raises ValueError on every rank of the group unless all gave the same ints or int64 tensors.  A collective."""
    flat = torch.cat([torch.as_tensor(x, dtype=torch.int64).reshape(-1).cpu() for x in values])
    heads = all_gather(torch.tensor([len(flat), tensor_checksum(flat.view(torch.int32))]), group).tolist()
    different = [rank for rank, x in enumerate(heads) if x != heads[0]]
    if different:
        raise ValueError(
            f"{what}: ranks {different} were given something else than rank 0; give every rank of the group the same "
            "(draw random masks from one seed, or broadcast them)"
        )
