"""Mask patterns that people use, as named cases for any length.

    case = make_mask("document_causal", q_len=129)             # kv_len = q_len, seed 0
    for name in MASKS: ...                                     # every pattern

Each mask_mod is written straight from its definition, over scalar indices or index tensors that broadcast, and reads
captured tensors in bounds only for indices inside the lengths.

Shape legend: B batch, H query heads, Q query rows, K keys, S positions (the longer of Q and K).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MaskCase:
    """A mask_mod with its lengths; ``batch`` and ``heads`` are above 1 only where the mask depends on them.

    ``max_intervals`` bounds the key intervals of a row where the pattern has a bound that does not grow with length.
    """

    name: str
    mask_mod: MaskMod
    batch: int
    heads: int
    q_len: int
    kv_len: int
    max_intervals: int | None

    def dense(self) -> Tensor:
        return dense_mask(self.mask_mod, self.batch, self.heads, self.q_len, self.kv_len)


def dense_mask(mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """The mask as bool ``[B, H, Q, K]``, by one call on index tensors that broadcast."""
    b = torch.arange(batch).view(-1, 1, 1, 1)
    h = torch.arange(heads).view(1, -1, 1, 1)
    q = torch.arange(q_len).view(1, 1, -1, 1)
    k = torch.arange(kv_len).view(1, 1, 1, -1)
    return mask_mod(b, h, q, k).expand(batch, heads, q_len, kv_len).contiguous()


# ---- random captures ------------------------------------------------------------------------------------------------


class Random:
    """Random integers, tables and packed lengths from one seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return int(torch.randint(low, max(low, high) + 1, (), generator=self.generator))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(low, high) + 1, shape, generator=self.generator)

    def bernoulli(self, probability: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < probability

    def lengths(self, total: int, longest: int) -> list[int]:
        """Random lengths in [1, longest] that add up to ``total``."""
        out: list[int] = []
        while total > 0:
            out.append(min(total, self.integer(1, longest)))
            total -= out[-1]
        return out

    def labels(self, total: int, longest: int) -> tuple[Tensor, Tensor]:
        """(document id, position inside the document) of packed documents, int64 ``[S]`` each."""
        lengths = torch.tensor(self.lengths(total, longest))
        ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        first = lengths.cumsum(0) - lengths
        return ids, torch.arange(total) - first[ids]

    def images(self, total: int) -> Tensor:
        """Image id of each token, -1 for text, int64 ``[S]``: short texts and images take turns."""
        out = torch.full((total,), -1)
        ids, _ = self.labels(total, 24)
        is_image = ids % 2 == 1
        out[is_image] = ids[is_image] // 2
        return out


Built = tuple[MaskMod, int, int, int | None]  # mask_mod, batch, heads, max_intervals
MASKS: dict[str, Callable[[int, int, Random], Built]] = {}


def _mask(builder: Callable[[int, int, Random], Built]) -> Callable[[int, int, Random], Built]:
    MASKS[builder.__name__] = builder
    return builder


def make_mask(name: str, q_len: int, kv_len: int | None = None, seed: int = 0) -> MaskCase:
    """The pattern ``name`` of MASKS at these lengths; equal arguments give equal captures."""
    kv_len = q_len if kv_len is None else kv_len
    mask_mod, batch, heads, max_intervals = MASKS[name](q_len, kv_len, Random(seed))
    return MaskCase(name, mask_mod, batch, heads, q_len, kv_len, max_intervals)


# ---- positions only -------------------------------------------------------------------------------------------------


@_mask
def full(q_len: int, kv_len: int, rng: Random) -> Built:
    return lambda b, h, q, k: b.new_ones((), dtype=torch.bool), 1, 1, 1


@_mask
def nothing(q_len: int, kv_len: int, rng: Random) -> Built:
    return lambda b, h, q, k: b.new_zeros((), dtype=torch.bool), 1, 1, 1


@_mask
def causal(q_len: int, kv_len: int, rng: Random) -> Built:
    return lambda b, h, q, k: k <= q, 1, 1, 1


@_mask
def lower_right_causal(q_len: int, kv_len: int, rng: Random) -> Built:
    return lambda b, h, q, k: k <= q + (kv_len - q_len), 1, 1, 1


@_mask
def lower_right_causal_captured(q_len: int, kv_len: int, rng: Random) -> Built:
    lengths = torch.tensor([q_len, kv_len])
    return lambda b, h, q, k: k - lengths[1] <= q - lengths[0], 1, 1, 1


@_mask
def sliding_window(q_len: int, kv_len: int, rng: Random) -> Built:
    window = rng.integer(1, 200)
    return lambda b, h, q, k: (q - k >= 0) & (q - k < window), 1, 1, 1


@_mask
def bidirectional_local(q_len: int, kv_len: int, rng: Random) -> Built:
    window = rng.integer(0, 100)
    return lambda b, h, q, k: (q - k).abs() <= window, 1, 1, 1


@_mask
def chunk_causal(q_len: int, kv_len: int, rng: Random) -> Built:
    chunk = rng.integer(2, 60)
    return lambda b, h, q, k: k // chunk <= q // chunk, 1, 1, 1


@_mask
def chunked_local(q_len: int, kv_len: int, rng: Random) -> Built:
    chunk = rng.integer(2, 200)
    return lambda b, h, q, k: (k // chunk == q // chunk) & (k <= q), 1, 1, 1


@_mask
def sink_and_window(q_len: int, kv_len: int, rng: Random) -> Built:
    sink, window = rng.integer(1, 8), rng.integer(1, 100)
    return lambda b, h, q, k: (k <= q) & ((k < sink) | (q - k < window)), 1, 1, 2


@_mask
def dilated(q_len: int, kv_len: int, rng: Random) -> Built:
    window, stride = 60, rng.integer(2, 5)
    return lambda b, h, q, k: (q - k >= 0) & (q - k < window) & ((q - k) % stride == 0), 1, 1, 30


# ---- labels: documents, padding, images -----------------------------------------------------------------------------


@_mask
def document(q_len: int, kv_len: int, rng: Random) -> Built:
    doc_S, _ = rng.labels(max(q_len, kv_len), 150)
    return lambda b, h, q, k: doc_S[q] == doc_S[k], 1, 1, 1


@_mask
def document_causal(q_len: int, kv_len: int, rng: Random) -> Built:
    doc_BS = torch.stack([rng.labels(max(q_len, kv_len), longest)[0] for longest in (20, 300)])
    return lambda b, h, q, k: (doc_BS[b, q] == doc_BS[b, k]) & (k <= q), 2, 1, 1


@_mask
def document_scattered(q_len: int, kv_len: int, rng: Random) -> Built:
    """Documents that return after a break, and labels in no order."""
    doc_S = rng.labels(max(q_len, kv_len), 60)[0] * 7 % 4
    return lambda b, h, q, k: (doc_S[q] == doc_S[k]) & (k <= q), 1, 1, None


@_mask
def key_padding(q_len: int, kv_len: int, rng: Random) -> Built:
    length_B = torch.tensor([rng.integer(1, kv_len), 0, kv_len])
    return lambda b, h, q, k: k < length_B[b], 3, 1, 1


@_mask
def query_and_key_padding(q_len: int, kv_len: int, rng: Random) -> Built:
    length_B = torch.tensor([rng.integer(1, min(q_len, kv_len)), 0, max(q_len, kv_len)])
    return lambda b, h, q, k: (q < length_B[b]) & (k < length_B[b]), 3, 1, 1


@_mask
def prefix_lm(q_len: int, kv_len: int, rng: Random) -> Built:
    prefix_B = torch.tensor([rng.integer(1, kv_len), 0])
    return lambda b, h, q, k: (k < prefix_B[b]) | (k <= q), 2, 1, 1


@_mask
def prefix_lm_in_documents(q_len: int, kv_len: int, rng: Random) -> Built:
    doc_S, pos_S = rng.labels(max(q_len, kv_len), 150)
    prefix_D = rng.integers(0, 80, int(doc_S[-1]) + 1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (doc_S[q] == doc_S[k]) & ((pos_S[k] < prefix_D[doc_S[q]]) | (k <= q))

    return mask_mod, 1, 1, 2


@_mask
def block_causal_in_documents(q_len: int, kv_len: int, rng: Random) -> Built:
    doc_S, pos_S = rng.labels(max(q_len, kv_len), 300)
    block = 2048 if doc_S.shape[0] > 8192 else 48
    return lambda b, h, q, k: (doc_S[q] == doc_S[k]) & (pos_S[k] // block <= pos_S[q] // block), 1, 1, 1


@_mask
def image_blocks_in_causal_text(q_len: int, kv_len: int, rng: Random) -> Built:
    img_S = rng.images(max(q_len, kv_len))
    return lambda b, h, q, k: (k <= q) | ((img_S[q] == img_S[k]) & (img_S[q] >= 0)), 1, 1, 2


@_mask
def all_images_mutual(q_len: int, kv_len: int, rng: Random) -> Built:
    img_S = rng.images(max(q_len, kv_len))
    return lambda b, h, q, k: (k <= q) | ((img_S[q] >= 0) & (img_S[k] >= 0)), 1, 1, None


@_mask
def cross_attention_latest_image(q_len: int, kv_len: int, rng: Random) -> Built:
    image_K, _ = rng.labels(kv_len, 40)
    latest_Q = rng.integers(-1, int(image_K[-1]), q_len).sort().values  # -1: no image yet
    return lambda b, h, q, k: image_K[k] == latest_Q[q], 1, 1, 1


@_mask
def jagged(q_len: int, kv_len: int, rng: Random) -> Built:
    sequence_Q, sequence_K = rng.labels(q_len, 70)[0], rng.labels(kv_len, 90)[0]
    return lambda b, h, q, k: sequence_Q[q] == sequence_K[k], 1, 1, 1


@_mask
def shared_prefix(q_len: int, kv_len: int, rng: Random) -> Built:
    """One prompt (response -1), several sampled responses that do not see one another."""
    size = max(q_len, kv_len)
    prompt = rng.integer(1, size)
    response_S = torch.full((size,), -1)
    if prompt < size:
        response_S[prompt:] = rng.labels(size - prompt, 100)[0]
    return lambda b, h, q, k: (k <= q) & ((response_S[k] == -1) | (response_S[k] == response_S[q])), 1, 1, 2


@_mask
def tree(q_len: int, kv_len: int, rng: Random) -> Built:
    """Tokens of tree nodes in depth-first order of creation; a token sees its node's ancestors and itself."""
    node_S, _ = rng.labels(max(q_len, kv_len), 40)
    nodes = int(node_S[-1]) + 1
    ancestor_NN = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestor_NN[node] |= ancestor_NN[rng.integer(0, node - 1)]
    return lambda b, h, q, k: (k <= q) & ancestor_NN[node_S[q], node_S[k]], 1, 1, None


@_mask
def paged(q_len: int, kv_len: int, rng: Random) -> Built:
    """Keys in pages of 16 in any order, some pages free; causal in logical positions."""
    pages = -(-kv_len // 16)
    page_P = torch.randperm(pages, generator=rng.generator)
    page_P[rng.bernoulli(0.3, pages)] = -1
    slot_K = torch.arange(kv_len)
    page_K = page_P[slot_K // 16]
    logical_K = torch.where(page_K < 0, -1, page_K * 16 + slot_K % 16)
    return lambda b, h, q, k: (logical_K[k] >= 0) & (logical_K[k] <= q), 1, 1, None


# ---- sparse patterns ------------------------------------------------------------------------------------------------


@_mask
def longformer(q_len: int, kv_len: int, rng: Random) -> Built:
    window = rng.integer(1, 40)
    global_S = rng.bernoulli(0.01, max(q_len, kv_len))
    return lambda b, h, q, k: ((q - k).abs() <= window) | global_S[q] | global_S[k], 1, 1, None


@_mask
def bigbird(q_len: int, kv_len: int, rng: Random) -> Built:
    window, block = rng.integer(1, 40), 16
    global_S = rng.bernoulli(0.01, max(q_len, kv_len))
    random_TT = rng.bernoulli(0.2, -(-q_len // block), -(-kv_len // block))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q - k).abs() <= window) | global_S[q] | global_S[k] | random_TT[q // block, k // block]

    return mask_mod, 1, 1, None


@_mask
def selected_blocks(q_len: int, kv_len: int, rng: Random) -> Built:
    block = 32
    selected_HTT = rng.bernoulli(0.3, 2, -(-q_len // block), -(-kv_len // block))
    return lambda b, h, q, k: selected_HTT[h, q // block, k // block] & (k <= q), 1, 2, None


@_mask
def selected_tokens(q_len: int, kv_len: int, rng: Random) -> Built:
    token_QN = rng.integers(0, kv_len - 1, q_len, 6)
    slots = range(token_QN.shape[1])
    return lambda b, h, q, k: functools.reduce(operator.or_, [token_QN[q, n] == k for n in slots]), 1, 1, 6


@_mask
def dense_table(q_len: int, kv_len: int, rng: Random) -> Built:
    table_QK = rng.bernoulli(0.5, q_len, kv_len)
    return lambda b, h, q, k: table_QK[q, k], 1, 1, None


@_mask
def natten_2d(q_len: int, kv_len: int, rng: Random) -> Built:
    width, radius = 13, 3
    height = max(2 * radius + 1, -(-max(q_len, kv_len) // width))

    def near(q: Tensor, k: Tensor, extent: int) -> Tensor:
        center = q.clamp(radius, extent - 1 - radius)
        return (center - k).abs() <= radius

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return near(q // width, k // width, height) & near(q % width, k % width, width)

    return mask_mod, 1, 1, 2 * radius + 1


@_mask
def natten_3d(q_len: int, kv_len: int, rng: Random) -> Built:
    height, width, radius = 5, 7, 1
    depth = max(2 * radius + 1, -(-max(q_len, kv_len) // (height * width)))

    def near(q: Tensor, k: Tensor, extent: int) -> Tensor:
        center = q.clamp(radius, extent - 1 - radius)
        return (center - k).abs() <= radius

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        frames = near(q // (height * width), k // (height * width), depth)
        rows = near(q // width % height, k // width % height, height)
        return frames & rows & near(q % width, k % width, width)

    return mask_mod, 1, 1, (2 * radius + 1) ** 2


@_mask
def spatial_head(q_len: int, kv_len: int, rng: Random) -> Built:
    """Video after ``text`` tokens; text rows see text."""
    text, pixels = rng.integer(1, 20), 64
    position_S = torch.arange(max(q_len, kv_len))
    frame_S = torch.where(position_S < text, -1, (position_S - text) // pixels)
    return lambda b, h, q, k: (frame_S[q] == frame_S[k]) | (k < text), 1, 1, 2


@_mask
def temporal_head(q_len: int, kv_len: int, rng: Random) -> Built:
    text, pixels = rng.integer(1, 20), 64
    return lambda b, h, q, k: ((q >= text) & (k >= text) & ((q - k) % pixels == 0)) | (k < text), 1, 1, None


@_mask
def block_diffusion(q_len: int, kv_len: int, rng: Random) -> Built:
    """Positions [0, n) are the noisy copy, [n, 2 n) the clean one."""
    block = rng.integer(2, 40)
    half = -(-max(q_len, kv_len) // 2)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_noisy, k_noisy = q < half, k < half
        q_block, k_block = q % half // block, k % half // block
        own_noisy = q_noisy & k_noisy & (q_block == k_block)
        earlier_clean = q_noisy & ~k_noisy & (k_block < q_block)
        clean = ~q_noisy & ~k_noisy & (k_block <= q_block)
        return own_noisy | earlier_clean | clean

    return mask_mod, 1, 1, 2


@_mask
def draft_rows(q_len: int, kv_len: int, rng: Random) -> Built:
    """Rows are draft tokens in blocks of 4; keys are the context and then the draft tokens themselves."""
    depth = 4
    context = max(kv_len - q_len, -(-kv_len // 2))
    anchor_T = rng.integers(0, context, -(-q_len // depth))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (k >= context) & ((k - context) // depth == q // depth)
        return ((k < context) & (k < anchor_T[q // depth])) | own

    return mask_mod, 1, 1, 2


# ---- mixes ----------------------------------------------------------------------------------------------------------


@_mask
def per_head_mix(q_len: int, kv_len: int, rng: Random) -> Built:
    mode_H = torch.tensor([1, 0, 2])
    window = rng.integer(1, 100)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        local = (q - k).abs() <= window
        return torch.where(mode_H[h] == 0, k <= q, torch.where(mode_H[h] == 1, local, (k < 4) | (k > q)))

    return mask_mod, 1, 3, 2


@_mask
def per_batch_mix(q_len: int, kv_len: int, rng: Random) -> Built:
    mode_B = torch.tensor([2, 0, 1])
    doc_S, _ = rng.labels(max(q_len, kv_len), 100)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = doc_S[q] == doc_S[k]
        return ((mode_B[b] == 0) & (k <= q)) | ((mode_B[b] == 1) & same) | ((mode_B[b] == 2) & same & (k >= q))

    return mask_mod, 3, 1, 1


@_mask
def per_batch_and_head_mix(q_len: int, kv_len: int, rng: Random) -> Built:
    length_B, window_H = rng.integers(0, kv_len, 2), rng.integers(1, 100, 3)
    return lambda b, h, q, k: (k < length_B[b]) & (q - k < window_H[h]), 2, 3, 1
