"""Answer requests at the agent's socket: ranks share their flight records, and commands request snapshots."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from phalanx._base.processes import read_state
from phalanx._comm.diagnostics.progress_page import KIND as PROGRESS_PAGE
from phalanx._comm.diagnostics.report_request import KIND as REPORT
from phalanx._job.inspect.agent_socket import AgentSocket, ClientRequest
from phalanx._job.inspect.stacks.job_snapshot import JobSnapshot, answer

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt

# requests that need the token, which only ranks and their children have
_ONLY_FROM_RANKS = ("group", PROGRESS_PAGE, "elastic", "store", REPORT)
_MAX_EARLY = 256  # maximum number of connections of processes that the zygote has not reported yet


class Requests:
    """`Requests` answers requests at the agent's socket during one attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._early: list[ClientRequest] = []
        self._started_ns = time.monotonic_ns()

    @property
    def _socket(self) -> AgentSocket:
        return self._attempt.host.agent_socket

    def receive(self, ready: set[int]) -> None:
        """Answer the requests on the ready descriptors."""
        for fd in self._socket.fds:
            if fd not in ready:
                continue
            request = self._socket.read(fd)
            if request is not None:
                self._answer(request)
            for notice in self._socket.take_notices():
                self._attempt.host.display.print(f"phalanx run: {notice}")

    def _answer(self, request: ClientRequest) -> None:
        attempt = self._attempt
        kind = request.message.get("kind")
        if kind in _ONLY_FROM_RANKS and not self._socket.has_token(request):
            request.close()
        elif kind == "group":
            request.channel.close()
            attempt.flights.add(request.message, request.fds, attempt.ranks.processes.lost_ns)
        elif kind == PROGRESS_PAGE:
            attempt.pages.add(request.channel.peer.pid, request.fds)
            request.channel.close()
        elif kind == REPORT:
            attempt.report_folder = attempt.report_folder or str(request.message.get("folder", ""))
            request.close()
        elif kind == "elastic":
            self._accept(request)
        elif kind == "stacks of other hosts":
            attempt.link.request_stacks(request)
        else:
            if kind == "store" and attempt.numbers.store is not None:
                with contextlib.suppress(OSError):  # no descriptor is free
                    request.channel.put({}, [attempt.numbers.store])
            elif kind == "snapshot":
                self._answer_snapshot(request)
            request.close()

    def _accept(self, request: ClientRequest) -> None:
        """Accept the connection of an elastic rank.

        The kernel identifies the process, because a rank's children have the token, too.
        """
        attempt, zygote = self._attempt, self._attempt.host.zygote
        pid = request.channel.peer.pid
        rank = attempt.ranks.rank_of(pid)
        if rank is None and attempt.ranks.awaits_start:
            self._early.append(request)  # the zygote may report the process soon
            if len(self._early) > _MAX_EARLY:
                self._early.pop(0).close()
            return
        if rank is None:
            self._refuse(request, pid)
            return
        for fd in request.fds:
            os.close(fd)
        zygote.continue_without(rank)
        zygote.warm_up()
        welcome = {"kind": "welcome", "generation": attempt.numbers.generation}
        attempt.links.accept(request.channel, rank, pid, welcome)
        attempt.on_rank_message(rank, pid, request.message)

    def accept_early(self) -> None:
        """Process the connections that arrived before the zygote reported their process."""
        early, self._early = self._early, []
        for request in early:
            self._accept(request)

    def _refuse(self, request: ClientRequest, pid: int) -> None:
        """Refuse a process that is not a rank, such as a child in `phalanx run --no-python bash train.sh`."""
        why = f"phalanx.elastic works only in a process that phalanx run has started itself, unlike pid {pid}"
        request.channel.put({"kind": "refused", "why": why})
        request.close()
        lost = self._attempt.ranks.processes.lost_ns
        if pid not in lost and read_state(pid) not in ("", "Z"):  # otherwise it may be a rank that has just exited
            self._socket.notice("no rank", f"{why}. Without it, the job fails when a rank is lost")

    def _answer_snapshot(self, request: ClientRequest) -> None:
        """Answer with the pids of this host's running ranks, and their stacks, flight records and progress pages."""
        attempt = self._attempt
        processes, settings, place = attempt.ranks.processes, attempt.plan.settings, attempt.numbers.part.place
        living = [rank for rank in attempt.state.running if rank in processes.pids]
        observed = attempt.flights.observed
        pages = attempt.pages.fds_of([processes.pids[rank] for rank in living])
        with_stacks = bool(request.message.get("stacks", True))
        snapshot = JobSnapshot(
            os.getpid(),
            settings.target.name,
            attempt.state.world_size,
            attempt.host.zygote.pid,
            tuple((rank, processes.pids[rank]) for rank in living),
            tuple(observer.group_info for observer in observed),
            place.node,
            place.num_nodes,
            tuple(pages),
            with_stacks,
            tuple((rank, end.status) for rank, end in sorted(attempt.state.exits.items())),
            attempt.restart_count,
            settings.max_restarts or 0,
            attempt.numbers.generation,
            self._started_ns,
            tuple((lost.rank, lost.pid, int(lost.at * 1e9), lost.why) for lost in attempt.elastic.losses),
            attempt.report_folder,
        )
        stacks = [processes.stacks[rank] for rank in living] if with_stacks else []
        answer(request.channel, snapshot, stacks, [observer.control for observer in observed], list(pages.values()))

    def close(self) -> None:
        """Close the connections that were not accepted."""
        for request in self._early:
            request.close()
        self._early.clear()
