"""Score mods that people use, as named cases.

    case = make_score_mod("alibi", batch=2, heads=3, q_len=129)
    case.score_mod(score, b, h, q, k)
    case.bind(case.captures_as(torch.float64))                 # the same function for a float64 reference

Shape legend: B batch, H query heads, Q query rows, K keys, T table entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases.masks import Random

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ScoreCase:
    """A score_mod as a function of its float captures.

    Attributes:
        bind: captures -> score_mod.
        captures: float32 tensors; ``learned`` names those whose gradient is wanted (they require grad).
    """

    name: str
    bind: Callable[[dict[str, Tensor]], ScoreMod]
    captures: dict[str, Tensor]
    learned: tuple[str, ...]

    @property
    def score_mod(self) -> ScoreMod:
        return self.bind(self.captures)

    def captures_as(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Fresh leaves of the same values in ``dtype``."""
        return {n: x.detach().to(dtype).requires_grad_(n in self.learned) for n, x in self.captures.items()}


Built = tuple[Callable[[dict[str, Tensor]], ScoreMod], dict[str, Tensor], tuple[str, ...]]
SCORE_MODS: dict[str, Callable[[int, int, int, int, Random], Built]] = {}


def _score(builder: Callable[[int, int, int, int, Random], Built]) -> Callable[[int, int, int, int, Random], Built]:
    SCORE_MODS[builder.__name__] = builder
    return builder


def make_score_mod(
    name: str, batch: int, heads: int, q_len: int, kv_len: int | None = None, seed: int = 0
) -> ScoreCase:
    """The score mod ``name`` of SCORE_MODS for these sizes; equal arguments give equal captures."""
    kv_len = q_len if kv_len is None else kv_len
    bind, captures, learned = SCORE_MODS[name](batch, heads, q_len, kv_len, Random(seed))
    return ScoreCase(name, bind, {n: x.requires_grad_(n in learned) for n, x in captures.items()}, learned)


def _randn(rng: Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng.generator)


@_score
def identity(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    return lambda c: lambda score, b, h, q, k: score, {}, ()


@_score
def softcap(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    return lambda c: lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0), {}, ()


@_score
def alibi(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    slope_H = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    return lambda c: lambda score, b, h, q, k: score - c["slope_H"][h] * (q - k).abs(), {"slope_H": slope_H}, ()


@_score
def alibi_causal(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    """The form for causal masks: a bias that is affine in k - q."""
    slope_H = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    return lambda c: lambda score, b, h, q, k: score + c["slope_H"][h] * (k - q), {"slope_H": slope_H}, ()


@_score
def temperature_per_head(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    captures = {"temperature_H": _randn(rng, heads).exp()}
    return lambda c: lambda score, b, h, q, k: score * c["temperature_H"][h], captures, ("temperature_H",)


@_score
def temperature_per_query(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    captures = {"temperature_Q": 0.1 * torch.arange(1, q_len + 1).log() + 1.0}
    return lambda c: lambda score, b, h, q, k: score * c["temperature_Q"][q], captures, ()


@_score
def learned_temperature(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    return lambda c: lambda score, b, h, q, k: score * c["t"], {"t": torch.tensor(1.3)}, ("t",)


@_score
def relative_table(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    captures = {"table_HT": _randn(rng, heads, q_len + kv_len - 1)}
    return lambda c: lambda s, b, h, q, k: s + c["table_HT"][h, q - k + (kv_len - 1)], captures, ("table_HT",)


def t5_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Buckets of q - k >= 0: exact up to half of them, then logarithmic (T5, unidirectional)."""
    distance = distance.clamp(min=0)
    exact = buckets // 2
    ratio = (distance.clamp(min=1) / exact).log() / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, far)


@_score
def t5(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    captures = {"table_HT": _randn(rng, heads, 16)}
    return lambda c: lambda s, b, h, q, k: s + c["table_HT"][h, t5_bucket(q - k, 16, 64)], captures, ("table_HT",)


@_score
def pair_bias(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    captures = {"bias_BHQK": _randn(rng, batch, heads, q_len, kv_len)}
    return lambda c: lambda score, b, h, q, k: score + c["bias_BHQK"][b, h, q, k], captures, ("bias_BHQK",)


@_score
def separable_2d_bias(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    width = 9
    rows = -(-max(q_len, kv_len) // width)
    captures = {"x_T": _randn(rng, 2 * width - 1), "y_T": _randn(rng, 2 * rows - 1)}

    def bind(c: dict[str, Tensor]) -> ScoreMod:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            dx = q % width - k % width + (width - 1)
            dy = q // width - k // width + (rows - 1)
            return score + c["x_T"][dx] + c["y_T"][dy]

        return score_mod

    return bind, captures, ("x_T", "y_T")


@_score
def decay(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    captures = {"rate_H": 0.02 * torch.arange(1.0, heads + 1)}
    return lambda c: lambda score, b, h, q, k: score - c["rate_H"][h] * (q - k), captures, ("rate_H",)


@_score
def log_gates(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    gate = -0.1 * torch.rand(max(q_len, kv_len), generator=rng.generator)
    captures = {"gate_S": gate.cumsum(0)}
    return lambda c: lambda score, b, h, q, k: score + c["gate_S"][q] - c["gate_S"][k], captures, ("gate_S",)


@_score
def query_dependent_bias(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    captures = {"bias_BHQT": _randn(rng, batch, heads, q_len, q_len + kv_len - 1)}

    def bind(c: dict[str, Tensor]) -> ScoreMod:
        return lambda score, b, h, q, k: score + c["bias_BHQT"][b, h, q, k - q + (q_len - 1)]

    return bind, captures, ("bias_BHQT",)


@_score
def key_bias(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    captures = {"bias_BHK": _randn(rng, batch, heads, kv_len)}
    return lambda c: lambda score, b, h, q, k: score + c["bias_BHK"][b, h, k], captures, ("bias_BHK",)


@_score
def soft_document(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    doc_S, _ = rng.labels(max(q_len, kv_len), 60)
    return lambda c: lambda s, b, h, q, k: torch.where(doc_S[q] == doc_S[k], s, s - 3.0), {}, ()


@_score
def constant(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    return lambda c: lambda score, b, h, q, k: torch.full_like(score, 0.5), {}, ()


@_score
def positions_only(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    """Does not read the score; a learned bias does all."""
    captures = {"bias_HQK": _randn(rng, heads, q_len, kv_len)}
    return lambda c: lambda score, b, h, q, k: c["bias_HQK"][h, q, k], captures, ("bias_HQK",)


@_score
def hard_causal(batch: int, heads: int, q_len: int, kv_len: int, rng: Random) -> Built:
    return lambda c: lambda s, b, h, q, k: torch.where(k <= q, s, -float("inf")), {}, ()
