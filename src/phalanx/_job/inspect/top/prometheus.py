"""Serve the job's metrics in the text format of Prometheus, which OpenTelemetry collectors also read.

`phalanx run --metrics :9400` starts the server.

Source: the text exposition format, version 0.0.4.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx._job.inspect.http_server import HTTPServer, Page
from phalanx._job.inspect.stacks.jobs import find_jobs
from phalanx._job.inspect.top.view import SHARES, JobView, RankView, left_s
from phalanx._job.inspect.top.watch import JobWatch
from phalanx.errors import LaunchError

TOKEN_VARIABLE = "PHALANX_METRICS_TOKEN"
_COMMAND = "phalanx run --metrics"


class Metrics:
    """`Metrics` serves, at /metrics, the data that `phalanx top` shows of this agent's job.

    A thread queries the agent through its socket, as `phalanx top` does; the ranks do no work for it.

    Raises:
        LaunchError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self._watch: JobWatch | None = None
        shown = f"{host}:{port}"
        try:
            self._server = HTTPServer(host, port, {"/metrics": self._make}, token=token)
        except ValueError as error:
            raise LaunchError(
                f"phalanx run: --metrics {shown}: {error}. Set {TOKEN_VARIABLE} to a secret that the scraper sends "
                "(Authorization: Bearer ...), or give only a port, which only this host reaches.",
                exit_code=2,
            ) from None
        except OSError as error:
            raise LaunchError(f"phalanx run: --metrics {shown}: {error.strerror or error}", exit_code=2) from None

    @property
    def address(self) -> str:
        """Return the URL to scrape."""
        return f"{self._server.address}/metrics"

    def _make(self) -> Page:
        if self._watch is None:
            job = next((job for job in find_jobs(_COMMAND) if job.pid == os.getpid()), None)
            if job is None:
                raise LaunchError(f"{_COMMAND}: not supported on this system: the agent has no socket")
            self._watch = JobWatch(job, since_previous=True)
        return Page(CONTENT_TYPE, as_prometheus(self._watch.sample()).encode())

    def close(self) -> None:
        self._server.close()


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class _Metric:
    name: str
    kind: str
    help: str
    points: tuple[tuple[dict[str, str], float | None], ...]


def as_prometheus(job: JobView) -> str:
    """Return the contents of `phalanx top` as metrics, without unknown values."""
    lines: list[str] = []
    for metric in _metrics(job):
        points = [(labels, value) for labels, value in metric.points if value is not None]
        if points:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            lines += [f"{metric.name}{_format_labels(labels)} {float(value)!r}" for labels, value in points]
    return "\n".join(lines) + "\n"


def _metrics(job: JobView) -> Iterator[_Metric]:
    pace, stuck = job.pace, job.stuck
    for name, kind, text, value in (
        ("world_size", "gauge", "Ranks of the job.", job.world_size),
        ("ranks_running", "gauge", "Running ranks.", len(job.ranks)),
        ("hosts", "gauge", "Hosts of the job.", job.num_hosts),
        ("elapsed_seconds", "gauge", "Time since the start of this attempt.", job.elapsed_s),
        ("restarts_total", "counter", "How often all ranks were restarted.", job.restart_count),
        ("ranks_lost_total", "counter", "Ranks that an elastic job has lost.", len(job.lost)),
        ("generation", "gauge", "How often an elastic job has formed a new group.", job.generation),
        ("step", "gauge", "Steps that all ranks have completed.", pace.step if pace else None),
        ("steps_wanted", "gauge", "Steps of the current loop.", pace.total_steps if pace else None),
        ("steps_per_second", "gauge", "Steps a second, over the last ten seconds.", pace.steps_per_s if pace else None),
        ("samples_per_second", "gauge", "Samples a second of all ranks.", pace.samples_per_s if pace else None),
        ("left_seconds", "gauge", "Time to the end of the loop at this pace.", left_s(pace)),
        ("stuck_seconds", "gauge", "How long ranks have waited for a stuck rank; 0 if none wait.",
         stuck.waited_s if stuck is not None else 0.0),
        ("stuck_ranks_missing", "gauge", "Ranks that have not reached the operation in which others wait.",
         len(stuck.missing) if stuck is not None else 0),
    ):  # fmt: skip
        yield _Metric(f"phalanx_{name}", kind, text, (({}, value),))
    if job.slowest is not None:
        slowest = {"rank": str(job.slowest.rank), "host": job.slowest.host}
        text = "Share of the time in which the others wait for the slowest rank alone."
        yield _Metric("phalanx_slowest_rank_wait_ratio", "gauge", text, ((slowest, job.slowest.share),))

    def of_ranks(name: str, text: str, values: list[tuple[RankView, dict[str, str], float | None]]) -> _Metric:
        points = tuple(({"rank": str(rank.rank), "host": rank.host, **labels}, value) for rank, labels, value in values)
        return _Metric(f"phalanx_rank_{name}", "gauge", text, points)

    ranks = job.ranks
    yield of_ranks("step", "Steps of a rank.", [(r, {}, r.pace.step if r.pace else None) for r in ranks])
    yield of_ranks(
        "samples_per_second", "Samples a second.", [(r, {}, r.pace.samples_per_s if r.pace else None) for r in ranks]
    )
    shares = [(r, {"part": part}, getattr(r, part)) for r in ranks for part in SHARES]
    yield of_ranks("time_ratio", "Share of a rank's recent time, by activity.", shares)
    yield of_ranks("memory_bytes", "Memory of a rank.", [(r, {}, r.memory_bytes) for r in ranks])
    yield of_ranks("inside_seconds", "How long a rank has been in its operation.", [(r, {}, r.inside_s) for r in ranks])


def _format_labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
