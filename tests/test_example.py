"""The main job: its text, its packing, and a short run of it against stock attention."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


packed_text = load("packed_text")


def test_packing_keeps_every_token_in_order() -> None:
    seq_len, count = 1000, 40
    batches = list(itertools.islice(packed_text.packed_batches(seq_len, seed=5), count))
    packed = torch.cat([batch.tokens[0] for batch in batches])
    wanted: list[int] = []
    for document in packed_text.documents(seed=5):
        wanted += document
        if len(wanted) >= seq_len * count:
            break
    assert packed.tolist() == wanted[: seq_len * count]


def test_documents_positions_and_targets_agree() -> None:
    batches = list(itertools.islice(packed_text.packed_batches(4096, seed=1), 30))
    assert len({tuple(batch.documents.tolist()) for batch in batches}) > 1  # the mask changes from step to step
    for batch in batches:
        tokens, targets, positions = batch.tokens[0], batch.targets[0], batch.positions[0]
        same_document = batch.documents[1:] == batch.documents[:-1]
        assert torch.equal(targets[:-1][same_document], tokens[1:][same_document])
        assert (targets[:-1][~same_document] == packed_text.IGNORED).all() and targets[-1] == packed_text.IGNORED
        assert (positions[1:][same_document] == positions[:-1][same_document] + 1).all()
        assert (positions[1:][~same_document] == 0).all() and positions[0] == 0
        assert (tokens[1:][~same_document] == packed_text.BEGIN).all()
        assert batch.count == len(batch.documents.unique())


def test_the_rotary_embedding_depends_on_distance_alone() -> None:
    model = load("model")
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind(0)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        rotated = (
            model.rotate(x, *model.rotary_angles(torch.tensor([[at]]).double(), 16, 100.0))
            for x, at in ((query, q_position), (key, k_position))
        )
        return torch.linalg.vecdot(*rotated)

    torch.testing.assert_close(score(7, 3), score(104, 100))
    assert not torch.allclose(score(7, 3), score(7, 4))


@pytest.fixture(scope="module")
def short_run() -> subprocess.CompletedProcess[str]:
    arguments = (
        "--steps",
        "12",
        "--seq-len",
        "384",
        "--layers",
        "1",
        "--dim",
        "32",
        "--q-heads",
        "2",
        "--kv-heads",
        "1",
    )
    return subprocess.run(
        (sys.executable, str(EXAMPLES / "train_packed_text.py"), *arguments, "--device", "cpu", "--compare-stock"),
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_short_run_agrees_with_stock_attention(short_run) -> None:
    assert short_run.returncode == 0, short_run.stdout + short_run.stderr
    assert "the losses agree" in short_run.stdout


def test_a_short_run_compiles_once_and_learns(short_run) -> None:
    (line,) = [line for line in short_run.stdout.split("\n") if line.startswith("magi_flex: loss")]
    assert "1 graph compiled" in line
    first, last = (float(x) for x in line.removeprefix("magi_flex: loss ").split(" (")[0].split(" -> "))
    assert last < first - 0.3
