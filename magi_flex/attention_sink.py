"""Learned attention sinks: a logit for each head that joins the softmax's denominator and has no value.

    out, aux = flex_attention(q, k, v, ..., return_aux=AuxRequest(lse=True))
    out, lse = magi_flex.with_sink(out, aux.lse, sink)

FlexAttention has no argument for it, and needs none: with the log-sum-exp of the other scores, softmax over one more
column is a factor of the output (StreamingLLM, arXiv 2309.17453; gpt-oss).  Every backend serves this, and the
gradients of the factor come from autograd: that of the sink is minus the sum over rows of its probability times dO . O.

Shape legend: B batch, H query heads, Q query rows, E value head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sink(out_BHQE: Tensor, lse_BHQ: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention whose softmax has one more logit in each head.

    Differentiable in all three.  A row that attends to nothing keeps output 0 and gets the sink as its log-sum-exp.

    Args:
        out_BHQE: output of FlexAttention.
        lse_BHQ: its log-sum-exp as FlexAttention returns it, in natural units.
        sink_H: the logits, in the units of scaled scores; -inf: none.

    Returns:
        (out, lse), in the dtypes of ``out_BHQE`` and ``lse_BHQ``.

    Raises:
        ValueError: shapes do not fit together.
    """
    if out_BHQE.dim() != 4 or lse_BHQ.shape != out_BHQE.shape[:3]:
        raise ValueError(
            f"out, lse: have shapes {list(out_BHQE.shape)} and {list(lse_BHQ.shape)}; "
            "give them as flex_attention returns them, [B, H, Q, E] and [B, H, Q]"
        )
    if sink_H.shape != lse_BHQ.shape[1:2]:
        raise ValueError(f"sink: has shape {list(sink_H.shape)}; [{lse_BHQ.shape[1]}] is needed, a logit for each head")
    sink_HQ = sink_H.to(lse_BHQ.dtype)[:, None]
    nothing = (lse_BHQ == -torch.inf) & (sink_HQ == -torch.inf)
    # Where there is neither key nor sink, inf - inf must not make a NaN, not in the gradients either.
    lse, sink = lse_BHQ.masked_fill(nothing, 0), sink_HQ.expand_as(lse_BHQ).masked_fill(nothing, 0)
    factor = torch.sigmoid(lse - sink)[..., None]
    total = torch.logaddexp(lse, sink).masked_fill(nothing, -torch.inf)
    return (out_BHQE * factor).to(out_BHQE.dtype), total
