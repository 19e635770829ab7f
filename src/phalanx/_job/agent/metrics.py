"""Serve the job's metrics to Prometheus: `phalanx run --metrics :9400`."""

from __future__ import annotations

import os

from phalanx._job.inspect.http_server import HTTPServer, Page
from phalanx._job.inspect.stacks.jobs import find_jobs
from phalanx._job.inspect.top.prometheus import CONTENT_TYPE, as_prometheus
from phalanx._job.inspect.top.watch import JobWatch
from phalanx.errors import LaunchError

TOKEN_VARIABLE = "PHALANX_METRICS_TOKEN"
_COMMAND = "phalanx run --metrics"


class Metrics:
    """`Metrics` serves the data that `phalanx top` shows of this agent's job, at /metrics.

    A thread queries the agent through its socket, as `phalanx top` does; the ranks have no work with it.

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
            self._watch = JobWatch(job)
        return Page(CONTENT_TYPE, as_prometheus(self._watch.sample()).encode())

    def close(self) -> None:
        self._server.close()
