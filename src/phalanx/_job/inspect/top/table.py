"""Draw the view as lines: a summary, and a table with a row for each rank, cut to the size of the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from phalanx._comm.diagnostics.printable import printable
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.inspect.top.view import COUNTED, ROUNDS, JobView, RankView, left_s

_FOLDER = re.compile(r"\([^()]*/")
_LAST_WIDTH = 16  # the minimum width of the last column; other columns are dropped for it
_WHY = 100  # the maximum number of characters shown of a reason
_MOSTLY = 0.5  # a rank must be idle for this share of the time to be shown as idle
_LONG_S = 1.0  # shorter operations are shown without their duration

_STATES = {
    "T": "stopped (SIGSTOP or Ctrl-Z)",
    "t": "stopped by a debugger",
    "D": "in a system call that cannot be interrupted (a disk?)",
    "Z": "ended",
    "X": "ended",
    "": "ended",
}


@dataclass(frozen=True)
class _Column:
    """A `_Column` shows a rank's `text`. If space is short, columns are dropped by descending `leaves`; 0: never."""

    title: str
    text: Callable[[RankView], str]
    leaves: int = 0


_COLUMNS = (
    _Column("rank", lambda rank: str(rank.rank)),
    _Column("pid", lambda rank: str(rank.pid), 5),
    _Column("step", lambda rank: f"{rank.pace.step:,}" if rank.pace is not None else ""),
    _Column("samples/s", lambda rank: _number(rank.pace.samples_per_s) if rank.pace is not None else "", 3),
    _Column("comp", lambda rank: _computing(rank), 1),
    _Column("idle", lambda rank: _percent(rank.idle), 1),
    _Column("wait", lambda rank: _percent(rank.waiting)),
    _Column("comm", lambda rank: _percent(rank.communicating), 2),
    _Column("memory", lambda rank: _memory(rank), 4),
)


def summary(job: JobView) -> list[Text]:
    """Return the lines above the table."""
    lines = [Text(_describe_job(job), style="bold")]
    if job.pace is not None:
        lines.append(Text(_describe_pace(job)))
    elif job.ranks:
        lines.append(Text("steps: unknown (nothing uses phalanx.progress, phalanx.elastic.State or phalanx's DDP)"))
    if job.restart_count or job.max_restarts or job.generation:
        lines.append(Text(f"restarts {job.restart_count} of {job.max_restarts}, generation {job.generation}"))
    if job.lost:
        last = job.lost[-1]
        why = last.why if len(last.why) <= _WHY else f"{last.why[:_WHY]}…"
        lines.append(
            Text(
                f"lost so far: {len(job.lost)} rank{'s' * (len(job.lost) != 1)}, the last one rank {last.rank} (pid "
                f"{last.pid}), {_clock(last.ago_s)} ago: {why}"
            )
        )
    if job.stuck is not None:
        lines.append(Text(_describe_stuck(job), style="bold red"))
    elif job.slowest is not None:
        slow = job.slowest
        where = f" on {slow.host}" if job.num_hosts > 1 else ""
        lines.append(
            Text(
                f"slowest: rank {slow.rank}{where}, last to {slow.times_last} of {slow.num_operations} operations; "
                f"the others wait for it alone {_percent(slow.share)} of the time",
                style="yellow",
            )
        )
    failed = [f"rank {rank} (exit code {code})" for rank, code in job.ended]
    if failed:
        shown = ", ".join(failed[:4]) + (f" and {len(failed) - 4} more" if len(failed) > 4 else "")
        lines.append(Text(f"ended: {shown}"))
    if job.ranks and all(rank.waiting is None for rank in job.ranks):
        lines.append(Text("times: unknown (no group with the phalanx backend has run an operation yet)"))
    if any(rank.memory_bytes is not None and not rank.memory_is_pss for rank in job.ranks):
        lines.append(Text("memory with *: resident, with shared pages counted in full (PSS is not available)"))
    lines += [Text(note) for note in job.notes]
    return lines


def table(job: JobView, width: int | None, *, slowest_first: bool = False) -> tuple[Text, list[Text]]:
    """Return the heading and the rows: one for each rank, and above them one for each host if there are several.

    No line is wider than `width`; columns that are empty for every rank are left out.
    """
    ranks = sorted(job.ranks, key=_least_waiting) if slowest_first else job.ranks
    cells = [[column.text(rank) for column in _COLUMNS] for rank in ranks]
    kept = [i for i in range(len(_COLUMNS)) if i == 0 or any(row[i] for row in cells)]
    widths = {i: max([len(_COLUMNS[i].title), *(len(row[i]) for row in cells)]) for i in kept}
    while width is not None and sum(widths.values()) + 2 * len(widths) + _LAST_WIDTH > width:
        able = [i for i in widths if _COLUMNS[i].leaves]
        if not able:
            break
        del widths[max(able, key=lambda i: _COLUMNS[i].leaves)]
    heading = "  ".join([*(_COLUMNS[i].title.rjust(widths[i]) for i in widths), "now"])
    rows: list[Text] = []
    grouped = job.num_hosts > 1 and not slowest_first
    for number, (rank, row) in enumerate(zip(ranks, cells, strict=True)):
        if grouped and (number == 0 or ranks[number - 1].node != rank.node):
            rows.append(_fit(Text(_describe_host(job, rank), style="cyan"), width))
        line = Text(
            "  ".join([*(row[i].rjust(widths[i]) for i in widths), describe_now(job, rank)]), style=_style(job, rank)
        )
        rows.append(_fit(line, width))
    return _fit(Text(heading, style="bold"), width), rows


def page(
    job: JobView, width: int, height: int, *, offset: int = 0, slowest_first: bool = False
) -> tuple[list[Text], int]:
    """Return the lines for a screen of this size, and the number of the first row that is shown.

    The lines are the summary, as many rows as fit (from `offset` on, or the last rows), and the keys.
    """
    above = [part for line in summary(job) for part in _wrap(line, width)]
    if len(above) > height // 2:  # the ranks need room, too
        above = [_fit(line, width) for line in summary(job)][: max(1, height // 2)]
    heading, rows = table(job, width, slowest_first=slowest_first)
    room = max(1, height - len(above) - 3)  # a blank line, the heading, the last line
    offset = max(0, min(offset, len(rows) - room))
    shown = rows[offset : offset + room]
    keys = "q: quit   s: order by " + ("rank" if slowest_first else "least waiting")
    if len(rows) > len(shown):
        keys += f"   arrows, PgUp, PgDn: lines {offset + 1}-{offset + len(shown)} of {len(rows)}"
    lines = [*above, Text(), heading, *shown]
    lines = lines[: max(1, height - 1)]
    return [*lines, _fit(Text(keys, style="dim"), width)], offset


def all_lines(job: JobView, width: int | None) -> list[Text]:
    """Return the summary and all rows, without paging."""
    above = [part for line in summary(job) for part in _wrap(line, width)]
    if not job.ranks:
        return above
    heading, rows = table(job, width)
    return [*above, Text(), heading, *rows]


def _fit(text: Text, width: int | None) -> Text:
    text.plain = printable(text.plain)
    if width is not None:
        text.truncate(width)
    text.no_wrap = True
    return text


def _wrap(text: Text, width: int | None) -> list[Text]:
    """Wrap a sentence to `width`; return its lines."""
    text.plain = printable(text.plain)
    if width is None or len(text.plain) <= width:
        return [text]
    return [_fit(Text(line, style=text.style), width) for line in textwrap.wrap(text.plain, max(10, width))]


def _describe_job(job: JobView) -> str:
    where = f" on {job.num_hosts} hosts" if job.num_hosts > 1 else ""
    target = _without_folder(job.target)
    if not job.ranks:
        return f"Job {job.pid}: {target}, no rank is running{where}: it is starting, or ending"
    ranks = f"{len(job.ranks)} of {job.world_size} ranks running{where}"
    return f"Job {job.pid}: {target}, {ranks}, for {_clock(job.elapsed_s)}"


def _describe_pace(job: JobView) -> str:
    assert job.pace is not None
    pace = job.pace
    parts = [f"step {pace.step:,}" + (f" of {pace.total_steps:,}" if pace.total_steps else "")]
    if pace.steps_per_s is not None:
        parts.append(f"{_number(pace.steps_per_s)} steps/s")
    if pace.samples_per_s is not None:
        parts.append(f"{_number(pace.samples_per_s)} samples/s")
    left = left_s(pace)
    if left is not None:
        parts.append(f"{_clock(left)} left" + (" in this loop" if pace.steps_of == COUNTED else ""))
    return ", ".join(parts) + (" (rounds of gradients)" if pace.steps_of == ROUNDS else "")


def _describe_stuck(job: JobView) -> str:
    assert job.stuck is not None
    stuck = job.stuck
    missing = name_ranks(stuck.missing) if stuck.missing else ""
    if stuck.num_unknown:
        more = f"{stuck.num_unknown} rank{'s' * (stuck.num_unknown > 1)} on other hosts"
        missing = f"{missing} and {more}" if missing else more
    many = len(stuck.inside) != 1
    operation = _without_folder(stuck.operation)
    return (
        f"{name_ranks(stuck.inside)} wait{'' if many else 's'} in {operation} for {stuck.waited_s:.1f} s; "
        f"{missing or 'others'} {'has' if len(stuck.missing) + stuck.num_unknown == 1 else 'have'} not reached it"
    )


def _describe_host(job: JobView, first: RankView) -> str:
    here = [rank for rank in job.ranks if rank.node == first.node]
    memory = sum(rank.memory_bytes or 0 for rank in here)
    return f"{first.host}: {name_ranks([rank.rank for rank in here])}, {_bytes(memory)}"


def describe_now(job: JobView, rank: RankView) -> str:
    """Return what a rank is doing now."""
    if rank.state in _STATES:
        return _STATES[rank.state]
    if rank.inside_s is None:
        if job.stuck is not None and rank.rank in job.stuck.missing and rank.operation:
            return f"after {_without_folder(rank.operation)}"
        if rank.idle is not None and rank.idle > _MOSTLY:
            return "idle (its DataLoader, a disk, a device?)"
        if not rank.operation:
            return ""
        return "computing" if rank.idle is not None else "computing or idle"
    return _without_folder(rank.operation) + (f" for {rank.inside_s:.1f} s" if rank.inside_s >= _LONG_S else "")


def _style(job: JobView, rank: RankView) -> str:
    if rank.state in _STATES or (job.stuck is not None and rank.rank in job.stuck.missing):
        return "red"
    return "yellow" if job.slowest is not None and job.slowest.rank == rank.rank else ""


def _least_waiting(rank: RankView) -> tuple[float, int]:
    return (rank.waiting if rank.waiting is not None else 2.0), rank.rank


def _without_folder(text: str) -> str:
    """Return `all_reduce #3 (/data/train.py:88)` and `/data/train.py` without the folders."""
    return _FOLDER.sub("(", text) if "(" in text else text.rpartition("/")[2]


def _computing(rank: RankView) -> str:
    return _percent(rank.computing) if rank.computing_or_idle is None else f"≤{_percent(rank.computing_or_idle)}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _memory(rank: RankView) -> str:
    if rank.memory_bytes is None:
        return ""
    return _bytes(rank.memory_bytes) + ("" if rank.memory_is_pss else "*")


def _bytes(value: int) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def as_text(lines: Sequence[Text]) -> str:
    """Return the lines as text without colours."""
    return "\n".join(line.plain.rstrip() for line in lines)
