"""A `HostLink` is an attempt's link to the job's other hosts.

HostLink       there are none                              here
LeaderLink     this is the first host, which decides       `phalanx._job.hosts.leader`
FollowerLink   another host, which follows orders          `phalanx._job.hosts.follower`
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

    An attempt gets its deciders from its link, reports the events of this host's ranks to it, and lets the link act on
    the ranks of other hosts as the attempt acts on its own.
    """

    def __init__(
        self, plan: JobPlan, place: Place | None = None, member: int = 0, first: BeginGeneration | None = None
    ) -> None:
        """Create the link of a host whose ranks have the numbers of `place`.

        `member` is the host's name in a generation, and `first` the first generation of its ranks in an elastic job, if
        they join later than others.
        """
        self._plan = plan
        self.place = place or Place.alone(plan.num_ranks)
        self.member = member
        self.first = first

    def attach(self, attempt: Attempt) -> None:
        """Attach the link to its attempt, before the ranks are started."""

    def make_supervision(self) -> Supervision:
        """Return the object that decides about the ranks."""
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
        """Return the descriptors to poll; when one is ready, `receive` is called."""
        return ()

    @property
    def due(self) -> float | None:
        """Return when to call `receive` although no descriptor is ready; None if there is no need."""
        return None

    def receive(self, ready: set[int]) -> None:
        """Handle the descriptors that are ready, in each turn of the loop."""

    def create_store(self) -> tuple[int | None, str]:
        """Return a descriptor, which the caller owns, of the store where the ranks meet, and PHALANX_STORE's value."""
        store = create_store()
        return store, "" if store is None else f"/proc/{os.getpid()}/fd/{store}"

    def on_started(self, rank: int, pid: int) -> None:
        """Note that the process of a rank of this host exists."""

    def on_rank_message(self, rank: int, pid: int, message: dict[str, Any]) -> None:
        """Pass on a message of an elastic rank, which this host has processed."""

    def send_to_rank(self, rank: int, message: dict[str, Any]) -> bool:
        """Send a message to an elastic rank if it is on another host; return whether it is."""
        return False

    def send_generation(self, rank: int) -> bool:
        """Notify an elastic rank on another host of its rank; return whether it is on another host."""
        return False

    def begin_generation(self, begun: BeginGeneration) -> None:
        """Have the other hosts do their parts of a generation; this host does its own next."""

    def do(self, action: PrepareHost | DropHost) -> None:
        """Take in a host, or send it away."""

    def on_given_up(self) -> None:
        """Record that an elastic job fails because of its losses."""

    def send_signal(self, signum: int, ranks: tuple[int, ...], *, group: bool, is_relayed: bool = False) -> None:
        """Send a signal to those of `ranks` that are on other hosts."""

    def intercept_signal(self, signum: int) -> bool:
        """Take a signal that has come at this host and would end the job; return whether nothing else is to be done."""
        return False

    @property
    def is_leaving(self) -> bool:
        """Return whether an elastic job continues without this host's ranks; the host leads until they have ended."""
        return False

    def remind(self, rank: int, message: dict[str, Any]) -> None:
        """Answer a rank of this host that speaks while this host is leaving."""

    @property
    def has_left(self) -> bool:
        """Return whether this host has left the job, which another host now leads."""
        return False

    def sweep(self) -> None:
        """Kill every process of the job on other hosts."""

    @property
    def is_swept(self) -> bool:
        """Return whether no process of the job is left on any other host."""
        return True

    def request_stacks(self, request: ClientRequest) -> None:
        """Answer a request for the stacks of ranks on other hosts; the link takes over the request."""
        answer_others(request.channel, [])
        request.close()

    def merge_logs(self, logs: list[GroupLog]) -> list[GroupLog]:
        """Add the records of other hosts' ranks to `logs`, which has this host's."""
        return logs

    @property
    def ended_ns(self) -> dict[int, int]:
        """Return when processes of other hosts ended, by process number, on CLOCK_MONOTONIC of this host."""
        return {}

    def name_host(self, rank: int) -> str:
        return socket.gethostname()

    def begin(self) -> None:
        """Note that the attempt begins."""

    def end(self, attempt: Attempt) -> None:
        """Note that no process of the attempt is left."""

    def close(self) -> None:
        """Release the link's sockets and files."""
