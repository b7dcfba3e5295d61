"""Whether tensors still hold what they held: on the host, and by the kernel in the emulator."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from magi_flex.kernels import contents
from magi_flex.kernels.contents import Contents
from tests.emulation import emulator


class HostFlag:
    """In the place of a flag that a GPU writes to."""

    made = 0

    def __init__(self) -> None:
        HostFlag.made += 1
        self._memory = torch.empty(1, dtype=torch.int32)
        self.address = self._memory.data_ptr()
        self.value = ctypes.c_int.from_address(self.address)
        self.written = SimpleNamespace(record=lambda: None, synchronize=lambda: None, query=lambda: self.is_written)
        self.is_written = True


def tensors() -> list[Tensor]:
    """Dtypes and sizes that are no multiples of a vector, an address that is none, strides, bits that are not equal to
    themselves, nothing at all, and more than the kernel's threads read at once."""
    numbers = torch.arange(4 * 5137, dtype=torch.int32)
    floats = torch.tensor([float("nan"), 0.0, -0.0, 1.0], requires_grad=True)
    return [
        *(numbers[:5137], numbers[1:9], numbers.view(4, -1).T[:7, 1:3], numbers[:0], numbers[5].reshape(())),
        *(floats, torch.tensor([True, False, True]), torch.arange(300).to(torch.uint8)[1:]),
    ]


@pytest.mark.parametrize("way", ["host", "kernel"])
def test_a_single_bit(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: type[Contents] = contents._AtOnce
    if way == "kernel":
        if emulator.COMPILER is None:
            pytest.skip("needs g++")
        emulator.install(monkeypatch)
        monkeypatch.setattr(contents, "_Flag", HostFlag)
        made = contents._ByKernel

    def verdict(held: Contents, given: list[Tensor]) -> bool:
        same = held.compare(given)
        return same if isinstance(same, bool) else same()

    given = tensors()
    held = made(given)
    assert verdict(held, given)
    assert verdict(held, [x.detach().clone() for x in given])
    for which, x in enumerate(given):
        for at in {0, x.numel() // 2, x.numel() - 1} if x.numel() else ():
            other = x.detach().clone(memory_format=torch.contiguous_format)
            other.view(-1).view(torch.uint8)[at * x.element_size()] ^= 1
            assert not verdict(held, [*given[:which], other, *given[which + 1 :]]), (which, at)
    assert verdict(held, given)


def test_flags_serve_one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    emulator.install(monkeypatch)
    monkeypatch.setattr(contents, "_Flag", HostFlag)
    monkeypatch.setattr(contents, "_free", {})
    x = torch.arange(9)
    held, before = contents._ByKernel([x]), HostFlag.made
    first, second = held.compare([x]), held.compare([x + 1])
    assert first() and not second() and HostFlag.made == before + 2
    del first, second
    held.compare([x]), held.compare([x])
    assert HostFlag.made == before + 2
    unfinished = held.compare([x])
    unfinished.flag.is_written = False
    del unfinished
    third, fourth = held.compare([x]), held.compare([x + 1])
    assert third() and not fourth() and HostFlag.made == before + 3


def test_devices_without_our_kernels_or_cuda_are_asked_at_once() -> None:
    assert type(contents.contents_of([torch.empty(3, device="meta")])) is contents._AtOnce
