"""What the tests on a GPU share."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Ends the session behind a test that lost the process its GPU: whatever ran next would fail for that reason."""
    report = yield
    if call.excinfo is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except torch.AcceleratorError as error:
            lost = str(error).splitlines()[0]
            item.session.shouldstop = f"{item.nodeid} lost the GPU ({lost}): run the tests behind it in a new process"
    return report
