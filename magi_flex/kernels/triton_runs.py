"""Walking the runs of a row tile inside a Triton kernel: first the full ones, then the partial ones, step by step.

The forward kernel has one loop over all steps, whose body asks whether the mask must be applied: loads for the next
steps are under way across the borders of runs.  The backward kernels, which need all registers for unmasked steps, have
two loops, see step_range.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_record(record):
    """What the kernels need of a record, see Schedule; all loads are under way before one is waited for."""
    first = tl.load(record)
    end = tl.load(record + 1)
    mask_head = tl.load(record + 2)
    partial_lo = tl.load(record + 3)
    full_lo = tl.load(record + 5)
    full_hi = tl.load(record + 6)
    steps = tl.load(record + 7)
    return first, end, mask_head, partial_lo, full_lo, full_hi, steps


@triton.jit
def run_bounds(runs, run, wanted=True, key=0, stop=0):
    """(begin, end) of a row tile's run number ``run``, or (key, stop) where it is not wanted.

    ``runs``: full runs, the tile's first and end among them, partial runs, the tile's first.  Full runs come first.
    """
    partial = run - (runs[2] - runs[1])
    at = tl.where(partial < 0, runs[0] + 2 * (runs[1] + run), runs[3] + 2 * (runs[4] + partial))
    return tl.load(at, mask=wanted, other=key), tl.load(at + 1, mask=wanted, other=stop)


@triton.jit
def is_masked(runs, run, key, stop, STEP: tl.constexpr):
    """Whether the step at ``key`` reaches beyond its run, or the run is a partial one."""
    return (run >= runs[2] - runs[1]) | (key + STEP > stop)


@triton.jit
def next_step(runs, run, key, stop, more, STEP: tl.constexpr):
    """(run, first, end of run) of the step behind the one at ``key``, if there is one (``more``)."""
    key += STEP
    ended = key >= stop
    run += ended.to(tl.int32)
    key, stop = run_bounds(runs, run, ended & more, key, stop)
    return run, key, stop


@triton.jit
def step_range(partial_runs, partial_lo, partial_hi, full_runs, full_lo, run, STEP: tl.constexpr, MASKED: tl.constexpr):
    """(first, end) of what is visited of run ``run``.

    Without MASKED: the whole steps of full runs.  With MASKED: partial runs, and behind them what is left of the full
    runs after their whole steps.
    """
    partial = partial_hi - partial_lo
    if MASKED:
        is_full = run >= partial
        at = tl.where(is_full, full_runs + 2 * (full_lo + run - partial), partial_runs + 2 * (partial_lo + run))
        begin = tl.load(at)
        stop = tl.load(at + 1)
        begin += tl.where(is_full, (stop - begin) // STEP * STEP, 0)
    else:
        at = full_runs + 2 * (full_lo + run)
        begin = tl.load(at)
        stop = begin + (tl.load(at + 1) - begin) // STEP * STEP
    return begin, stop
