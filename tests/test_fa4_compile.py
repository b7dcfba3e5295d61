"""flash-attn-4's kernels with our masks and score mods compile, and the masks became predicates of whole words.

Skipped without flash-attn-4.  Takes minutes: each kernel is compiled for a GPU that is not there.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import fa4_compile
from benchmarks.fa4_compile import CASES, RESULTS, Case

_missing = fa4_compile.missing()
needs_package = pytest.mark.skipif(_missing is not None, reason=str(_missing))
# Bytes of spills: the package's block list kernels have 88 and 72 by themselves.
SM100_FRAME = {"forward": 104, "backward": 72}


def main_kernel(row: dict[str, Any]) -> dict[str, Any]:
    """The one that multiplies matrices."""
    return max(row["kernels"], key=lambda code: code["operations"]["HGMMA"] + code["operations"]["UTCHMMA"])


def check_bits(case: Case, row: dict[str, Any]) -> None:
    code = main_kernel(row)
    found = code["operations"]
    if case.arch == 90:
        assert found["HGMMA"] and found["R2P"] and not found["LDL"] and code["frame_bytes"] == 0
    else:
        assert found["UTCHMMA"] and code["frame_bytes"] <= SM100_FRAME[case.direction]
        assert found["R2P"] >= (64 if case.direction == "forward" else 8)


@needs_package
@pytest.mark.parametrize("case", [*CASES[:3], Case(90, "backward", score="bias")], ids=lambda c: f"{c.arch}:{c.name}")
def test_compiles(case: Case) -> None:
    (row,) = fa4_compile.compile_elsewhere(case.arch, [case.name])
    check_bits(case, row) if not case.score else main_kernel(row)


def test_what_was_recorded() -> None:
    """The result file speaks of cases that exist, and says what the notes say."""
    record = json.loads((RESULTS / "fa4_compile.json").read_text())
    assert record["versions"]["flash-attn-4"] == "4.0.0b36"
    rows = {(row["arch"], row["case"]): row for row in record["rows"]}
    known = {(case.arch, case.name): case for case in CASES}
    assert set(rows) <= set(known) and not any("error" in row for row in rows.values())
    for place, row in rows.items():
        case = known[place]
        if case.masking == "bits" and not case.score and case.slots == 1 and (case.head_dim, case.v_dim) == (128, 128):
            check_bits(case, row)
            single = rows[case.arch, Case(case.arch, case.direction, masking="element").name]
            assert main_kernel(row)["frame_bytes"] <= main_kernel(single)["frame_bytes"]
            assert main_kernel(row)["operations"]["ISETP"] < main_kernel(single)["operations"]["ISETP"] / 4
