"""Build a trace for Perfetto: a process for each rank, with its steps, their phases, and its collectives.

Each phase of a step is drawn once, in order, with its total duration; a record of several steps is one bar.
Collectives are drawn at their times.
Source: "Trace Event Format", Google, 2016: complete events ("X") with times in microseconds, metadata ("M") for names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx._base.core_numbers import KIND_NAMES, STATUS_NAMES
from phalanx._comm.diagnostics.step_file import RankFile
from phalanx._comm.diagnostics.step_records import StepRecord
from phalanx._job.report.job_record import JobRecord
from phalanx._job.report.units import size

MAX_EVENTS = 200_000  # of all ranks together: about as many as a browser opens easily
_STEPS, _PHASES, _COLLECTIVES = 1, 2, 3
_ORDER = ("data", "forward", "backward", "waited", "update", "other")
_COLOURS = {"data": "yellow", "forward": "thread_state_running", "backward": "rail_animation", "update": "good"}


def plan_trace(job: JobRecord, files: Sequence[RankFile]) -> dict[str, Any]:
    """Return the trace as plain data; the trace of a long run has only its last part."""
    events: list[dict[str, Any]] = []
    share = max(64, MAX_EVENTS // max(1, len(files)))
    for number, file in enumerate(files, start=1):
        rank = int(file.facts.get("rank", 0))
        shift = job.clock_offsets.get(str(file.facts.get("host", "")), 0.0) - job.begun
        attempt = int(file.facts.get("attempt", 0))
        title = (
            f"rank {rank}" + (f", attempt {attempt + 1}" if attempt else "") + f" (pid {file.facts.get('pid', '?')})"
        )
        events.append(_name("process_name", number, 0, {"name": title}))
        events.append(_name("process_sort_index", number, 0, {"sort_index": rank}))
        for tid, name in ((_STEPS, "steps"), (_PHASES, "phases"), (_COLLECTIVES, "collectives")):
            events.append(_name("thread_name", number, tid, {"name": name}))
            events.append(_name("thread_sort_index", number, tid, {"sort_index": tid}))
        bars = [*_step_bars(file, number, shift), *_operation_bars(file, number, shift)]
        events += sorted(bars, key=lambda bar: bar["ts"])[-share:]
    for event in job.events:
        mark = {"ph": "i", "s": "g", "name": f"{event.kind}: {event.text}", "cat": "job", "pid": 1, "tid": 0}
        events.append({**mark, "ts": max(0.0, event.at) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": job.name, "command": job.command}}


def _step_bars(file: RankFile, pid: int, shift: float) -> Iterator[dict[str, Any]]:
    for record in file.steps:
        first, num = int(record.first), int(record.num_steps)
        name = f"step {first}" if num == 1 else f"steps {first} to {first + num - 1}"
        args: dict[str, Any] = {"samples": record.samples, "memory": size(record.resident_bytes)}
        if record.num_losses:
            args["loss"] = _number(record.loss / record.num_losses)
        yield _bar(name, "step", pid, _STEPS, record.begin + shift, record.end - record.begin, args)
        yield from _phase_bars(record, pid, shift)


def _phase_bars(record: StepRecord, pid: int, shift: float) -> Iterator[dict[str, Any]]:
    at = record.begin
    for phase in _ORDER:
        seconds = min(getattr(record, phase), record.end - at)
        if seconds > 0:
            bar = _bar(phase, "phase", pid, _PHASES, at + shift, seconds, {})
            yield {**bar, "cname": _COLOURS[phase]} if phase in _COLOURS else bar
            at += seconds


def _operation_bars(file: RankFile, pid: int, shift: float) -> Iterator[dict[str, Any]]:
    groups = file.facts.get("groups", ())
    for op in file.operations:
        index = int(op.group)
        args: dict[str, Any] = {"seq": int(op.seq), "bytes": int(op.num_bytes)}
        if 0 <= index < len(groups):
            args["group"] = str(groups[index].get("name", ""))
        args["status"] = STATUS_NAMES.get(int(op.status), str(op.status))
        name = f"{KIND_NAMES.get(int(op.kind), 'operation')} #{int(op.seq)}"
        begin, end = op.enter_ns / 1e9 + shift, op.leave_ns / 1e9 + shift
        yield _bar(name, "collective", pid, _COLLECTIVES, begin, max(0.0, end - begin), args)


def _bar(
    name: str, category: str, pid: int, tid: int, begin: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(max(0.0, begin) * 1e6, 3), "dur": round(seconds * 1e6, 3)}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _name(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _number(value: float) -> float | str:
    """Return `value`, or its text if it is NaN or infinite, because JSON has neither."""
    return value if abs(value) < float("inf") else str(value)
