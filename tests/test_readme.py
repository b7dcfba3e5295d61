"""What the README and the guide promise: code that runs, commands and files that exist, no false warnings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(code: str) -> str:
    done = subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_code_runs() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    printed = run(code + "\nassert all(torch.isfinite(x.grad).all() and x.grad.any() for x in (q, k, v))")
    assert "4,096 queries x 4,096 keys" in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^ {4}make (\w+)", page.read_text(), re.M)) <= targets


def test_an_eager_call_that_we_serve_does_not_warn() -> None:
    run(
        """
import warnings, torch, magi_flex
from torch.nn.attention.flex_attention import flex_attention
q = torch.randn(1, 2, 32, 16, requires_grad=True)
with magi_flex.enable(), warnings.catch_warnings():
    warnings.simplefilter("error")
    flex_attention(q, q, q).sum().backward()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    flex_attention(q.detach(), q.detach(), q.detach())
assert any("without torch.compile" in str(w.message) for w in seen), "PyTorch's own math warns as before"
"""
    )
