"""Write the numbers behind the pictures as tables, for readers without the pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from phalanx._comm.diagnostics.rank_list import format_ranks
from phalanx._job.report.measurements import PARTS, Measurements, RankRun
from phalanx._job.report.units import percent, rate, seconds, size, three_digits

_MAX_ROWS = 16
_WAITS = 0.3  # share of a step from which the reason for waiting is shown


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = ()) -> str:
    """Return a table; the columns in `text` are left-aligned."""

    def mark(i: int) -> str:
        return " class=text" if i in text else ""

    heads = "".join(f"<th{mark(i)}>{escape(name)}</th>" for i, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{mark(i)}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<div class=wide><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


def part_table(run: Measurements) -> str:
    """Return the time of a step by rank and part."""
    rows = [
        [f"rank {r.rank}", seconds(r.step_s), *(f"{seconds(r.parts[p])}" for p in PARTS), seconds(r.longest_s)]
        for r in run.last_attempt
        if r.step_s
    ]
    return table(["", "step", *PARTS, "longest step"], rows)


def collective_table(run: Measurements) -> str:
    """Return the collectives by kind and size, the costliest first."""
    rows = [
        [
            row.name.replace("_", " "),
            size(row.num_bytes) if row.num_bytes else "",
            str(row.num_ranks),
            f"{row.count:,.0f}",
            seconds(row.waiting_s),
            seconds(row.duration_s),
            rate(row.bandwidth) if row.bandwidth else "*" if row.overlapped else "",
        ]
        for row in run.collectives[:_MAX_ROWS]
    ]
    left = len(run.collectives) - len(rows)
    notes = ["Waiting: the mean time of a rank until the last rank enters. Moving: the median time from then on."]
    if left > 0:
        notes.append(f"{left} more kinds and sizes, which cost less, are in report.json.")
    if any(row.overlapped for row in run.collectives[:_MAX_ROWS]):
        notes.append("* Gradients are exchanged during the backward; the time is the rest after it.")
    if run.copy_bytes_per_s:
        limits = ", ".join(f"{rate(value)} on {host}" for host, value in sorted(run.copy_bytes_per_s.items()))
        notes.append(f"One core copies {limits} (measured after the run).")
    head = ["", "size", "ranks", "calls", "waiting", "moving", "bandwidth"]
    return table(head, rows) + "".join(f"<p class='small faint'>{escape(note)}</p>" for note in notes)


def memory_table(run: Measurements) -> str:
    """Return the memory by rank."""
    has_device = any(rank.device_bytes for rank in run.last_attempt)
    rows = [
        [
            f"rank {rank.rank}",
            size(rank.resident_bytes) if rank.resident_bytes else "",  # 0 if no step was recorded
            size(rank.shared_bytes) if rank.resident_bytes else "",
            size(max(rank.peak_bytes, rank.resident_bytes)),
            *([size(rank.device_bytes)] if has_device else []),
        ]
        for rank in run.last_attempt
    ]
    return table(["", "at the end", "of it shared", "at most", *(["on the device"] if has_device else [])], rows)


def machine_table(run: Measurements) -> str:
    """Return hosts, versions, and which rank ran on which cores."""
    if not run.ranks:
        return ""
    hosts = []
    for host in dict.fromkeys(rank.host for rank in run.ranks):
        here = [rank for rank in run.last_attempt if rank.host == host] or [r for r in run.ranks if r.host == host]
        facts = here[0].facts
        devices = ", ".join(sorted({str(rank.facts["device"]) for rank in here if rank.facts.get("device")}))
        hosts.append(
            [
                host,
                ", ".join(str(rank.rank) for rank in here),
                f"{facts.get('processor', '')}, {facts.get('cores', '?')} cores, {size(facts.get('memory_bytes', 0))}"
                + (f"; {devices}" if devices else ""),
                f"{facts.get('system', '')}, Python {facts.get('python', '')}, torch {facts.get('torch', '-')}, "
                f"phalanx {facts.get('phalanx', '')}" + (f", backend {facts['backend']}" if "backend" in facts else ""),
            ]
        )
    ranks = [
        [
            f"rank {rank.rank}",
            rank.host,
            str(rank.pid),
            format_ranks((int(cpu) for cpu in rank.facts.get("cpus", ())), separator=", "),
            str(rank.facts.get("threads", "")),
            "" if rank.num_workers is None else str(rank.num_workers),
            "" if rank.cpu_share is None else _on_a_core(rank, rank.cpu_share),
            "" if rank.preemptions_per_s is None else three_digits(rank.preemptions_per_s),
        ]
        for rank in run.last_attempt
    ]
    head = ["", "host", "process", "cores", "threads", "loader workers", "on a core", "preempted a second"]
    return (
        table(["host", "ranks", "machine", "software"], hosts, text=(1, 2, 3)) + "<br>" + table(head, ranks, text=(1,))
    )


def _on_a_core(rank: RankRun, share: float) -> str:
    """Return the share of the rank's time in which it used a core; if the rank waits much, also the reason."""
    if rank.step_s <= 0:
        return percent(share)
    waits = {
        "for other ranks": rank.parts["waiting"] + rank.parts["communication"],
        "for data": rank.parts["data"],
    }
    whom = max(waits, key=lambda what: waits[what])
    waited = waits[whom] / rank.step_s
    return f"{percent(share)}, as it waits {whom} {percent(waited)}" if waited > _WAITS else percent(share)
