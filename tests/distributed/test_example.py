"""The training example on two ranks: FSDP2 and context parallel attention give the losses of one rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_train_context_parallel() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "train_context_parallel.py"), "--compare-one-rank", "--steps", "3"]
    command += ["--seq-len", "129", "--layers", "1", "--dim", "32", "--q-heads", "4", "--kv-heads", "2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the losses agree" in done.stdout
    assert re.search(r"2 ranks: loss .* 1 graph compiled", done.stdout)
