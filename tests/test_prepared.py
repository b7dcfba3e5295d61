"""What a prepared call depends on: no other call may run as it was prepared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import prepared
from magi_flex.kernels.request import Backend
from magi_flex.mask_plan import MaskPlan

Q, K, D = 9, 17, 8


class Preparing(Backend):
    """Prepares calls that do nothing, and counts them."""

    count = 0

    def prepare_forward(self, request):  # type: ignore[no-untyped-def]
        self.count += 1
        return lambda *tensors: None

    prepare_backward = lambda self, request, *tensors: self.prepare_forward(request)  # noqa: E731


def like(x: Tensor, offset: int = 0) -> Tensor:
    """Other contents of the same layout, at an address that is a multiple of 16 bytes plus ``offset`` elements."""
    room = torch.zeros(x.untyped_storage().nbytes() // x.element_size() + 8 + offset, dtype=x.dtype)
    start = (-room.data_ptr() // x.element_size()) % (16 // x.element_size()) + offset
    return room[start:].as_strided(x.shape, x.stride())


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_a_prepared_call_depends_on(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Preparing()
    chosen: list[str] = []
    monkeypatch.setattr(prepared, "route", lambda facts, choice: chosen.append(choice) or backend)
    plan = MaskPlan(RowIntervals.full(Q, K))
    first = dict(
        q=torch.randn(1, 2, Q, D), k=torch.randn(1, 1, K, D), v=torch.randn(1, 1, K, D),
        out=torch.randn(1, 2, Q, D), lse=torch.randn(1, 2, Q), d_out=torch.randn(1, 2, Q, D),
        plan=plan, scale=0.1, backend="auto", needs_backward=True, max_score=False,
    )  # fmt: skip
    mine = {"needs_backward", "max_score"} if backward else {"out", "lse", "d_out"}
    names = [name for name in first if name not in mine]

    def prepares(**other: object) -> bool:
        before = backend.count
        given = [(first | other)[name] for name in names]
        call = prepared.prepared_backward(*given) if backward else prepared.prepared_forward(*given)  # type: ignore
        assert call is not None
        return backend.count > before

    given = {name: x for name, x in first.items() if isinstance(x, Tensor) and name in names}
    assert prepares() and not prepares()
    assert not prepares(**{name: like(x) for name, x in given.items()})
    for name, x in given.items():
        wide = torch.empty(*x.shape[:-1], x.shape[-1] + 4, dtype=x.dtype)[..., : x.shape[-1]]
        assert prepares(**{name: wide}), name
        if name != "lse":
            assert prepares(**{name: like(x, offset=1)}), name
    for name in ("out", "d_out") if backward else ("q", "k", "v"):
        assert prepares(**{name: given[name].bfloat16()}), name
    assert prepares(scale=0.2) and prepares(backend="tiled") and chosen[-1] == "tiled"
    assert prepares(k=torch.randn(1, 2, K, D), v=torch.randn(1, 2, K, D))
    for name in {"needs_backward", "max_score"} - mine:
        assert prepares(**{name: not first[name]}), name
    assert prepares(plan=MaskPlan(RowIntervals.full(Q, K)))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert prepares() and not prepares()
    plan.starts.add_(1)
    assert prepares()
