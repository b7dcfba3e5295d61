"""What of a request's score mod the Hopper kernels are given: steps, code or nothing."""

from __future__ import annotations

import contextlib

from magi_flex.kernels.ffa_generated_score import SUPPORTED, NoCode, generated_score
from magi_flex.kernels.ffa_score import KernelScore, kernel_score
from magi_flex.kernels.request import AttentionRequest, Bias, ScoreProgram, Softcap
from magi_flex.kernels.score_distance import Lengths
from magi_flex.kernels.score_split import (
    JOINT_ARGUMENTS,
    SCORE_ARGUMENTS,
    has_linear_gradient,
    leading_factors,
    score_ops,
)


def scale_and_score(request: AttentionRequest, backward: bool, pack: int) -> tuple[float, KernelScore | None]:
    """The scale with the constant factors that the score mod begins with, and what is left of the mod.

    ``pack``: see :class:`magi_flex.kernels.ffa_score_inputs.Layout`.

    Raises NoCode where the mod is no steps, or captures want gradients, and no code can be made of it.
    """
    score, q = request.score, request.q
    if score.is_identity:
        return request.scale, None
    lengths = Lengths(q.shape[1], q.shape[2], request.k.shape[2])
    if score.steps is None or (backward and any(score.needs_grad)):
        return request.scale, generated_score(score, q.device, backward, lengths, pack)
    if _reads_tables(score) and _is_code(score, backward):
        with contextlib.suppress(NoCode):  # then it stays steps
            return request.scale, generated_score(score, q.device, backward, lengths, pack)
    scale, steps = leading_factors(request.scale, score.steps)
    return scale, kernel_score(steps) if steps else None


def _reads_tables(score: ScoreProgram) -> bool:
    """Whether steps take more instructions than code: tables do, but the tanh of steps is the processor's own."""
    kinds = {type(step) for step in score.steps or ()}
    return Bias in kinds and Softcap not in kinds


def _is_code(score: ScoreProgram, backward: bool) -> bool:
    """Whether the graphs of a mod that is steps as well are such as code can be made of."""
    if score.forward is None or not score_ops(score.forward, SCORE_ARGUMENTS) <= SUPPORTED:
        return False
    joint = score.joint
    return not backward or (
        joint is not None and score_ops(joint, JOINT_ARGUMENTS) <= SUPPORTED and has_linear_gradient(joint)
    )
