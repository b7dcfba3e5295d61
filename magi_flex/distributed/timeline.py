"""What ran when: spans of compute and communication, as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

COMPUTE, NETWORK, REDUCTION = "attention", "cast", "reduce"


@dataclass(frozen=True)
class Span:
    """Microseconds since the timeline began."""

    name: str
    lane: str
    begin: float
    end: float


class Timeline:
    """Records spans on the CPU's clock or, for a CUDA device, with events on its streams.

    timeline = Timeline(device)
    attention_forward(..., timeline=timeline)
    timeline.save("rank0.json", rank=0)
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.on_gpu = torch.device(device).type == "cuda"
        self._open: list[tuple[str, str, object, list[object]]] = []
        self._origin = self._now()

    def _now(self) -> object:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, name: str, lane: str) -> Callable[[], None]:
        """Starts a span; call the result to end it (in a work's callback, on the stream that the work ran on)."""
        ends: list[object] = []
        self._open.append((name, lane, self._now(), ends))
        return lambda: ends.append(self._now())

    @contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        end = self.begin(name, lane)
        try:
            yield
        finally:
            end()

    def _since_origin(self, moment: object) -> float:
        if self.on_gpu:
            return self._origin.elapsed_time(moment) * 1e3  # type: ignore[attr-defined]
        return (moment - self._origin) * 1e6  # type: ignore[operator]

    def spans(self) -> list[Span]:
        """All spans that have ended."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return [
            Span(name, lane, self._since_origin(begin), self._since_origin(ends[0]))
            for name, lane, begin, ends in self._open
            if ends
        ]

    def save(self, path: str | Path, rank: int = 0) -> None:
        """Writes the Chrome trace, one process for the rank and one thread for each lane."""
        Path(path).write_text(json.dumps(chrome_trace({rank: self.spans()})))


def chrome_trace(spans_of_rank: dict[int, list[Span]]) -> dict[str, object]:
    """The trace of several ranks in Chrome's JSON format."""
    events: list[dict[str, object]] = []
    lanes = [COMPUTE, NETWORK, REDUCTION]
    for rank, spans in spans_of_rank.items():
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for thread, lane in enumerate(lanes):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}})
        for span in spans:
            place = {"pid": rank, "tid": lanes.index(span.lane)}
            events.append({"ph": "X", "name": span.name, "ts": span.begin, "dur": span.end - span.begin, **place})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
