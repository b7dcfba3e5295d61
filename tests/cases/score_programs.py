"""Score programs of score mods, traced without any attention around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_lowering.tile_program import joint_program, score_program
from inductor_lowering.torch_compat import item_access_as_index
from magi_flex.kernels.request import IndexMap, ScoreProgram
from tests.cases.score_mods import ScoreCase, ScoreMod


def traced_score(
    bind: Callable[..., ScoreMod],
    captures: Sequence[Tensor] = (),
    index_map: IndexMap | None = None,
    learned: bool = False,
) -> ScoreProgram:
    """The general program of ``bind(*captures)``; ``learned``: captures that require gradients want them."""
    wanted = tuple(learned and x.requires_grad for x in captures)

    def forward(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *captures: Tensor) -> Tensor:
        return bind(*captures)(score, b, h, q, k)

    def joint(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grad: Tensor, *captures: Tensor) -> list[Any]:
        leaf = score.detach().requires_grad_()
        captures = tuple(x.detach().requires_grad_(needed) for x, needed in zip(captures, wanted, strict=True))
        out = forward(leaf, b, h, q, k, *captures)
        leaves = [leaf, *(x for x in captures if x.requires_grad)]
        if not out.requires_grad:
            return [torch.zeros_like(score), None, None, None, None, *[None] * len(captures)]
        d_score, *grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
        d_score, remaining = torch.zeros_like(score) if d_score is None else d_score, iter(grads)
        return [d_score, None, None, None, None, *(next(remaining) if needed else None for needed in wanted)]

    captures = tuple(x.detach() for x in captures)
    places = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    with item_access_as_index():
        graph = make_fx(forward)(torch.zeros(()), *places, *captures)
        joint_graph = make_fx(joint)(torch.zeros(()), *places, torch.zeros(()), *captures)
    programs = score_program(graph), joint_program(joint_graph)
    return ScoreProgram(None, *programs, captures, wanted, index_map or IndexMap())


def program_of_case(case: ScoreCase, learned: bool = False) -> ScoreProgram:
    """The general program of a named case; ``learned``: with the gradients of its captures."""
    names = list(case.captures)

    def bind(*captures: Tensor) -> ScoreMod:
        return case.bind(dict(zip(names, captures, strict=True)))

    return traced_score(bind, [case.captures[n] for n in names], learned=learned)
