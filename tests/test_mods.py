"""Ready mods against their definitions in plain Python, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import magi_flex
from magi_flex import mods
from tests.cases.masks import dense_mask

B, H, Q, K = 2, 2, 30, 27
S = 30
Predicate = Callable[[int, int, int, int], bool]

DOC = [0] * 5 + [1] * 1 + [2] * 14 + [3] * 10
POS = [i - DOC.index(d) for i, d in enumerate(DOC)]
DOC_B = [DOC, DOC[::-1]]
PREFIX = [2, 0, 7, 30]
IMAGE = [-1] * 4 + [0] * 6 + [-1] * 3 + [1] * 8 + [-1] * 9
RESPONSE = [-1] * 10 + [0] * 7 + [1] * 8 + [2] * 5
NODE = [0] * 4 + [1] * 3 + [2] * 5 + [3] * 6 + [4] * 6 + [5] * 6
PARENT = [-1, 0, 0, 1, -1, 3]
LENGTH = [12, 0]
GLOBAL = [i in (0, 17) for i in range(S)]
BLOCKS = (torch.rand(2, 8, 7, generator=torch.Generator().manual_seed(3)) < 0.4).tolist()
TOKENS = [[(q * 7 + n * n * 5) % K if n else -1 for n in range(5)] for q in range(Q)]
TABLE = (torch.rand(2, 1, Q, K, generator=torch.Generator().manual_seed(4)) < 0.5).tolist()
LOGICAL = [(k * 5) % 31 - 4 for k in range(K)]
ANCHOR = [3, 9, 0, 15, 6, 2, 11, 8]
OFFSETS = [2, 9, 9, 20, 28], [0, 4, 11, 20, 25]


def tensor(values: list) -> Tensor:
    return torch.tensor(values)


def ancestors(node: int) -> list[int]:
    return [] if node < 0 else [node, *ancestors(PARENT[node])]


def near(q: int, k: int, extent: int, kernel: int) -> bool:
    begin = min(max(q - kernel // 2, 0), max(0, extent - kernel))
    return begin <= k < begin + kernel


def sequence(offsets: list[int], i: int) -> int | None:
    return next((n for n in range(len(offsets) - 1) if offsets[n] <= i < offsets[n + 1]), None)


def same_sequence(b: int, h: int, q: int, k: int) -> bool:
    mine = sequence(OFFSETS[0], q)
    return mine is not None and mine == sequence(OFFSETS[1], k)


def block_diffusion(b: int, h: int, q: int, k: int) -> bool:
    q_block, k_block = q % 15 // 4, k % 15 // 4
    if q < 15:
        return q_block == k_block if k < 15 else k_block < q_block
    return k >= 15 and k_block <= q_block


MASKS: dict[str, tuple[Callable[[], mods.MaskMod], Predicate]] = {
    "full": (mods.full, lambda b, h, q, k: True),
    "nothing": (mods.nothing, lambda b, h, q, k: False),
    "causal": (mods.causal, lambda b, h, q, k: k <= q),
    "causal_lower_right": (lambda: mods.causal_lower_right(Q, K), lambda b, h, q, k: k <= q + K - Q),
    "causal_lower_right_tensor": (
        lambda: mods.causal_lower_right(torch.tensor(20), torch.tensor(25)),
        lambda b, h, q, k: k <= q + 5,
    ),
    "sliding_window": (lambda: mods.sliding_window(4), lambda b, h, q, k: 0 <= q - k < 4),
    "bidirectional_local": (lambda: mods.bidirectional_local(3), lambda b, h, q, k: abs(q - k) <= 3),
    "dilated_window": (lambda: mods.dilated_window(9, 2), lambda b, h, q, k: q - k in range(0, 9, 2)),
    "sink_window": (lambda: mods.sink_window(2, 5), lambda b, h, q, k: k <= q and (k < 2 or q - k < 5)),
    "chunk_causal": (lambda: mods.chunk_causal(7), lambda b, h, q, k: k // 7 <= q // 7),
    "chunked_local": (lambda: mods.chunked_local(7), lambda b, h, q, k: k // 7 == q // 7 and k <= q),
    "document": (lambda: mods.document(tensor(DOC)), lambda b, h, q, k: DOC[q] == DOC[k]),
    "document_batch": (lambda: mods.document(tensor(DOC_B)), lambda b, h, q, k: DOC_B[b][q] == DOC_B[b][k]),
    "document_causal": (
        lambda: mods.document_causal(tensor(DOC_B)),
        lambda b, h, q, k: DOC_B[b][q] == DOC_B[b][k] and k <= q,
    ),
    "document_block_causal": (
        lambda: mods.document_block_causal(tensor(DOC), tensor(POS), 3),
        lambda b, h, q, k: DOC[q] == DOC[k] and POS[k] // 3 <= POS[q] // 3,
    ),
    "jagged": (lambda: mods.jagged(tensor(OFFSETS[0]), tensor(OFFSETS[1]), Q, K), same_sequence),
    "key_padding": (lambda: mods.key_padding(tensor(LENGTH)), lambda b, h, q, k: k < LENGTH[b]),
    "padding": (lambda: mods.padding(tensor(LENGTH)), lambda b, h, q, k: q < LENGTH[b] and k < LENGTH[b]),
    "prefix_lm": (lambda: mods.prefix_lm(6), lambda b, h, q, k: k < 6 or k <= q),
    "prefix_lm_batch": (lambda: mods.prefix_lm(tensor([6, 0])), lambda b, h, q, k: k < (6, 0)[b] or k <= q),
    "document_prefix_lm": (
        lambda: mods.document_prefix_lm(tensor(DOC), tensor(POS), tensor(PREFIX)),
        lambda b, h, q, k: DOC[q] == DOC[k] and (POS[k] < PREFIX[DOC[q]] or k <= q),
    ),
    "shared_prefix": (
        lambda: mods.shared_prefix(tensor(RESPONSE)),
        lambda b, h, q, k: k <= q and RESPONSE[k] in (-1, RESPONSE[q]),
    ),
    "tree": (
        lambda: mods.tree(tensor(NODE), PARENT),
        lambda b, h, q, k: k <= q and NODE[k] in ancestors(NODE[q]),
    ),
    "image_blocks": (
        lambda: mods.image_blocks(tensor(IMAGE)),
        lambda b, h, q, k: k <= q or (IMAGE[q] == IMAGE[k] and IMAGE[q] >= 0),
    ),
    "images_mutual": (
        lambda: mods.images_mutual(tensor(IMAGE)),
        lambda b, h, q, k: k <= q or (IMAGE[q] >= 0 and IMAGE[k] >= 0),
    ),
    "latest_image": (
        lambda: mods.latest_image(tensor([q // 10 - 1 for q in range(Q)]), tensor(DOC[:K])),
        lambda b, h, q, k: DOC[k] == q // 10 - 1,
    ),
    "spatial_head": (
        lambda: mods.spatial_head(3, 8),
        lambda b, h, q, k: k < 3 or (q >= 3 and (q - 3) // 8 == (k - 3) // 8),
    ),
    "temporal_head": (
        lambda: mods.temporal_head(3, 8),
        lambda b, h, q, k: k < 3 or (q >= 3 and (q - 3) % 8 == (k - 3) % 8),
    ),
    "natten_2d": (
        lambda: mods.natten_2d(5, 6, (3, 4)),
        lambda b, h, q, k: near(q // 6, k // 6, 5, 3) and near(q % 6, k % 6, 6, 4),
    ),
    "natten_2d_wider_than_the_grid": (
        lambda: mods.natten_2d(10, 3, (3, 5)),
        lambda b, h, q, k: near(q // 3, k // 3, 10, 3),
    ),
    "natten_3d": (
        lambda: mods.natten_3d(3, 2, 5, (2, 1, 3)),
        lambda b, h, q, k: near(q // 10, k // 10, 3, 2) and q // 5 % 2 == k // 5 % 2 and near(q % 5, k % 5, 5, 3),
    ),
    "longformer": (
        lambda: mods.longformer(2, tensor(GLOBAL)),
        lambda b, h, q, k: abs(q - k) <= 2 or GLOBAL[q] or GLOBAL[k],
    ),
    "bigbird": (
        lambda: mods.bigbird(2, tensor(GLOBAL), tensor(BLOCKS[0]), 4),
        lambda b, h, q, k: abs(q - k) <= 2 or GLOBAL[q] or GLOBAL[k] or BLOCKS[0][q // 4][k // 4],
    ),
    "selected_blocks": (
        lambda: mods.selected_blocks(tensor(BLOCKS), 4),
        lambda b, h, q, k: BLOCKS[h][q // 4][k // 4] and k <= q,
    ),
    "selected_tokens": (lambda: mods.selected_tokens(tensor(TOKENS)), lambda b, h, q, k: k in TOKENS[q]),
    "selected_tokens_many": (
        lambda: mods.selected_tokens(tensor([row * 7 + [q % K] for q, row in enumerate(TOKENS)])),
        lambda b, h, q, k: k in TOKENS[q] or k == q % K,
    ),
    "dense_table": (lambda: mods.dense_table(tensor(TABLE)), lambda b, h, q, k: TABLE[b][0][q][k]),
    "dense_table_shared": (lambda: mods.dense_table(tensor(TABLE[1][0])), lambda b, h, q, k: TABLE[1][0][q][k]),
    "paged": (
        lambda: mods.paged(tensor(LOGICAL), mods.sliding_window(9)),
        lambda b, h, q, k: LOGICAL[k] >= 0 and 0 <= q - LOGICAL[k] < 9,
    ),
    "block_diffusion": (lambda: mods.block_diffusion(15, 4), block_diffusion),
    "draft_rows": (
        lambda: mods.draft_rows(tensor(ANCHOR), 12, 4),
        lambda b, h, q, k: k < ANCHOR[q // 4] if k < 12 else (k - 12) // 4 == q // 4,
    ),
    "per_head": (
        lambda: mods.per_head(tensor([1, 0]), mods.causal(), mods.chunked_local(4), mods.full()),
        lambda b, h, q, k: k <= q and (h == 1 or q // 4 == k // 4),
    ),
    "per_batch": (
        lambda: mods.per_batch(tensor([0, 2]), mods.causal(), mods.nothing(), mods.bidirectional_local(1)),
        lambda b, h, q, k: abs(q - k) <= 1 if b else k <= q,
    ),
    "and_or": (
        lambda: mods.and_masks(mods.or_masks(mods.sliding_window(3), mods.prefix_lm(2)), mods.document(tensor(DOC))),
        lambda b, h, q, k: (0 <= q - k < 3 or k < 2 or k <= q) and DOC[q] == DOC[k],
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name: str) -> None:
    build, predicate = MASKS[name]
    mask_mod = build()
    mask = dense_mask(mask_mod, B, H, Q, K)
    expected = [
        [[[bool(predicate(b, h, q, k)) for k in range(K)] for q in range(Q)] for h in range(H)] for b in range(B)
    ]
    assert torch.equal(mask, torch.tensor(expected))
    assert torch.equal(mask, create_mask(mask_mod, B, H, Q, K, device="cpu"))


@pytest.mark.parametrize("name", mods.names())
def test_by_name(name: str) -> None:
    """In bounds at any length, the same on every call, and not trivial; the compiled plan is the mask."""
    for q_len, kv_len in ((1, 1), (5, 130), (130, 5)):
        mask = dense_mask(mods.by_name(name, q_len, kv_len), 1, 3, q_len, kv_len)
        assert torch.equal(mask, dense_mask(mods.by_name(name, q_len, kv_len), 1, 3, q_len, kv_len))
    with torch.device("meta"):  # whatever the default device is
        mask_mod = mods.by_name(name, 300, 260, "cpu")
    mask = dense_mask(mask_mod, 1, 3, 300, 260)
    assert mask.any() != (name == "nothing")
    plan = magi_flex.plan(mask_mod, 300, 260, H=3, device="cpu")
    assert torch.equal(plan.to_dense().expand_as(mask), mask)


def test_all_masks_have_names() -> None:
    variants = {name for name in MASKS if name.endswith(("_tensor", "_batch", "_shared", "_grid", "_many"))}
    assert set(mods.names()) == set(MASKS) - variants - {"and_or"}


def test_documents_from_lengths() -> None:
    ids, positions = mods.documents_from_lengths([3, 0, 2])
    assert ids.tolist() == [0, 0, 0, 2, 2] and positions.tolist() == [0, 1, 2, 0, 1]
    assert ids.dtype == positions.dtype == torch.int32
    ids, positions = mods.documents_from_lengths(torch.tensor([3, 2]), total=8)
    assert ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2] and positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert mods.documents_from_lengths([], total=0)[0].tolist() == []
    with pytest.raises(ValueError, match="lengths: add up to 9, more than total = 8"):
        mods.documents_from_lengths([4, 5], total=8)
    with pytest.raises(ValueError, match=r"lengths: are \[4, -1\]"):
        mods.documents_from_lengths([4, -1])


# ---- score mods -----------------------------------------------------------------------------------------------------

GENERATOR = torch.Generator().manual_seed(5)
SLOPE = [0.5, 0.03]
GATE_HS = torch.randn(H, S, generator=GENERATOR)
RELATIVE_HT = torch.randn(H, Q + K - 1, generator=GENERATOR)
T5_HT = torch.randn(H, 8, generator=GENERATOR)
BIAS_BHQK = torch.randn(B, 1, Q, K, generator=GENERATOR)
KEY_BHK = torch.randn(1, H, K, generator=GENERATOR)
SHAW_BHQT = torch.randn(B, H, Q, Q + K - 1, generator=GENERATOR)
AXES = [torch.randn(2 * n - 1, generator=GENERATOR) for n in (2, 3, 5)]
TEMPERATURE_Q = torch.rand(Q, generator=GENERATOR)


def bucket(distance: int, buckets: int, max_distance: int) -> int:
    exact = buckets // 2
    if distance < exact:
        return max(0, distance)
    growth = math.log(distance / exact) / math.log(max_distance / exact)
    return min(buckets - 1, exact + int(growth * (buckets - exact) + 1e-6))


def axes_bias(q: int, k: int) -> Tensor:
    total = torch.zeros(())
    for size, stride, table in zip((2, 3, 5), (15, 5, 1), AXES, strict=True):
        total = total + table[q // stride % size - k // stride % size + size - 1]
    return total


SCORES: dict[str, tuple[mods.ScoreMod, Callable[[Tensor, int, int, int, int], Tensor]]] = {
    "softcap": (mods.softcap(3.0), lambda s, b, h, q, k: 3 * torch.tanh(s / 3)),
    "alibi": (mods.alibi(tensor(SLOPE)), lambda s, b, h, q, k: s - SLOPE[h] * abs(q - k)),
    "decay": (mods.decay(tensor(SLOPE)), lambda s, b, h, q, k: s - SLOPE[h] * (q - k)),
    "temperature": (mods.temperature(torch.tensor(0.7)), lambda s, b, h, q, k: s * 0.7),
    "temperature_per_head": (mods.temperature(tensor(SLOPE)), lambda s, b, h, q, k: s * SLOPE[h]),
    "query_temperature": (mods.query_temperature(TEMPERATURE_Q), lambda s, b, h, q, k: s * TEMPERATURE_Q[q]),
    "log_gates": (mods.log_gates(GATE_HS), lambda s, b, h, q, k: s + GATE_HS[h, q] - GATE_HS[h, k]),
    "log_gates_shared": (mods.log_gates(GATE_HS[0]), lambda s, b, h, q, k: s + GATE_HS[0, q] - GATE_HS[0, k]),
    "log_gates_batch": (
        mods.log_gates(GATE_HS.expand(B, H, S)),
        lambda s, b, h, q, k: s + GATE_HS[h, q] - GATE_HS[h, k],
    ),
    "relative_table": (
        mods.relative_table(RELATIVE_HT, K - 1),
        lambda s, b, h, q, k: s + RELATIVE_HT[h, q - k + K - 1],
    ),
    "t5": (mods.t5_bias(T5_HT, 20), lambda s, b, h, q, k: s + T5_HT[h, bucket(q - k, 8, 20)]),
    "t5_bidirectional": (
        mods.t5_bias(T5_HT, 20, bidirectional=True),
        lambda s, b, h, q, k: s + T5_HT[h, bucket(abs(q - k), 4, 20) + 4 * (k > q)],
    ),
    "pair_bias": (mods.pair_bias(BIAS_BHQK), lambda s, b, h, q, k: s + BIAS_BHQK[b, 0, q, k]),
    "key_bias": (mods.key_bias(KEY_BHK), lambda s, b, h, q, k: s + KEY_BHK[0, h, k]),
    "query_dependent_bias": (
        mods.query_dependent_bias(SHAW_BHQT, Q - 1),
        lambda s, b, h, q, k: s + SHAW_BHQT[b, h, q, k - q + Q - 1],
    ),
    "separable_bias": (mods.separable_bias((2, 3, 5), *AXES), lambda s, b, h, q, k: s + axes_bias(q, k)),
    "soft_mask": (mods.soft_mask(mods.causal(), 4.0), lambda s, b, h, q, k: s if k <= q else s - 4),
    "hard_mask": (mods.hard_mask(mods.causal()), lambda s, b, h, q, k: s if k <= q else torch.tensor(-math.inf)),
    "chain": (
        mods.chain(mods.softcap(2.0), mods.alibi(tensor(SLOPE))),
        lambda s, b, h, q, k: 2 * torch.tanh(s / 2) - SLOPE[h] * abs(q - k),
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str) -> None:
    score_mod, definition = SCORES[name]
    score = torch.randn(B, H, Q, K, generator=torch.Generator().manual_seed(6))
    index = torch.meshgrid(*(torch.arange(n) for n in (B, H, Q, K)), indexing="ij")
    got = score_mod(score, *index)
    for b, h, q, k in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(0, Q, 7), torch.arange(K)):
        expected = definition(score[b, h, q, k], int(b), int(h), int(q), int(k))
        torch.testing.assert_close(got[b, h, q, k], expected)


def test_alibi_slopes() -> None:
    assert mods.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    twelve = mods.alibi_slopes(12).tolist()
    assert twelve[:8] == [2.0**-n for n in range(1, 9)]
    assert twelve[8:] == pytest.approx([2.0 ** -(n + 0.5) for n in range(4)])
    assert mods.alibi_slopes(1).tolist() == [2.0**-8]


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build,message",
    [
        (lambda: mods.sliding_window(0), "window: is 0; give at least 1"),
        (lambda: mods.bidirectional_local(-1), "window: is -1; give at least 0"),
        (lambda: mods.chunk_causal(0), "chunk: is 0"),
        (
            lambda: mods.document(torch.zeros(3)),
            r"doc_ids: is torch.float32 \[3\]; give a 1-dimensional or 2-dimensional",
        ),
        (lambda: mods.key_padding(torch.zeros(2, 2).int()), r"lengths: is torch.int32 \[2, 2\]"),
        (lambda: mods.jagged(torch.tensor([0, 1]), torch.tensor([0]), 1, 1), "have 2 and 1 entries"),
        (lambda: mods.tree(torch.tensor([0]), [0]), r"parents\[0\]: is 0; give -1, or a node before 0"),
        (lambda: mods.selected_blocks(torch.zeros(2, 2), 8), "selection: is torch.float32"),
        (lambda: mods.dense_table(torch.zeros(2, 2)), "table: is torch.float32"),
        (lambda: mods.per_head(torch.tensor([0])), "mask_mods: none given"),
        (lambda: mods.natten_2d(3, 3, (0, 3)), "kernel_height: is 0"),
        (lambda: mods.by_name("diagonal", 4, 4), "name: is 'diagonal'; give one of bidirectional_local"),
        (lambda: mods.softcap(0.0), "cap: is 0.0; give a number above 0"),
        (lambda: mods.alibi_slopes(0), "heads: is 0"),
        (lambda: mods.alibi(torch.zeros(2, 2)), r"slopes: has shape \[2, 2\]; give 1 dimensions"),
        (lambda: mods.t5_bias(torch.zeros(2, 1)), "1 buckets up to distance 128"),
        (lambda: mods.t5_bias(torch.zeros(2, 32), 16), "give at least 2 buckets and a distance above 16"),
        (lambda: mods.separable_bias((2, 3), torch.zeros(3)), "1 given for a grid of 2 axes"),
        (lambda: mods.separable_bias((2,), torch.zeros(4)), r"tables\[0\]: has shape \[4\]; \[3\] is needed"),
    ],
)
def test_errors(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
