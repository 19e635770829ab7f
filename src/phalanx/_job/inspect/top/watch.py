"""Sample a job repeatedly, on all its hosts."""

from __future__ import annotations

import os
import time
from collections import deque

from phalanx._job.inspect.stacks.job_snapshot import ask_others
from phalanx._job.inspect.stacks.jobs import RunningJob, find_jobs
from phalanx._job.inspect.top.look import COMMAND, HostSnapshot, from_json, read_host
from phalanx._job.inspect.top.memory import MemoryReader
from phalanx._job.inspect.top.times import LONGEST_NS, HostPid, OperationTimes, add, measure, processor_times
from phalanx._job.inspect.top.view import JobView, view

_OTHERS_TIMEOUT_S = 10.0  # longer than the first host's agent waits for the others
_ENOUGH_NS = 1_000_000_000
_MIN_MORE_SAMPLES, _MAX_MORE_SAMPLES, _PAUSE_S = 3, 8, 0.1


class JobWatch:
    """A `JobWatch` samples one job.

    Times and shares cover the last ten seconds; with `since_previous`, the time since the previous sample.
    """

    def __init__(self, job: RunningJob, *, since_previous: bool = False) -> None:
        self.job = job
        self._since_previous = since_previous
        self._memory = MemoryReader()
        self._measured: deque[tuple[int, OperationTimes]] = deque()
        self._processor_times: dict[HostPid, int] = {}  # at the previous sample
        self._attempt = (0, 0)

    def sample(self) -> JobView:
        """Return the job's current state.

        Raises:
            LaunchError: the job has ended, or does not answer.
        """
        here = read_host(self.job, self._memory)
        hosts = [here]
        notes: list[str] = []
        if here.num_nodes > 1:
            others, notes = _read_other_hosts(self.job, here.num_nodes - 1)
            hosts += others
        attempt = (here.restart_count, here.started_ns)
        if attempt != self._attempt:
            self._attempt = attempt
            self._measured.clear()
            self._processor_times = {}
        since_ns = self._measured[-1][0] if self._measured else 0
        longest_ns = LONGEST_NS
        if self._since_previous and since_ns:
            longest_ns = here.at_ns - since_ns
            self._measured.clear()
        self._measured.append((here.at_ns, measure(hosts, since_ns, self._processor_times, longest_ns)))
        self._processor_times = processor_times(hosts)
        while self._measured[0][0] < here.at_ns - LONGEST_NS:
            self._measured.popleft()
        return view(hosts, add(measured for _, measured in self._measured), notes)

    def sample_once(self) -> JobView:
        """Return the state after several samples: CPU times are differences, and recorders may cover only a moment."""
        seen = self.sample()
        for number in range(_MAX_MORE_SAMPLES):
            is_long = seen.span_s * 1e9 >= _ENOUGH_NS and number >= _MIN_MORE_SAMPLES
            if is_long or not any(rank.operation for rank in seen.ranks):
                break
            time.sleep(_PAUSE_S)
            seen = self.sample()
        return seen

    def has_ended(self) -> bool:
        """Return whether the job's command has ended."""
        return self.job not in find_jobs(COMMAND) or not os.path.exists(f"/proc/{self.job.pid}")


def _read_other_hosts(job: RunningJob, num_others: int) -> tuple[list[HostSnapshot], list[str]]:
    """Return snapshots of the other hosts, through the first host's agent, and notes on missing hosts."""
    answers = ask_others(job.name, _OTHERS_TIMEOUT_S, what="top")
    if not answers:
        plural = "s" * (num_others > 1)
        shown = f"Ranks of {num_others} other host{plural} are shown on the host that leads the job"
        return [], [f"{shown}, usually the first."]
    hosts, notes = [], []
    for host in answers:
        try:
            seen = from_json(host.text, host.name, round(host.offset_s * 1e9))
        except (ValueError, KeyError, TypeError):
            seen = host.text if host.text == "does not answer" else "runs another version of Phalanx"
        if isinstance(seen, str):
            notes.append(f"{host.name}: {seen}")
        else:
            hosts.append(seen)
    return hosts, notes
