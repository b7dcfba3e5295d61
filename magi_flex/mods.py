"""Ready mask_mods and score_mods, and the masks by name with small default arguments.

from magi_flex import mods
mask_mod = mods.document_causal(doc_ids)
mask_mod = mods.and_masks(mods.document(doc_ids), mods.sliding_window(1024))
mask_mod = mods.by_name("sink_window", q_len=4096, kv_len=4096)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

from magi_flex.mask_mods import (
    MaskMod,
    bidirectional_local,
    bigbird,
    block_diffusion,
    causal,
    causal_lower_right,
    chunk_causal,
    chunked_local,
    dense_table,
    dilated_window,
    document,
    document_block_causal,
    document_causal,
    document_prefix_lm,
    documents_from_lengths,
    draft_rows,
    full,
    image_blocks,
    images_mutual,
    jagged,
    key_padding,
    latest_image,
    longformer,
    natten_2d,
    natten_3d,
    nothing,
    padding,
    paged,
    per_batch,
    per_head,
    prefix_lm,
    selected_blocks,
    selected_tokens,
    shared_prefix,
    sink_window,
    sliding_window,
    spatial_head,
    temporal_head,
    tree,
)
from magi_flex.score_mods import (
    ScoreMod,
    alibi,
    alibi_slopes,
    chain,
    decay,
    hard_mask,
    key_bias,
    log_gates,
    pair_bias,
    query_dependent_bias,
    query_temperature,
    relative_table,
    separable_bias,
    soft_mask,
    softcap,
    t5_bias,
    t5_buckets,
    temperature,
)

__all__ = [
    "MaskMod",
    "ScoreMod",
    "alibi",
    "alibi_slopes",
    "and_masks",
    "bidirectional_local",
    "bigbird",
    "block_diffusion",
    "by_name",
    "causal",
    "causal_lower_right",
    "chain",
    "chunk_causal",
    "chunked_local",
    "decay",
    "dense_table",
    "dilated_window",
    "document",
    "document_block_causal",
    "document_causal",
    "document_prefix_lm",
    "documents_from_lengths",
    "draft_rows",
    "full",
    "hard_mask",
    "image_blocks",
    "images_mutual",
    "jagged",
    "key_bias",
    "key_padding",
    "latest_image",
    "log_gates",
    "longformer",
    "names",
    "natten_2d",
    "natten_3d",
    "nothing",
    "or_masks",
    "padding",
    "paged",
    "pair_bias",
    "per_batch",
    "per_head",
    "prefix_lm",
    "query_dependent_bias",
    "query_temperature",
    "relative_table",
    "selected_blocks",
    "selected_tokens",
    "separable_bias",
    "shared_prefix",
    "sink_window",
    "sliding_window",
    "soft_mask",
    "softcap",
    "spatial_head",
    "t5_bias",
    "t5_buckets",
    "temperature",
    "temporal_head",
    "tree",
]


@dataclass(frozen=True)
class _Sizes:
    """What the default arguments are made from."""

    q_len: int
    kv_len: int
    device: torch.device

    @property
    def longest(self) -> int:
        return max(self.q_len, self.kv_len)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform in [low, high), the same on every call."""
        generator = torch.Generator("cpu").manual_seed(0)
        return torch.randint(low, max(low + 1, high), shape, generator=generator, device="cpu").to(self.device)

    def chance(self, probability: float, *shape: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(0)
        return (torch.rand(shape, generator=generator, device="cpu") < probability).to(self.device)

    def documents(self, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Ids and positions of packed documents: lengths between 16 and 4096 tokens, all octaves alike."""
        total = self.longest if length is None else length
        generator = torch.Generator("cpu").manual_seed(0)
        ids: list[Tensor] = []
        positions: list[Tensor] = []
        while total > 0:
            size = min(total, int(2 ** (4 + 8 * float(torch.rand((), generator=generator, device="cpu")))))
            ids.append(torch.full((size,), len(ids), dtype=torch.int32, device=self.device))
            positions.append(torch.arange(size, dtype=torch.int32, device=self.device))
            total -= size
        empty = torch.zeros(0, dtype=torch.int32, device=self.device)
        return torch.cat((empty, *ids)), torch.cat((empty, *positions))

    def images(self) -> Tensor:
        """Every second document is an image, -1 elsewhere."""
        ids, _ = self.documents()
        return torch.where(ids % 2 == 1, ids // 2, -1)

    def blocks(self, size: int) -> tuple[int, int]:
        return -(-self.q_len // size), -(-self.kv_len // size)


def _alternating(mask_mod: MaskMod) -> MaskMod:
    """Tables of two heads for any number of heads."""
    return lambda b, h, q, k: mask_mod(b, h % 2, q, k)


def _document_prefix_lm(s: _Sizes) -> MaskMod:
    ids, positions = s.documents()
    return document_prefix_lm(ids, positions, s.integers(0, 64, int(ids[-1]) + 1 if len(ids) else 1))


def _draft_rows(s: _Sizes) -> MaskMod:
    context = max(s.kv_len - s.q_len, -(-s.kv_len // 2))
    return draft_rows(s.integers(0, context, -(-s.q_len // 4)), context, 4)


def _jagged(s: _Sizes) -> MaskMod:
    parts = 8
    q_offsets, kv_offsets = (torch.arange(parts + 1, device=s.device) * n // parts for n in (s.q_len, s.kv_len))
    return jagged(q_offsets, kv_offsets, s.q_len, s.kv_len)


def _shared_prefix(s: _Sizes) -> MaskMod:
    position = torch.arange(s.longest, device=s.device)
    prompt = s.longest // 4
    return shared_prefix(torch.where(position < prompt, -1, (position - prompt) // 256))


def _tree(s: _Sizes) -> MaskMod:
    nodes = torch.arange(s.longest, device=s.device) // 64
    return tree(nodes, [-1, *((n - 1) // 2 for n in range(1, -(-s.longest // 64)))])


def _latest_image(s: _Sizes) -> MaskMod:
    key_image, _ = s.documents(s.kv_len)
    images = int(key_image[-1]) + 1 if s.kv_len else 0
    return latest_image(torch.arange(s.q_len, device=s.device) * images // max(1, s.q_len), key_image)


def _paged(s: _Sizes) -> MaskMod:
    page, slot = 64, torch.arange(s.kv_len, device=s.device)
    pages, generator = -(-s.kv_len // page), torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(pages, generator=generator, device="cpu").to(s.device)
    return paged(order[slot // page] * page + slot % page, causal())


def _grid(size: int, *inner: int) -> int:
    """Outer extent of a grid that holds ``size`` positions."""
    plane = 1
    for extent in inner:
        plane *= extent
    return max(1, -(-size // plane))


_DEFAULTS: dict[str, Callable[[_Sizes], MaskMod]] = {
    "bidirectional_local": lambda s: bidirectional_local(512),
    "bigbird": lambda s: bigbird(128, s.chance(0.002, s.longest), s.chance(0.05, *s.blocks(64)), 64),
    "block_diffusion": lambda s: block_diffusion(max(1, -(-s.longest // 2)), 32),
    "causal": lambda s: causal(),
    "causal_lower_right": lambda s: causal_lower_right(s.q_len, s.kv_len),
    "chunk_causal": lambda s: chunk_causal(256),
    "chunked_local": lambda s: chunked_local(1024),
    "dense_table": lambda s: dense_table(s.chance(0.5, s.q_len, s.kv_len)),
    "dilated_window": lambda s: dilated_window(256, 4),
    "document": lambda s: document(s.documents()[0]),
    "document_block_causal": lambda s: document_block_causal(*s.documents()),
    "document_causal": lambda s: document_causal(s.documents()[0]),
    "document_prefix_lm": _document_prefix_lm,
    "draft_rows": _draft_rows,
    "full": lambda s: full(),
    "image_blocks": lambda s: image_blocks(s.images()),
    "images_mutual": lambda s: images_mutual(s.images()),
    "jagged": _jagged,
    "key_padding": lambda s: key_padding(torch.tensor([s.kv_len * 3 // 4], device=s.device)),
    "latest_image": _latest_image,
    "longformer": lambda s: longformer(256, s.chance(0.002, s.longest)),
    "natten_2d": lambda s: natten_2d(_grid(s.longest, 64), 64, (13, 13)),
    "natten_3d": lambda s: natten_3d(_grid(s.longest, 16, 16), 16, 16, (5, 5, 5)),
    "nothing": lambda s: nothing(),
    "padding": lambda s: padding(torch.tensor([min(s.q_len, s.kv_len) * 3 // 4], device=s.device)),
    "paged": _paged,
    "per_head": lambda s: _alternating(per_head(torch.arange(2, device=s.device), causal(), sliding_window(1024))),
    "prefix_lm": lambda s: prefix_lm(s.kv_len // 4),
    "selected_blocks": lambda s: _alternating(selected_blocks(s.chance(0.2, 2, *s.blocks(64)), 64)),
    "selected_tokens": lambda s: selected_tokens(s.integers(0, s.kv_len, s.q_len, 16)),
    "shared_prefix": _shared_prefix,
    "sink_window": lambda s: sink_window(4, 1024),
    "sliding_window": lambda s: sliding_window(1024),
    "spatial_head": lambda s: spatial_head(min(226, s.longest), 1024),
    "temporal_head": lambda s: temporal_head(min(226, s.longest), 1024),
    "tree": _tree,
}


def names() -> list[str]:
    """The masks that :func:`by_name` knows, sorted."""
    return sorted(_DEFAULTS)


def by_name(name: str, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> MaskMod:
    """The mask ``name`` (see :func:`names`) with small default arguments for these lengths; for looking and measuring.

    Masks that differ by head do so for even and odd heads; captured tables have 1 batch entry.  Equal arguments give
    equal masks.

    Raises ValueError for unknown names.
    """
    if name not in _DEFAULTS:
        raise ValueError(f"name: is {name!r}; give one of {', '.join(names())}")
    return _DEFAULTS[name](_Sizes(q_len, kv_len, torch.device(device)))
