"""Memory that the ranks of a node can write into: torch's symmetric memory, a staging buffer in two halves a group.

Every call of a native collective uses the half that the last one did not.  A rank may write into a half again once its
owner has taken out what came there two calls ago; the owner's signal of the call between says so, since it follows in
stream order.  So one signal a call is both arrival and departure.  The price is that the calls of a group run one after
the other, on whatever streams they are started.

Shape legend: P ranks.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed.agreement import all_gather, tensor_checksum

logger = logging.getLogger("magi_flex")

AUTO = False  # whether native="auto" takes them: on two GPUs they were no faster than NCCL (docs/design.md)
ALIGNMENT = 128  # bytes; where each tensor's rows begin in a half
_LEAST_BYTES = 1 << 22  # of a half


@dataclass
class StagingBuffers:
    """The two halves of this rank, and where the other ranks' are.

    Attributes:
        half_bytes: the same on every rank.
        memory: uint8 ``[2 * half_bytes]``, symmetric memory.
        peers: int64 ``[2, P]`` on the device, addresses of all ranks' halves.
        pads: int64 ``[P]`` on the device, addresses of all ranks' signal pads.
        calls: how many have begun; the number of the last one.
    """

    group: dist.ProcessGroup
    half_bytes: int
    memory: Tensor
    peers: Tensor
    pads: Tensor
    handle: object
    calls: int = 0
    _last: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    @staticmethod
    def allocate(group: dist.ProcessGroup, device: torch.device, half_bytes: int) -> StagingBuffers:
        """A collective.  Raises what torch raises where the GPUs cannot reach each other's memory."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        # Not symmetric_memory.empty: that takes memory from a pool, whose signal pads may have been used before.
        memory = symmetric_memory._SymmetricMemory.empty_strided_p2p((2 * half_bytes,), (1,), torch.uint8, device)
        handle = symmetric_memory.rendezvous(memory, group.group_name)
        handle.get_signal_pad(group.rank(), (group.size(),), torch.int32).zero_()
        begins = torch.tensor(handle.buffer_ptrs)
        peers = torch.stack((begins, begins + half_bytes)).to(device)
        pads = torch.tensor(handle.signal_pad_ptrs, device=device)
        torch.cuda.synchronize(device)
        all_gather(torch.zeros(1), group)  # nobody signals before every pad is clear
        return StagingBuffers(group, half_bytes, memory, peers, pads, handle)

    def begin_call(self) -> int:
        """Which half the next call uses.  Follows the last call in the current stream."""
        torch.cuda.current_stream(self.memory.device).wait_event(self._last)
        self.calls += 1
        return self.calls % 2

    def end_call(self) -> None:
        """What the call brought has been taken out of its half (in stream order)."""
        self._last.record(torch.cuda.current_stream(self.memory.device))

    def half(self, which: int) -> Tensor:
        return self.memory[which * self.half_bytes : (which + 1) * self.half_bytes]


_buffers: dict[str, StagingBuffers] = {}


def buffers(group: dist.ProcessGroup, device: torch.device, half_bytes: int) -> StagingBuffers:
    """The group's buffers, grown to at least ``half_bytes``.  A collective where they have to grow."""
    known = _buffers.get(group.group_name)
    if known is not None and known.group is group and known.half_bytes >= half_bytes:
        return known
    size = max(_LEAST_BYTES, 1 << max(0, half_bytes - 1).bit_length())
    if known is not None:
        torch.cuda.synchronize(device)  # nothing reads the old ones any more
    _buffers[group.group_name] = StagingBuffers.allocate(group, device, size)
    return _buffers[group.group_name]


def why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the group's ranks cannot use native collectives, the same answer on every rank; None if they can.

    A collective.  The first call for a group allocates its buffers, as a trial.
    """
    known = _buffers.get(group.group_name)
    if known is not None and known.group is group:
        return None
    reason = _agreed(group, _why_not_here(device))
    if reason is None and len({int(x) for x in all_gather(_machine(), group)}) > 1:
        reason = "the ranks are on several machines"
    if reason is None:
        failure = None
        try:
            buffers(group, device, 0)
        except (RuntimeError, ImportError) as error:
            failure = f"symmetric memory: {error}"
        reason = _agreed(group, failure)
        if reason is not None:
            _buffers.pop(group.group_name, None)
    return reason


def choose_native(choice: Literal["auto"] | bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether rows travel by native collectives, the same on every rank.  A collective.

    Raises:
        RuntimeError: on every rank, with the reason, if ``choice`` is True and they are not available.
    """
    if choice is False or (choice == "auto" and not AUTO) or group.size() == 1:
        return False
    reason = why_not(group, device)
    if reason is not None and choice is True:
        raise RuntimeError(f'native: True was asked for, but is not available ({reason}); use native="auto"')
    if reason is not None:
        logger.info("native collectives are not available: %s", reason)
    return reason is None


def _why_not_here(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"tensors are on {device.type}, native collectives are for CUDA"
    try:
        import triton  # noqa: F401
        from torch.distributed import _symmetric_memory  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def _agreed(group: dist.ProcessGroup, reason: str | None) -> str | None:
    """The reason of the first rank that has one."""
    given = all_gather(torch.tensor([reason is not None]), group).flatten().tolist()
    if not any(given):
        return None
    return reason or f"rank {given.index(True)} cannot (see its log)"


def _machine() -> Tensor:
    """A number for the machine: its name and, where there is one, the number of its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    data = name.encode().ljust(256, b"\0")[:256]
    return torch.tensor([tensor_checksum(torch.frombuffer(bytearray(data), dtype=torch.int32))])
