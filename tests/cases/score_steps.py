"""Score programs of simple steps (magi_flex/kernels/request.py): their definition in torch, and examples."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_flex.kernels.request import Bias, Distance, Multiply, ScoreStep, Softcap
from tests.cases.score_mods import ScoreMod


def steps_mod(steps: tuple[ScoreStep, ...]) -> ScoreMod:
    """The score_mod that the steps stand for."""

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for step in steps:
            match step:
                case Multiply(factor):
                    score = score * factor
                case Softcap(cap):
                    score = cap * torch.tanh(score / cap)
                case Distance(slopes, absolute):
                    distance = (k - q).abs() if absolute else k - q
                    score = score + slopes.to(score)[h % slopes.numel()] * distance
                case Bias(table, (sb, sh, sq, sk), offset, factor):
                    flat = table.flatten().to(score)
                    score = score + factor * flat[offset + b * sb + h * sh + q * sq + k * sk]
        return score

    return mod


def step_programs(
    batch: int, heads: int, q_len: int, kv_len: int, device: str = "cpu"
) -> dict[str, tuple[ScoreStep, ...]]:
    """Every kind of step, alone and in sequences."""
    pair = torch.randn(batch, heads, q_len, kv_len, device=device)
    width = q_len + kv_len
    relative = torch.randn(heads, width, device=device).to(torch.bfloat16)
    key = torch.randn(kv_len, device=device).to(torch.float16)
    slopes = torch.rand(heads, device=device) * -0.1
    return {
        "softcap": (Softcap(5.0),),
        "factors": (Multiply(-2.0), Softcap(20.0), Multiply(3.0)),
        "alibi": (Distance(slopes, absolute=True),),
        "distance_softcap": (Distance(slopes[:1], absolute=False), Softcap(10.0)),
        "pair_bias": (Bias(pair, (heads * q_len * kv_len, q_len * kv_len, kv_len, 1), 0),),
        "relative_and_key_bias": (
            Bias(relative, (0, width, 1, -1), kv_len - 1, 0.5),
            Bias(key, (0, 0, 0, 1), 0),
        ),
        "four_steps": (Distance(slopes, absolute=True), Softcap(8.0), Multiply(1.5), Bias(key, (0, 0, 0, 1), 0)),
    }
