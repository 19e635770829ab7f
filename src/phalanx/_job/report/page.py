"""Render the page: measurements and findings in, one HTML file out, which loads nothing from the network."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from phalanx._comm.diagnostics.rank_list import format_ranks
from phalanx._job.report.findings import ReportFinding
from phalanx._job.report.measurements import PARTS, Measurements, RankRun
from phalanx._job.report.pictures import (
    bandwidth_picture,
    loss_picture,
    memory_picture,
    part_bars,
    step_picture,
    throughput_picture,
    time_line,
)
from phalanx._job.report.units import percent, rate, seconds, size, three_digits

STATES = {
    "well": ("good", "ended well"),
    "ended": ("note", "ended"),
    "failed": ("bad", "failed"),
    "stopped": ("warn", "stopped"),
    "killed": ("bad", "killed"),
    "running": ("note", "still running"),
}
_WORDS = {"bad": "Failure", "warn": "Do", "note": "Note", "good": "Well"}

# The page's style: system fonts, light and dark, one column on a phone, black on white in print.
# Colours of Okabe and Ito (2008), distinct for colour-blind readers; darker or lighter where the background needs it.
CSS = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1b2430;--faint:#5f6b7a;--rule:#dfe3e8;
--data:#e69f00;--forward:#56b4e9;--backward:#0072b2;--update:#009e73;--waiting:#d55e00;--communication:#cc79a7;
--other:#b3bac4;--on-light:#1b2430;--on-dark:#fff;--bad:#b3261e;--warn:#a05a00;--note:#41628f;--good:#0b6b4f;
--c0:#0072b2;--c1:#0072b2;--c2:#d55e00;--c3:#009e73;--c4:#a8528a;--c5:#b35900;--c6:#5b6bb5;--c7:#7a6a00;--c8:#3d8fb8}
@media(prefers-color-scheme:dark){:root{--paper:#12161c;--card:#1a2029;--ink:#e6eaf0;--faint:#9aa7b6;--rule:#2b3440;
--other:#55606e;--backward:#2f8fd0;--waiting:#e8702a;--bad:#ff8a80;--warn:#f2b155;--note:#9dbcf0;--good:#5fd3a8;
--c0:#56b4e9;--c1:#56b4e9;--c2:#ee8a4a;--c3:#35c29a;--c4:#dd92bd;--c5:#f0a34a;--c6:#97a4ea;--c7:#d4c24a;--c8:#8fd0ef}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1060px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:28px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{font-size:19px;margin:44px 0 12px;letter-spacing:-.005em}
h3{font-size:15px;margin:0 0 6px}
p{margin:6px 0;max-width:75ch}
a{color:inherit}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.faint{color:var(--faint)}
.small{font-size:14px}
.state{display:inline-block;font-weight:600;border-radius:99px;padding:2px 12px;font-size:14px;border:1.5px solid;
margin:10px 8px 0 0}
.bad{color:var(--bad)}.warn{color:var(--warn)}.note{color:var(--note)}.good{color:var(--good)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:22px 0 0;padding:0}
.tile{background:var(--card);border-radius:10px;padding:12px 16px;margin:0}
.tile dt{color:var(--faint);font-size:14px}
.tile dd{margin:0;font-size:23px;font-weight:600;line-height:1.3;white-space:nowrap}
.findings{list-style:none;margin:0;padding:0}
.findings li{padding:10px 0 10px 16px;border-left:4px solid;margin:0 0 8px;background:var(--card);
border-radius:0 10px 10px 0;padding-right:14px}
.findings span{color:var(--ink)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:24px 32px}
figure{margin:0;min-width:0;max-width:500px}
.pair{display:grid;grid-template-columns:minmax(0,400px) minmax(0,1fr);gap:16px 28px;align-items:start}
@media(max-width:900px){.pair{grid-template-columns:minmax(0,1fr)}}
figcaption{font-size:14px;color:var(--faint);margin:2px 0 0}
svg{display:block;width:100%;height:auto;font-family:inherit;font-variant-numeric:tabular-nums}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:14px;margin:0 0 12px;padding:0;list-style:none}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.bars{display:grid;grid-template-columns:auto 1fr auto;gap:6px 12px;align-items:center;font-size:14px}
.bar{display:flex;height:26px;border-radius:5px;overflow:hidden;background:var(--card)}
.bar i{display:block;font-style:normal;overflow:hidden;white-space:nowrap;text-align:center;line-height:26px;
font-size:13px;color:var(--on-light);min-width:0;container-type:inline-size}
.bar i.on-dark{color:var(--on-dark)}
.bar b{font-weight:500}
@container(max-width:38px){.bar b{display:none}}
.wide{overflow-x:auto;margin:0 -4px;padding:0 4px}
table{border-collapse:collapse;font-size:14px}
th,td{text-align:right;padding:5px 0 5px 16px;border-bottom:1px solid var(--rule);white-space:nowrap;vertical-align:top}
th{font-weight:500;color:var(--faint)}
th:first-child,td:first-child{text-align:left;padding-left:0}
td.text,th.text{text-align:left;white-space:normal}
.lanes{display:grid;grid-template-columns:auto 1fr;gap:4px 12px;align-items:center;font-size:14px}
.lane{position:relative;height:22px;background:var(--card);border-radius:4px}
.lane i{position:absolute;top:3px;bottom:3px;border-radius:3px;background:var(--c0);min-width:2px}
.lane i.start{background:var(--other)}
.lane u{position:absolute;top:-2px;bottom:-2px;width:3px;margin-left:-1px;background:var(--bad);border-radius:2px}
.scale{position:relative;height:20px;color:var(--faint);font-size:13px}
.scale span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.scale span:first-child{transform:none}.scale span:last-child{transform:translateX(-100%)}
details{margin:10px 0}
summary{cursor:pointer;color:var(--faint);font-size:14px}
pre{background:var(--card);border-radius:8px;padding:12px;overflow-x:auto;font-size:13px;line-height:1.4}
footer{margin-top:56px;color:var(--faint);font-size:14px;border-top:1px solid var(--rule);padding-top:12px}
@media(max-width:600px){svg text{font-size:15px}main{padding:20px 16px 48px}h1{font-size:23px}.tile dd{font-size:20px}
.tiles{grid-template-columns:repeat(2,1fr)}th,td{padding-left:12px}}
@media print{:root{color-scheme:light;--paper:#fff;--card:#f2f3f5;--ink:#000;--faint:#444;--rule:#ccc;--other:#b3bac4;
--backward:#0072b2;--waiting:#d55e00;--bad:#b3261e;--warn:#a05a00;--note:#41628f;--good:#0b6b4f;
--c0:#0072b2;--c1:#0072b2;--c2:#d55e00;--c3:#009e73;--c4:#a8528a;--c5:#b35900;--c6:#5b6bb5;--c7:#7a6a00;--c8:#3d8fb8}
body{font-size:11pt;-webkit-print-color-adjust:exact;print-color-adjust:exact}main{max-width:none;padding:0}.wide{overflow:visible;margin:0;padding:0}
th,td{padding-left:10px;white-space:normal}
figure,.tile,.findings li,tr,.bars{break-inside:avoid}h2{break-after:avoid}details:not([open])>*{display:none}}
"""

# The page's script shows a curve's values under the pointer, and enlarges parts. It loads nothing; without it the page
# has the same contents.
SCRIPT = """
"use strict";
(() => {
  const svgNS = "http://www.w3.org/2000/svg";
  const place = ([low, high, from, to, isLog], at) => {
    const share = (at - low) / (high - low);
    return isLog ? from * (to / from) ** share : from + (to - from) * share;
  };
  const number = value => {
    const size = Math.abs(value);
    return size >= 1e6 || (size > 0 && size < 1e-3) ? value.toExponential(2)
      : size >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  };
  const clock = s => s < 60 ? `${s.toFixed(1)} s`
    : `${Math.floor(s / 60)}:${String(Math.floor(s % 60)).padStart(2, "0")} min`;
  const add = (svg, kind, attributes) => {
    const made = svg.appendChild(document.createElementNS(svgNS, kind));
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  for (const svg of document.querySelectorAll("svg[data-scale]")) {
    const {x, y} = JSON.parse(svg.dataset.scale);
    const curves = [...svg.querySelectorAll("[data-name]")].map(line => ({
      line, all: line.getAttribute("points").split(" ").map(pair => pair.split(",").map(Number))}));
    if (!curves.length) continue;
    const dot = add(svg, "circle", {r: 4, fill: "var(--ink)", visibility: "hidden"});
    const told = add(svg, "text", {"font-size": 12, "font-weight": 600, fill: "var(--ink)", y: 26, class: "told"});
    const band = add(svg, "rect", {y: y[1], height: y[0] - y[1], fill: "var(--data)", opacity: 0.25, width: 0});
    const ends = [add(svg, "text", {"font-size": 12, fill: "var(--ink)", y: y[0] - 4, "text-anchor": "start"}),
      add(svg, "text", {"font-size": 12, fill: "var(--ink)", y: y[0] - 4, "text-anchor": "end"})];
    let shown = [x[0], x[1]], began = null;
    const toPicture = event => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      return Math.min(x[1], Math.max(x[0], at));
    };
    const unzoomed = at => shown[0] + (at - x[0]) / (x[1] - x[0]) * (shown[1] - shown[0]);
    const zoomed = at => x[0] + (at - shown[0]) / (shown[1] - shown[0]) * (x[1] - x[0]);
    const sayX = at => {
      const value = place(x, at);
      return x[5] === "time" ? clock(value) : `${x[5]} ${number(value)}`;
    };
    const draw = () => {
      for (const {line, all} of curves) {
        const inside = all.filter(([at]) => at >= shown[0] && at <= shown[1]);
        line.setAttribute("points", inside.map(([at, up]) => `${zoomed(at).toFixed(1)},${up}`).join(" "));
      }
      const isPart = shown[0] > x[0] || shown[1] < x[1];
      ends.forEach((text, i) => { text.setAttribute("x", x[i]); text.textContent = isPart ? sayX(shown[i]) : ""; });
    };
    svg.addEventListener("pointermove", event => {
      const at = toPicture(event);
      if (began !== null) {
        band.setAttribute("x", Math.min(began, at)); band.setAttribute("width", Math.abs(at - began));
      }
      const wanted = unzoomed(at), height = svg.viewBox.baseVal.height, box = svg.getBoundingClientRect();
      const up = (event.clientY - box.top) / box.height * height;
      let best = null;
      for (const {line, all} of curves) for (const point of all) {
        if (point[0] < shown[0] || point[0] > shown[1]) continue;
        const far = Math.abs(point[0] - wanted) * 1000 + Math.abs(point[1] - up);
        if (best === null || far < best.far) best = {far, point, line};
      }
      if (best === null) return;
      const cx = zoomed(best.point[0]);
      dot.setAttribute("cx", cx); dot.setAttribute("cy", best.point[1]); dot.setAttribute("visibility", "visible");
      const name = best.line.dataset.name ? `${best.line.dataset.name}: ` : "";
      told.textContent = `${name}${number(place(y, best.point[1]))} ${y[5]}, ${sayX(best.point[0])}`;
      told.setAttribute("x", x[1]); told.setAttribute("text-anchor", "end"); told.setAttribute("y", y[1] - 4);
    });
    svg.addEventListener("pointerleave", () => {
      dot.setAttribute("visibility", "hidden"); told.textContent = ""; band.setAttribute("width", 0); began = null;
    });
    svg.addEventListener("pointerdown", event => { began = toPicture(event); event.preventDefault(); });
    svg.addEventListener("pointerup", event => {
      const at = toPicture(event), from = began;
      band.setAttribute("width", 0); began = null;
      if (from === null || Math.abs(at - from) < 8) return;
      shown = [unzoomed(Math.min(from, at)), unzoomed(Math.max(from, at))];
      draw();
    });
    svg.addEventListener("dblclick", () => { shown = [x[0], x[1]]; draw(); });
  }
})();
"""


def render(run: Measurements, findings: Sequence[ReportFinding]) -> str:
    """Return the report of one run."""
    return document(f"{run.name}: run report", _head(run) + sections_of(run, findings), _foot())


def sections_of(run: Measurements, findings: Sequence[ReportFinding]) -> str:
    """Return the report's sections on one run, without the page's header."""
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
        "Point at a curve for its values; drag across it to zoom in, and double-click to zoom out. "
        "Means leave out the first steps. Times are from each rank's own clock; asynchronous GPU work counts where the "
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
        notes.append("* Gradients are exchanged during the backward; the time is the remainder after the backward.")
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
    """Return the share of the rank's time in which it used a core, with the reason if the rank waits for long."""
    if rank.step_s <= 0:
        return percent(share)
    waits = {
        "for other ranks": rank.parts["waiting"] + rank.parts["communication"],
        "for data": rank.parts["data"],
    }
    whom = max(waits, key=lambda what: waits[what])
    waited = waits[whom] / rank.step_s
    return f"{percent(share)}, as it waits {whom} {percent(waited)}" if waited > _WAITS else percent(share)
