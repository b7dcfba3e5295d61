"""Plan and score program of an op's call, from what the op carries (op_specs.py)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from magi_flex import plan_memo
from magi_flex.kernels.cuda_driver import stream_of
from magi_flex.kernels.request import IDENTITY, ScoreProgram
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import BuiltMask, MaskSpec, ScoreSpec, split_last
from magi_flex.plan_memo import HandledMask


class CallMods:
    """Plan and score program of a call."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        handle: Tensor | None,
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        mask: str,
        score: ScoreSpec,
    ) -> None:
        self._given = (tensors, ints, mask, score, (*q.shape[:3], k.shape[2]), q.device)
        identity = (mask, *self._given[4], stream_of(q.device))
        found = None if handle is None else plan_memo.of_handle(handle, identity)
        self._found = found or HandledMask(None, self._find())
        # Where the plan is another one than that of the mask, a score mod could be asked for pairs that the mask leaves
        # out, and read its captures out of bounds.
        if score.forward is not None:
            self.correct()

    def _find(self) -> BuiltMask:
        tensors, ints, mask, score, sizes, device = self._given
        of_mask, _ = split_last(score.order, tensors, ints)
        return MaskSpec.from_json(mask).shared(*of_mask, sizes, device)

    @property
    def plan(self) -> MaskPlan:
        return self._found.mask.plan

    def correct(self) -> None:
        """Waits until the plan is certain, which may be another one then, see :class:`HandledMask`."""
        if not self._found.is_certain:
            self._found.correct(self._find)

    def score(self) -> ScoreProgram:
        tensors, ints, _, score, sizes, device = self._given
        if score.forward is None:
            return IDENTITY
        _, of_score = split_last(score.order, tensors, ints)
        return score.build(*of_score, sizes, device, self._found.mask.selected)
