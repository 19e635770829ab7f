"""Render the page: measurements and findings in, one HTML file out, which loads nothing from the network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from phalanx._job.report.findings import ReportFinding
from phalanx._job.report.hover import SCRIPT
from phalanx._job.report.measurements import Measurements
from phalanx._job.report.pictures import (
    bandwidth_picture,
    loss_picture,
    memory_picture,
    part_bars,
    step_picture,
    throughput_picture,
    time_line,
)
from phalanx._job.report.style import CSS
from phalanx._job.report.tables import collective_table, machine_table, memory_table, part_table
from phalanx._job.report.units import percent, seconds, three_digits

STATES = {
    "well": ("good", "ended well"),
    "ended": ("note", "ended"),
    "failed": ("bad", "failed"),
    "stopped": ("warn", "stopped"),
    "killed": ("bad", "killed"),
    "running": ("note", "still running"),
}
_WORDS = {"bad": "Failure", "warn": "Do", "note": "Note", "good": "Well"}


def render(run: Measurements, findings: Sequence[ReportFinding]) -> str:
    """Return the report of one run."""
    return document(f"{run.name}: run report", _head(run) + sections_of(run, findings), _foot())


def sections_of(run: Measurements, findings: Sequence[ReportFinding]) -> str:
    """Return the report's sections on one run, below its head."""
    sections = [
        ("What to do", _findings(findings)),
        ("Training", _grid([loss_picture(run), throughput_picture(run), step_picture(run), memory_picture(run)])),
        ("Where the time of a step goes", _parts(run)),
        ("Collectives", _collectives(run)),
        ("Memory", _memory(run)),
        ("What happened", _events(run)),
        ("What ran where", machine_table(run)),
    ]
    return titled(sections)


def document(title: str, body: str, foot: str, *, script: str = SCRIPT, asks_server: bool = False) -> str:
    """Return a whole page with a script, which may contact only the page's server, and only if `asks_server`."""
    allowed = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    if asks_server:
        allowed += "; connect-src 'self'"
    script = f"<script>{script}</script>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n"
        f"<body><main>{body}<footer>{foot}</footer></main>{script}</body></html>\n"
    )


def _foot() -> str:
    return (
        "Point at a curve for its values; drag across it for a part of it, and click twice for all of it again. "
        "Means leave out the first steps. Times are the ranks' own clocks; work that a GPU does later counts where the "
        "program waits for it. Beside this page: <code>trace.json</code> for ui.perfetto.dev, "
        "<code>report.json</code> with all numbers. Several runs side by side: "
        "<code>phalanx report DIR DIR</code>."
    )


def titled(sections: Sequence[tuple[str, str]]) -> str:
    """Return sections below their titles; empty ones are left out."""
    return "".join(f"<section><h2>{escape(title)}</h2>{body}</section>" for title, body in sections if body)


def _head(run: Measurements) -> str:
    style, word = STATES[run.end]
    when = time.strftime("%A, %d %B %Y, %H:%M", time.localtime(run.begun_unix))
    hosts = len({rank.host for rank in run.last_attempt}) or 1
    ranks = f"{run.world_size} rank{'s' * (run.world_size != 1)}"
    where = f"{ranks} on {hosts} hosts" if hosts > 1 else ranks
    said = f"<p>{escape(run.end_text)}</p>" if run.end_text and run.end != "well" else ""
    command = f"<p class=small><code>{escape(run.command)}</code></p>" if run.command else ""
    return (
        f"<header><h1>{escape(run.name)}</h1><p class=faint>{escape(when)} · {where} · {seconds(run.duration_s)}</p>"
        f"{command}<div><span class='state {style}'>{word}</span></div>{said}{_tiles(run)}</header>"
    )


def _tiles(run: Measurements) -> str:
    ranks = [rank for rank in run.last_attempt if rank.step_s > 0]
    tiles = [("steps", f"{run.steps:,}")]
    if run.step_s:
        tiles.append(("a step", seconds(run.step_s)))
    if run.samples_per_s:
        tiles.append(("samples a second", three_digits(run.samples_per_s)))
    if ranks:
        computing = [sum(r.parts[p] for p in ("forward", "backward", "update")) / r.step_s for r in ranks]
        tiles.append(("computing", percent(sum(computing) / len(computing))))
    if run.final_loss is not None:
        tiles.append(("last loss", three_digits(run.final_loss)))
    return (
        f"<dl class=tiles>{''.join(f'<div class=tile><dt>{k}</dt><dd>{escape(v)}</dd></div>' for k, v in tiles)}</dl>"
    )


def _findings(findings: Sequence[ReportFinding]) -> str:
    items = "".join(
        f"<li class={one.severity}><strong>{_WORDS[one.severity]}</strong> <span>{code(one.text)}</span></li>"
        for one in findings
    )
    return f"<ul class=findings>{items}</ul>" if items else ""


def code(text: str) -> str:
    """Return `text` escaped, with backquoted parts as code."""
    parts = escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _grid(figures: Sequence[str]) -> str:
    shown = "".join(figure for figure in figures if figure)
    return f"<div class=grid>{shown}</div>" if shown else ""


def _parts(run: Measurements) -> str:
    bars = part_bars(run)
    return f"{bars}<details><summary>As numbers</summary>{part_table(run)}</details>" if bars else ""


def _collectives(run: Measurements) -> str:
    if not run.collectives:
        return ""
    picture, numbers = bandwidth_picture(run), collective_table(run)
    return f"<div class=pair>{picture}<div>{numbers}</div></div>" if picture else numbers


def _memory(run: Measurements) -> str:
    return memory_table(run) if run.last_attempt and run.steps else ""


def _events(run: Measurements) -> str:
    lanes = time_line(run)
    rows = "".join(
        f"<tr><td>{seconds(event.at)}</td><td class=text>{escape(event.kind)}</td>"
        f"<td>{'' if event.rank is None else event.rank}</td><td class=text>{code(event.text)}"
        f"{_detail(event.detail)}</td></tr>"
        for event in run.events
    )
    table = (
        f"<div class=wide><table><thead><tr><th>at</th><th class=text>what</th><th>rank</th><th class=text></th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div>"
        if rows
        else ""
    )
    return lanes + table


def _detail(text: str) -> str:
    return f"<details><summary>Traceback</summary><pre>{escape(text)}</pre></details>" if text else ""
