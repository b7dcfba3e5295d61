"""What all tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> None:
    """No file meets Dynamo's limit of recompilations because of what another one compiled in the same process."""
    torch._dynamo.reset()
