"""A `HostLink` is an attempt's link to the job's other hosts.

HostLink       the job has no other host                   here
LeaderLink     this is the first host, which decides       `phalanx._job.hosts.leader`
FollowerLink   another host, which executes the decisions  `phalanx._job.hosts.follower`
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from phalanx._comm.diagnostics.observer import GroupLog
from phalanx._job.agent.elastic import Elastic
from phalanx._job.agent.elastic_actions import BeginGeneration, DropHost, PrepareHost
from phalanx._job.agent.environment import Place
from phalanx._job.agent.generation import HostSlots, SlotPlan
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.scratch import create_store
from phalanx._job.agent.supervision import Supervision
from phalanx._job.inspect.agent_socket import ClientRequest
from phalanx._job.inspect.stacks.job_snapshot import answer_others

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt


class HostLink:
    """A `HostLink` is the link of a job on one host. The links of a job on several hosts derive from it.

    An attempt gets its `Supervision` and its `Elastic` from the link, and reports the events of this host's ranks to
    the link. The link has the other hosts execute the same actions.
    """

    def __init__(
        self, plan: JobPlan, place: Place | None = None, member: int = 0, first: BeginGeneration | None = None
    ) -> None:
        """Create the link of a host with the ranks of `place`.

        `member` identifies the host in a generation. `first` is the first generation of the host's ranks if they join
        an elastic job later than others.
        """
        self._plan = plan
        self.place = place or Place.alone(plan.num_ranks)
        self.member = member
        self.first = first

    def attach(self, attempt: Attempt) -> None:
        """Attach the link to its attempt, before the ranks are started."""

    def make_supervision(self) -> Supervision:
        """Return the object that decides when to stop the ranks."""
        settings, is_alone = self._plan.settings, self.place.num_nodes == 1
        return Supervision(
            self.place.world_size, settings.shutdown_timeout_s, settings.exit_timeout_s, is_alone=is_alone
        )

    def make_elastic(self) -> Elastic:
        """Return the object that decides how the job continues when an elastic rank is lost."""
        return Elastic(SlotPlan.begin([self.own_slots()]), self._plan.settings.max_restarts)

    def own_slots(self) -> HostSlots:
        place = self.place
        return HostSlots(self.member, place.first_rank, place.num_ranks, frozenset(place.ranks))

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll before `receive`."""
        return ()

    @property
    def due(self) -> float | None:
        """Return when to call `receive` even if no descriptor is ready; None for never."""
        return None

    def receive(self, ready: set[int]) -> None:
        """Receive from the ready descriptors; called in each turn of the loop."""

    def create_store(self) -> tuple[int | None, str]:
        """Create the store for the ranks' rendezvous; return its descriptor, which the caller owns, and its address."""
        store = create_store()
        return store, "" if store is None else f"/proc/{os.getpid()}/fd/{store}"

    def on_started(self, rank: int, pid: int) -> None:
        """Report the start of a rank of this host."""

    def on_rank_message(self, rank: int, pid: int, message: dict[str, Any]) -> None:
        """Forward a message from an elastic rank, which this host has already processed."""

    def send_to_rank(self, rank: int, message: dict[str, Any]) -> bool:
        """Send a message to an elastic rank on another host; return whether the rank is on another host."""
        return False

    def send_generation(self, rank: int) -> bool:
        """Send the current generation to a rank on another host; return whether the rank is on another host."""
        return False

    def begin_generation(self, begun: BeginGeneration) -> None:
        """Begin a generation on the other hosts; this host begins it next."""

    def do(self, action: PrepareHost | DropHost) -> None:
        """Accept or reject a host."""

    def on_given_up(self) -> None:
        """Report that an elastic job fails because of its losses."""

    def send_signal(self, signum: int, ranks: tuple[int, ...], *, group: bool, is_relayed: bool = False) -> None:
        """Send a signal to each rank of `ranks` that is on another host."""

    def intercept_signal(self, signum: int) -> bool:
        """Process a signal to this host that would end the job; return whether the attempt should ignore the signal."""
        return False

    @property
    def is_leaving(self) -> bool:
        """Return whether an elastic job continues without this host, which leads it until its own ranks have exited."""
        return False

    def remind(self, rank: int, message: dict[str, Any]) -> None:
        """Answer a message from a rank of this host while the host is leaving."""

    @property
    def has_left(self) -> bool:
        """Return whether this host has left the job, which another host now leads."""
        return False

    def sweep(self) -> None:
        """Kill every process of the job on other hosts."""

    @property
    def is_swept(self) -> bool:
        """Return whether every process of the job on other hosts has exited."""
        return True

    def request_stacks(self, request: ClientRequest) -> None:
        """Answer a request for the stacks of ranks on other hosts, and close the request."""
        answer_others(request.channel, [])
        request.close()

    def merge_logs(self, logs: list[GroupLog]) -> list[GroupLog]:
        """Return `logs`, the flight records of this host's ranks, merged with those of ranks on other hosts."""
        return logs

    @property
    def ended_ns(self) -> dict[int, int]:
        """Return when processes of other hosts exited, by pid, in nanoseconds of this host's CLOCK_MONOTONIC."""
        return {}

    def name_host(self, rank: int) -> str:
        return socket.gethostname()

    def begin(self) -> None:
        """Record that the attempt begins."""

    def end(self, attempt: Attempt) -> None:
        """Record that every process of the attempt has exited."""

    def close(self) -> None:
        """Release the link's sockets and files."""
