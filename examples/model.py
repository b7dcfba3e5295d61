"""A small GPT: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Attention is a plain call of `flex_attention`; nothing in this file knows which backend serves it.

Shape legend: B batch, S sequence, V vocabulary, M model dim, H query heads, G key/value heads, D head dim, F hidden dim
of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 257
    layers: int = 4
    dim: int = 192
    q_heads: int = 6
    kv_heads: int = 2
    hidden_dim: int = 512
    rope_base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.q_heads


def attend_flex(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask: Any) -> Tensor:
    return flex_attention(q_BHSD, k_BGSD, v_BGSD, block_mask=mask, enable_gqa=True)


def rotary_angles(positions_BS: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin ``[B, 1, S, D/2]`` of the rotary embedding (Su et al., arXiv 2104.09864)."""
    frequency_D = base ** (-torch.arange(0, head_dim, 2, device=positions_BS.device) / head_dim)
    angle_B1SD = positions_BS[:, None, :, None] * frequency_D
    return angle_B1SD.cos(), angle_B1SD.sin()


def rotate(x_BHSD: Tensor, cos_B1SD: Tensor, sin_B1SD: Tensor) -> Tensor:
    low, high = x_BHSD.chunk(2, dim=-1)
    return torch.cat((low * cos_B1SD - high * sin_B1SD, high * cos_B1SD + low * sin_B1SD), dim=-1).to(x_BHSD.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.config = config
        self.attend = attend
        self.query = nn.Linear(config.dim, config.q_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.q_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x_BSM: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        heads = (-1, self.config.head_dim)
        q_BHSD = self.query(x_BSM).unflatten(-1, heads).transpose(1, 2)
        k_BGSD = self.key(x_BSM).unflatten(-1, heads).transpose(1, 2)
        v_BGSD = self.value(x_BSM).unflatten(-1, heads).transpose(1, 2)
        y_BHSD = self.attend(rotate(q_BHSD, cos, sin), rotate(k_BGSD, cos, sin), v_BGSD, mask)
        return self.output(y_BHSD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BSM: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSM)) * self.up(x_BSM))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config, attend)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BSM: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        x_BSM = x_BSM + self.attention(self.attention_norm(x_BSM), cos, sin, mask)
        return x_BSM + self.feed_forward(self.feed_forward_norm(x_BSM))


class Transformer(nn.Module):
    """Args: attend: attention of (q, k, v, mask); the mask is handed through as it is."""

    def __init__(self, config: ModelConfig, attend: Attend = attend_flex) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, mask: Any) -> Tensor:
        """Logits ``[B, S, V]``; ``positions_BS`` are the tokens' places for the rotary embedding."""
        cos, sin = rotary_angles(positions_BS, self.config.head_dim, self.config.rope_base)
        x_BSM = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSM = block(x_BSM, cos, sin, mask)
        return self.head(self.norm(x_BSM))
