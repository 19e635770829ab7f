"""Serve the page of a running job: the data of `phalanx top` since the first viewer, and the report so far.

browser ── GET /      ──► the page, whose script polls
        ── GET /now   ──► its current contents
        ── GET /json  ──► the same as `phalanx top --json`
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from html import escape

from phalanx._job.inspect.http_server import Page, Pages
from phalanx._job.inspect.top.as_json import as_json
from phalanx._job.inspect.top.table import describe_now, summary
from phalanx._job.inspect.top.view import SHARES, JobView, RankView, left_s
from phalanx._job.inspect.top.watch import JobWatch
from phalanx._job.report.axes import linear
from phalanx._job.report.charts import Line, line_chart
from phalanx._job.report.findings import find
from phalanx._job.report.page import document, sections_of, titled
from phalanx._job.report.pictures import figure, seconds_mark, time_axis
from phalanx._job.report.units import percent, seconds, size, three_digits
from phalanx._job.report.write import measure_so_far

_HTML = "text/html; charset=utf-8"
_AGAIN_S = 1.0  # the job is sampled at most once in this time, and no sample shown is older
_REPORT_EVERY_S = 5.0  # reading all of the ranks' files takes longer than a sample
_MOST_POINTS = 600
_MOST_RANKS = 64  # with more ranks, the ranks that wait least are shown
_COLOURS = {
    "computing": "forward",
    "idle": "other",
    "computing_or_idle": "faint",
    "waiting": "waiting",
    "communicating": "communication",
}
_SCRIPT = """
const shown = document.getElementById("now"), said = document.getElementById("said");
async function again() {
  let pause = 2000;
  try {
    const answer = await fetch("now" + location.search, {cache: "no-store"});
    const text = await answer.text();
    if (answer.ok) {
      const open = [...shown.querySelectorAll("details")].map(one => one.open);
      shown.innerHTML = text;
      shown.querySelectorAll("details").forEach((one, number) => { one.open = Boolean(open[number]); });
      said.textContent = "";
    } else { said.textContent = text; }
  } catch (error) { said.textContent = "phalanx top does not answer: it or the job has ended."; pause = 10000; }
  setTimeout(again, pause);
}
setTimeout(again, 2000);
"""


class LivePage:
    """A `LivePage` serves one job. It samples the job on request, at most once a second, for any number of viewers."""

    def __init__(self, watch: JobWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch = watch
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: JobView | None = None
        self._sampled_at = 0.0
        self._began_at = clock()  # not the job's own start, which changes when the job restarts
        # seconds since `_began_at`, and samples or steps a second
        self._paces: deque[tuple[float, float]] = deque(maxlen=_MOST_POINTS)
        self._memory: deque[tuple[float, float]] = deque(maxlen=_MOST_POINTS)  # and the memory of all ranks in bytes
        self._report, self._reported_at = "", 0.0

    @property
    def pages(self) -> Pages:
        return {"/": self._page, "/now": self._now, "/json": self._json}

    def _page(self) -> Page:
        job = self._sample()
        body = f"<p id=said class=bad></p><div id=now>{self._show(job)}</div>"
        foot = (
            "Shares and rates cover the last ten seconds; curves begin when the page was first opened. The page "
            "updates every two seconds."
        )
        return Page(_HTML, _encode(document(f"{_name(job)}: running", body, foot, script=_SCRIPT, asks_server=True)))

    def _now(self) -> Page:
        return Page(_HTML, _encode(self._show(self._sample())))

    def _json(self) -> Page:
        return Page("application/json", _encode(as_json(self._sample())))

    def _sample(self) -> JobView:
        with self._lock:
            now = self._clock()
            if self._latest is None or now - self._sampled_at >= _AGAIN_S:
                job = self._watch.sample()
                self._latest, self._sampled_at = job, now
                if (pace := _rate(job)) is not None:
                    self._paces.append((now - self._began_at, pace))
                if total := sum(rank.memory_bytes or 0 for rank in job.ranks):
                    self._memory.append((now - self._began_at, float(total)))
            return self._latest

    def _show(self, job: JobView) -> str:
        with self._lock:
            curves = [_pace_picture(job, tuple(self._paces)), _memory_picture(tuple(self._memory))]
        grid = f"<div class=grid>{''.join(curves)}</div>" if any(curves) else ""
        return _head(job) + titled([("Now", grid), ("Ranks", _ranks(job))]) + self._report_of(job)

    def _report_of(self, job: JobView) -> str:
        """Return the report's sections so far; "" if the job's ranks do not record for a report."""
        if not job.report:
            return ""
        with self._lock:
            now = self._clock()
            if not self._report or now - self._reported_at >= _REPORT_EVERY_S:
                try:
                    run = measure_so_far(job.report)
                    self._report, self._reported_at = sections_of(run, find(run)), now
                except (OSError, ValueError) as error:  # nothing is written yet, or the folder was removed
                    return f"<p class=faint>The report in {escape(job.report)} cannot be read: {escape(str(error))}</p>"
            return self._report


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _name(job: JobView) -> str:
    return job.target.rpartition("/")[2]


def _rate(job: JobView) -> float | None:
    if job.pace is None:
        return None
    return job.pace.steps_per_s if job.pace.samples_per_s is None else job.pace.samples_per_s


def _head(job: JobView) -> str:
    style, word = ("bad", "stuck") if job.stuck is not None else ("note", "running" if job.ranks else "no rank runs")
    hosts = f" on {job.num_hosts} hosts" if job.num_hosts > 1 else ""
    first, *others = [escape(line.plain) for line in summary(job)]
    lines = "".join(f"<p>{line}</p>" for line in others)
    return (
        f"<header><h1>{escape(_name(job))}</h1><p class=faint>{len(job.ranks)} of {job.world_size} ranks{hosts}</p>"
        f"<div><span class='state {style}'>{word}</span></div><p class=small>{first}</p>{lines}{_tiles(job)}</header>"
    )


def _tiles(job: JobView) -> str:
    tiles = [("running for", seconds(job.elapsed_s))]
    if job.pace is not None:
        tiles.append(("steps", f"{job.pace.step:,}"))
        if job.pace.steps_per_s is not None:
            tiles.append(("steps a second", three_digits(job.pace.steps_per_s)))
        if job.pace.samples_per_s is not None:
            tiles.append(("samples a second", three_digits(job.pace.samples_per_s)))
        if (left := left_s(job.pace)) is not None:
            tiles.append(("left", seconds(left)))
    if job.lost:
        tiles.append(("ranks lost", f"{len(job.lost)}"))
    return f"<dl class=tiles>{''.join(f'<div class=tile><dt>{k}</dt><dd>{v}</dd></div>' for k, v in tiles)}</dl>"


def _pace_picture(job: JobView, points: Sequence[tuple[float, float]]) -> str:
    if len(points) < 3:
        return ""
    unit = "samples" if job.pace is not None and job.pace.samples_per_s is not None else "steps"
    return _curve("Throughput", points, f"{unit} a second", f"{unit.capitalize()} of all ranks together.")


def _memory_picture(points: Sequence[tuple[float, float]]) -> str:
    if len(points) < 3:
        return ""
    factor, unit = (2**30, "GiB") if max(value for _, value in points) >= 2**30 else (2**20, "MiB")
    shown = [(at, value / factor) for at, value in points]
    return _curve("Memory", shown, unit, "All ranks together; shared pages count once if the system reports PSS.")


def _curve(title: str, points: Sequence[tuple[float, float]], unit: str, caption: str) -> str:
    x, y = time_axis([at for at, _ in points]), linear([value for _, value in points], from_zero=True)
    line = [Line(points, "var(--c1)")]
    picture = line_chart(f"{title} by time", line, x, y, x_name="time", y_name=unit, x_text=seconds_mark)
    return figure(picture, title, caption)


def _ranks(job: JobView) -> str:
    if not job.ranks:
        return ""
    ranks: Sequence[RankView] = job.ranks
    left_out = ""
    if len(ranks) > _MOST_RANKS:
        least_waiting = sorted(ranks, key=lambda rank: 2.0 if rank.waiting is None else rank.waiting)
        ranks = sorted(least_waiting[:_MOST_RANKS], key=lambda rank: rank.rank)
        left_out = f"<p class=faint>Shown are the {_MOST_RANKS} of {len(job.ranks)} ranks that wait least.</p>"
    several = job.num_hosts > 1
    drawn = [name for name in SHARES if any(getattr(rank, name) is not None for rank in ranks)]
    legend = "".join(f"<li><i style='background:var(--{_COLOURS[n]})'></i>{_in_words(n)}</li>" for n in drawn)
    head = "".join(f"<th{kind}>{name}</th>" for name, kind in _columns(several))
    rows = "".join(f"<tr>{_row(job, rank, several)}</tr>" for rank in ranks)
    return (
        f"<ul class=legend>{legend}</ul><div class=wide><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
        f"</table></div>{left_out}"
    )


def _in_words(share: str) -> str:
    return share.replace("_", " ")


def _columns(several_hosts: bool) -> list[tuple[str, str]]:
    host = [("host", " class=text")] if several_hosts else []
    return [("rank", ""), *host, ("step", ""), ("its time", " class=text"), ("memory", ""), ("now", " class=text")]


def _row(job: JobView, rank: RankView, several_hosts: bool) -> str:
    pieces = "".join(
        f"<i style='width:{100 * share:.1f}%;background:var(--{_COLOURS[name]})' "
        f"title='{_in_words(name)}: {percent(share)}'></i>"
        for name in SHARES
        if (share := getattr(rank, name)) is not None
    )
    cells = [
        f"<td>{rank.rank}</td>",
        f"<td class=text>{escape(rank.host)}</td>" if several_hosts else "",
        f"<td>{'' if rank.pace is None else f'{rank.pace.step:,}'}</td>",
        f"<td class=text><div class=bar style='width:160px'>{pieces}</div></td>",
        f"<td>{'' if rank.memory_bytes is None else size(rank.memory_bytes)}</td>",
        f"<td class=text>{escape(describe_now(job, rank))}</td>",
    ]
    return "".join(cells)
