"""Ready mask_mods: (b, h, q, k) -> bool, true where query q attends to key k.

Every function here returns a mask_mod for FlexAttention, stock or ours.  Tensor arguments become its captures; they are
read only at indices inside the lengths, and must be on the device of the mask.  Numbers become constants of the
compiled graph, so pass what changes from step to step as a tensor.

Shape legend: B batch, H query heads, Q query rows, K keys, S positions shared by queries and keys (the longer of Q
and K), D documents, T blocks, N entries of a list.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: is {size}; give at least 1")


def _integers(name: str, tensor: Tensor, *dims: int) -> None:
    if tensor.dim() not in dims or tensor.is_floating_point() or tensor.dtype == torch.bool:
        wanted = " or ".join(f"{d}-dimensional" for d in dims)
        raise ValueError(f"{name}: is {tensor.dtype} {list(tensor.shape)}; give a {wanted} integer tensor")


def _per_batch(table: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Read ``[S]`` or ``[B, S]`` at (b, position)."""
    return (lambda b, i: table[i]) if table.dim() == 1 else (lambda b, i: table[b, i])


# ---- positions ------------------------------------------------------------------------------------------------------


def full() -> MaskMod:
    """True."""
    return lambda b, h, q, k: b.new_ones((), dtype=torch.bool)


def nothing() -> MaskMod:
    """False: every row is empty (output 0)."""
    return lambda b, h, q, k: b.new_zeros((), dtype=torch.bool)


def causal() -> MaskMod:
    """k <= q."""
    return lambda b, h, q, k: k <= q


def causal_lower_right(q_len: int | Tensor, kv_len: int | Tensor) -> MaskMod:
    """k <= q + kv_len - q_len: the last query sees every key (decoding, chunked prefill).

    Lengths given as 0-d integer tensors may change without recompilation.
    """
    return lambda b, h, q, k: k <= q + (kv_len - q_len)


def sliding_window(window: int) -> MaskMod:
    """0 <= q - k < window (Longformer's causal form, Mistral)."""
    _positive(window=window)
    return lambda b, h, q, k: (k <= q) & (q - k < window)


def bidirectional_local(window: int) -> MaskMod:
    """|q - k| <= window."""
    if window < 0:
        raise ValueError(f"window: is {window}; give at least 0")
    return lambda b, h, q, k: (q - k).abs() <= window


def dilated_window(window: int, stride: int) -> MaskMod:
    """0 <= q - k < window and (q - k) mod stride = 0 (LongNet, dilated sliding windows)."""
    _positive(window=window, stride=stride)
    return lambda b, h, q, k: (k <= q) & (q - k < window) & ((q - k) % stride == 0)


def sink_window(sink: int, window: int) -> MaskMod:
    """k <= q and (k < sink or q - k < window): attention sinks (StreamingLLM)."""
    _positive(window=window)
    return lambda b, h, q, k: (k <= q) & ((k < sink) | (q - k < window))


def chunk_causal(chunk: int) -> MaskMod:
    """floor(k / chunk) <= floor(q / chunk): full inside a chunk, causal over chunks (video, VAR, diffusion LM)."""
    _positive(chunk=chunk)
    return lambda b, h, q, k: k // chunk <= q // chunk


def chunked_local(chunk: int) -> MaskMod:
    """floor(k / chunk) = floor(q / chunk) and k <= q (Llama 4's local layers)."""
    _positive(chunk=chunk)
    return lambda b, h, q, k: (k // chunk == q // chunk) & (k <= q)


# ---- documents and padding ------------------------------------------------------------------------------------------


def documents_from_lengths(
    lengths: Sequence[int] | Tensor, total: int | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """(document ids, positions inside the document) of documents packed one after the other, int32 ``[S]`` each.

    With ``total``, what is left past the last document becomes one more document (padding that only sees itself).
    Raises ValueError for negative lengths and where they add up to more than ``total``.
    """
    lengths_D = torch.as_tensor(lengths, dtype=torch.int64, device=device)
    if lengths_D.dim() != 1 or (lengths_D < 0).any():
        raise ValueError(f"lengths: are {lengths_D.tolist()}; give a list of numbers >= 0")
    if total is not None:
        rest = total - int(lengths_D.sum())
        if rest < 0:
            raise ValueError(f"lengths: add up to {total - rest}, more than total = {total}")
        lengths_D = torch.cat((lengths_D, lengths_D.new_tensor([rest])))
    document = torch.arange(len(lengths_D), device=lengths_D.device)
    ids_S = torch.repeat_interleave(document, lengths_D)
    first_D = lengths_D.cumsum(0) - lengths_D
    positions_S = torch.arange(len(ids_S), device=ids_S.device) - first_D[ids_S]
    return ids_S.to(torch.int32), positions_S.to(torch.int32)


def document(doc_ids: Tensor) -> MaskMod:
    """doc[q] = doc[k]; ``doc_ids`` int ``[S]`` or ``[B, S]``, in any order (sorted ids give one interval a row)."""
    _integers("doc_ids", doc_ids, 1, 2)
    doc = _per_batch(doc_ids)
    return lambda b, h, q, k: doc(b, q) == doc(b, k)


def document_causal(doc_ids: Tensor) -> MaskMod:
    """doc[q] = doc[k] and k <= q; ``doc_ids`` int ``[S]`` or ``[B, S]``: packed training of a language model."""
    _integers("doc_ids", doc_ids, 1, 2)
    doc = _per_batch(doc_ids)
    return lambda b, h, q, k: (doc(b, q) == doc(b, k)) & (k <= q)


def document_block_causal(doc_ids: Tensor, positions: Tensor, block: int = 2048) -> MaskMod:
    """doc[q] = doc[k] and floor(pos[k] / block) <= floor(pos[q] / block); both int ``[S]`` or ``[B, S]``.

    Blocks are counted from the document's start (MagiAttention's varlen block causal).
    """
    _positive(block=block)
    _integers("doc_ids", doc_ids, 1, 2)
    _integers("positions", positions, 1, 2)
    doc, pos = _per_batch(doc_ids), _per_batch(positions)
    return lambda b, h, q, k: (doc(b, q) == doc(b, k)) & (pos(b, k) // block <= pos(b, q) // block)


def jagged(q_offsets: Tensor, kv_offsets: Tensor, q_len: int, kv_len: int) -> MaskMod:
    """Query and key of the same sequence; sequence n has the rows q_offsets[n] to q_offsets[n + 1] and keys likewise.

    Offsets are ascending int ``[N + 1]`` (cu_seqlens of variable-length attention).  What lies past the last offset
    attends to nothing.
    """
    for name, offsets in (("q_offsets", q_offsets), ("kv_offsets", kv_offsets)):
        _integers(name, offsets, 1)
    if len(q_offsets) != len(kv_offsets):
        raise ValueError(f"q_offsets, kv_offsets: have {len(q_offsets)} and {len(kv_offsets)} entries; give as many")
    tables = []
    for offsets, length, past in ((q_offsets, q_len, -1), (kv_offsets, kv_len, -2)):
        position = torch.arange(length, device=offsets.device)
        sequence = torch.searchsorted(offsets.long(), position, right=True) - 1
        outside = (sequence < 0) | (sequence >= len(offsets) - 1)
        tables.append(sequence.masked_fill(outside, past).to(torch.int32))
    sequence_Q, sequence_K = tables
    return lambda b, h, q, k: sequence_Q[q] == sequence_K[k]


def key_padding(lengths: Tensor) -> MaskMod:
    """k < length[b]; ``lengths`` int ``[B]``."""
    _integers("lengths", lengths, 1)
    return lambda b, h, q, k: k < lengths[b]


def padding(lengths: Tensor) -> MaskMod:
    """q < length[b] and k < length[b]; ``lengths`` int ``[B]``."""
    _integers("lengths", lengths, 1)
    return lambda b, h, q, k: (q < lengths[b]) & (k < lengths[b])


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """k < prefix or k <= q (T5's prefix LM); ``prefix`` a number, or int ``[B]``."""
    if isinstance(prefix, Tensor):
        _integers("prefix", prefix, 1)
        return lambda b, h, q, k: (k < prefix[b]) | (k <= q)
    return lambda b, h, q, k: (k < prefix) | (k <= q)


def document_prefix_lm(doc_ids: Tensor, positions: Tensor, prefix_lengths: Tensor) -> MaskMod:
    """doc[q] = doc[k] and (pos[k] < prefix[doc[q]] or k <= q).

    ``doc_ids`` (0 to D - 1) and ``positions`` int ``[S]`` or ``[B, S]``, ``prefix_lengths`` int ``[D]``.
    """
    _integers("doc_ids", doc_ids, 1, 2)
    _integers("positions", positions, 1, 2)
    _integers("prefix_lengths", prefix_lengths, 1)
    doc, pos = _per_batch(doc_ids), _per_batch(positions)
    return lambda b, h, q, k: (doc(b, q) == doc(b, k)) & ((pos(b, k) < prefix_lengths[doc(b, q)]) | (k <= q))


def shared_prefix(response_ids: Tensor) -> MaskMod:
    """k <= q and (k in the prompt or response[k] = response[q]): one prompt, several responses (GRPO, beam search).

    ``response_ids`` int ``[S]``, -1 for the prompt's tokens.
    """
    _integers("response_ids", response_ids, 1)
    return lambda b, h, q, k: (k <= q) & ((response_ids[k] < 0) | (response_ids[k] == response_ids[q]))


def tree(node_ids: Tensor, parents: Sequence[int]) -> MaskMod:
    """k <= q and node[k] is node[q] or one of its ancestors (speculative decoding, tree-shaped rollouts).

    ``node_ids`` int ``[S]``; ``parents[n]`` is node n's parent, -1 for a root, and comes before n.  Ancestors are told
    by the depth-first numbering of nodes: a node's descendants are the numbers from its own to its subtree's last.
    """
    _integers("node_ids", node_ids, 1)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}]: is {parent}; give -1, or a node before {node}")
    size = [1] * len(parents)
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    first, next_child, next_root = [0] * len(parents), [0] * len(parents), 0
    for node, parent in enumerate(parents):
        if parent >= 0:
            first[node] = next_child[parent]
            next_child[parent] += size[node]
        else:
            first[node] = next_root
            next_root += size[node]
        next_child[node] = first[node] + 1
    first_N = torch.tensor(first, dtype=torch.int32, device=node_ids.device)
    end_N = first_N + torch.tensor(size, dtype=torch.int32, device=node_ids.device)
    number_S, end_S = first_N[node_ids.long()], end_N[node_ids.long()]
    return lambda b, h, q, k: (k <= q) & (number_S[k] <= number_S[q]) & (number_S[q] < end_S[k])


# ---- images and video -----------------------------------------------------------------------------------------------


def image_blocks(image_ids: Tensor) -> MaskMod:
    """k <= q or (image[q] = image[k] and image[q] >= 0): causal text, full inside an image; int ``[S]``, -1 is text."""
    _integers("image_ids", image_ids, 1)
    return lambda b, h, q, k: (k <= q) | ((image_ids[q] == image_ids[k]) & (image_ids[q] >= 0))


def images_mutual(image_ids: Tensor) -> MaskMod:
    """k <= q or (image[q] >= 0 and image[k] >= 0): causal, and all images see one another; int ``[S]``, -1 is text."""
    _integers("image_ids", image_ids, 1)
    return lambda b, h, q, k: (k <= q) | ((image_ids[q] >= 0) & (image_ids[k] >= 0))


def latest_image(query_image: Tensor, key_image: Tensor) -> MaskMod:
    """key_image[k] = query_image[q]: cross-attention of text to the latest image before it (Flamingo).

    ``query_image`` int ``[Q]`` (-1: none yet), ``key_image`` int ``[K]``.
    """
    _integers("query_image", query_image, 1)
    _integers("key_image", key_image, 1)
    return lambda b, h, q, k: key_image[k] == query_image[q]


def spatial_head(text: int, pixels: int) -> MaskMod:
    """k < text or frame[q] = frame[k] (Sparse VideoGen); text rows see the text.

    Positions are ``text`` tokens, then frames of ``pixels`` tokens.
    """
    _positive(pixels=pixels)
    return lambda b, h, q, k: (k < text) | ((q >= text) & ((q - text) // pixels == (k - text) // pixels))


def temporal_head(text: int, pixels: int) -> MaskMod:
    """k < text or q and k are the same pixel of any two frames; positions as in :func:`spatial_head`."""
    _positive(pixels=pixels)
    return lambda b, h, q, k: (k < text) | ((q >= text) & ((q - k) % pixels == 0))


def _near(q: Tensor, k: Tensor, extent: int, kernel: int) -> Tensor:
    """k is in the window of ``kernel`` around q, moved inside the axis at its borders."""
    begin = (q - kernel // 2).clamp(0, max(0, extent - kernel))
    return (k >= begin) & (k < begin + kernel)


def natten_2d(height: int, width: int, kernel: tuple[int, int]) -> MaskMod:
    """Neighbourhood attention (NATTEN) on a row-major grid: on every axis k is in the window of ``kernel`` around q.

    Windows are moved, not cut, at the borders, so every query sees as many keys.
    """
    _positive(height=height, width=width, kernel_height=kernel[0], kernel_width=kernel[1])

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _near(q // width, k // width, height, kernel[0]) & _near(q % width, k % width, width, kernel[1])

    return mask_mod


def natten_3d(depth: int, height: int, width: int, kernel: tuple[int, int, int]) -> MaskMod:
    """:func:`natten_2d` on (depth, height, width)."""
    _positive(depth=depth, height=height, width=width)
    _positive(kernel_depth=kernel[0], kernel_height=kernel[1], kernel_width=kernel[2])
    plane = height * width

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_depth = _near(q // plane, k // plane, depth, kernel[0])
        in_height = _near(q // width % height, k // width % height, height, kernel[1])
        return in_depth & in_height & _near(q % width, k % width, width, kernel[2])

    return mask_mod


# ---- sparse patterns ------------------------------------------------------------------------------------------------


def longformer(window: int, global_tokens: Tensor) -> MaskMod:
    """|q - k| <= window or global[q] or global[k]; ``global_tokens`` bool ``[S]``."""
    return lambda b, h, q, k: ((q - k).abs() <= window) | global_tokens[q] | global_tokens[k]


def bigbird(window: int, global_tokens: Tensor, random_blocks: Tensor, block: int) -> MaskMod:
    """Longformer's mask or random_blocks[floor(q / block), floor(k / block)]; ``random_blocks`` bool ``[Tq, Tk]``."""
    _positive(block=block)
    local = longformer(window, global_tokens)
    return lambda b, h, q, k: local(b, h, q, k) | random_blocks[q // block, k // block]


def selected_blocks(selection: Tensor, block: int) -> MaskMod:
    """selection[h, floor(q / block), floor(k / block)] and k <= q (NSA, MoBA, VSA); bool ``[H, Tq, Tk]``."""
    _positive(block=block)
    if selection.dim() != 3 or selection.dtype != torch.bool:
        raise ValueError(f"selection: is {selection.dtype} {list(selection.shape)}; give bool [heads, blocks, blocks]")
    return lambda b, h, q, k: selection[h, q // block, k // block] & (k <= q)


def selected_tokens(tokens: Tensor) -> MaskMod:
    """k is in tokens[q] (DeepSeek sparse attention's top-k); ``tokens`` int ``[Q, N]``, any order, -1 for no token.

    Up to 32 tokens k is compared with each; beyond, rows are kept sorted and the mod finds k by binary search.
    """
    _integers("tokens", tokens, 2)
    count = tokens.shape[1]
    if 0 < count <= 32:
        return lambda b, h, q, k: functools.reduce(operator.or_, [tokens[q, n] == k for n in range(count)])
    steps = max(1, count).bit_length()
    sorted_QN = tokens.to(torch.int32).sort(1).values
    past_all = torch.iinfo(torch.int32).max
    sorted_QN = torch.nn.functional.pad(sorted_QN, (0, 2**steps - count), value=past_all)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        position = q * 0
        for step in (2**n for n in reversed(range(steps))):
            position = torch.where(sorted_QN[q, position + (step - 1)] < k, position + step, position)
        return sorted_QN[q, position] == k

    return mask_mod


def dense_table(table: Tensor) -> MaskMod:
    """table[q, k], or table[b, h, q, k]; bool ``[Q, K]`` or ``[B, H, Q, K]`` (B, H may be 1)."""
    if table.dtype != torch.bool or table.dim() not in (2, 4):
        raise ValueError(f"table: is {table.dtype} {list(table.shape)}; give bool [Q, K] or [B, H, Q, K]")
    if table.dim() == 2:
        return lambda b, h, q, k: table[q, k]
    by_batch, by_head = (int(size > 1) for size in table.shape[:2])
    return lambda b, h, q, k: table[b * by_batch, h * by_head, q, k]


# ---- generation and diffusion ---------------------------------------------------------------------------------------


def paged(logical: Tensor, mask_mod: MaskMod) -> MaskMod:
    """logical[k] >= 0 and mask_mod at the key's logical position; ``logical`` int ``[K]``, -1 for free slots."""
    _integers("logical", logical, 1)
    return lambda b, h, q, k: (logical[k] >= 0) & mask_mod(b, h, q, logical[k].clamp(min=0))


def block_diffusion(length: int, block: int) -> MaskMod:
    """Training mask of block diffusion (BD3-LM): positions [0, length) are the noisy copy, the rest the clean one.

    Noisy rows see their own noisy block and the earlier clean blocks; clean rows see clean blocks up to their own.
    """
    _positive(length=length, block=block)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_clean, k_clean = q >= length, k >= length
        q_block, k_block = q % length // block, k % length // block
        noisy = ~q_clean & torch.where(k_clean, k_block < q_block, k_block == q_block)
        return noisy | (q_clean & k_clean & (k_block <= q_block))

    return mask_mod


def draft_rows(anchors: Tensor, context: int, depth: int) -> MaskMod:
    """Rows are draft tokens in blocks of ``depth``; keys are ``context`` tokens, then the draft tokens (MTP, EAGLE).

    A row sees the context before its block's anchor and its own block; ``anchors`` int ``[ceil(Q / depth)]``.
    """
    _positive(depth=depth)
    _integers("anchors", anchors, 1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own_block = (k >= context) & ((k - context) // depth == q // depth)
        return ((k < context) & (k < anchors[q // depth])) | own_block

    return mask_mod


# ---- combinations ---------------------------------------------------------------------------------------------------


def _select(number: Callable[[Tensor, Tensor], Tensor], mask_mods: Sequence[MaskMod]) -> MaskMod:
    if not mask_mods:
        raise ValueError("mask_mods: none given; give at least one")

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        chosen = mask_mods[-1](b, h, q, k)
        for n in reversed(range(len(mask_mods) - 1)):
            chosen = torch.where(number(b, h) == n, mask_mods[n](b, h, q, k), chosen)
        return chosen

    return mask_mod


def per_head(mode: Tensor, *mask_mods: MaskMod) -> MaskMod:
    """mask_mods[mode[h]]; ``mode`` int ``[H]``, values 0 to len(mask_mods) - 1."""
    _integers("mode", mode, 1)
    return _select(lambda b, h: mode[h], mask_mods)


def per_batch(mode: Tensor, *mask_mods: MaskMod) -> MaskMod:
    """mask_mods[mode[b]]; ``mode`` int ``[B]``, values 0 to len(mask_mods) - 1."""
    _integers("mode", mode, 1)
    return _select(lambda b, h: mode[b], mask_mods)
