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
    bind: Callable[..., ScoreMod], captures: Sequence[Tensor] = (), index_map: IndexMap | None = None
) -> ScoreProgram:
    """The general program of ``bind(*captures)``, whose captures want no gradients."""

    def forward(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *captures: Tensor) -> Tensor:
        return bind(*captures)(score, b, h, q, k)

    def joint(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grad: Tensor, *captures: Tensor) -> list[Any]:
        leaf = score.detach().requires_grad_()
        out = forward(leaf, b, h, q, k, *captures)
        d_score = torch.autograd.grad(out, leaf, grad)[0] if out.requires_grad else torch.zeros_like(score)
        return [d_score, None, None, None, None, *[None] * len(captures)]

    captures = tuple(x.detach() for x in captures)
    places = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    with item_access_as_index():
        graph = make_fx(forward)(torch.zeros(()), *places, *captures)
        joint_graph = make_fx(joint)(torch.zeros(()), *places, torch.zeros(()), *captures)
    programs = score_program(graph), joint_program(joint_graph)
    return ScoreProgram(None, *programs, captures, (False,) * len(captures), index_map or IndexMap())


def program_of_case(case: ScoreCase) -> ScoreProgram:
    """The general program of a named case."""
    names = list(case.captures)
    return traced_score(lambda *x: case.bind(dict(zip(names, x, strict=True))), [case.captures[n] for n in names])
