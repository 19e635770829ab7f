"""`LeadGuard` prevents two leaders: a majority agrees before the leader continues without a host.

Without standbys no host could take over, and no vote is needed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from phalanx._job.coordinator.followers import Followers
from phalanx._job.hosts.control_channel import ControlChannel, ControlMessage
from phalanx._job.hosts.succession.succession import FEWEST_VOTERS, Succession
from phalanx._job.hosts.succession.witness.calls import WitnessCalls
from phalanx._job.hosts.succession.witness.witness import Witness
from phalanx.errors import LaunchError, PhalanxError

_FEWEST_S = 3.0  # the least time to agree, however short the hosts' timeout is


class LeadGuard:
    """`LeadGuard` holds the leader's succession, once there is one, and lost hosts that are not agreed on.

    Arguments:
        followers: this host's coordinator's; None: the job ends with its first host.
        witness: the job's witness, if it has one.
        succession: the succession of an elected host.
    """

    def __init__(
        self,
        channel: ControlChannel,
        followers: Followers | None,
        host_timeout_s: float = 0.0,
        witness: Witness | None = None,
        succession: Succession | None = None,
    ) -> None:
        self._channel = channel
        self._followers = followers
        self._limit_s = max(_FEWEST_S, 2 * host_timeout_s)
        self._witness = witness
        self._succession = succession
        self._lost: dict[int, tuple[str, float]] = {}  # why, and since when

    @property
    def is_begun(self) -> bool:
        """Return whether another host may take over."""
        return self._succession is not None

    def begin(self, num_hosts: int) -> None:
        """Begin with the succession of an elastic job, once its hosts are enough for that."""
        num_voters = num_hosts + (self._witness is not None)
        if self._succession is None and self._followers is not None and num_voters >= FEWEST_VOTERS:
            calls = None if self._witness is None else WitnessCalls(self._witness, is_new=True)
            self._succession = Succession(self._channel, self._followers, calls)

    def want(self, voters: Sequence[int]) -> None:
        """Let the hosts of a generation vote, after they were notified of it. They would lead in this order."""
        self.begin(len(voters))
        if self._succession is not None:
            members = [member for member in voters if member not in self._lost]
            own = self._channel.member  # a leaving host has no ranks, but a vote as long as it leads
            self._succession.want(members if own in members else [own, *members])

    def want_again(self, voters: Sequence[int], is_alone: bool) -> None:
        """Have these hosts vote from now on, if another one may take over: ranks have finished, or a host is lost.

        If this host `is_alone` with ranks that have not finished, none may: those that are left could be no majority.
        """
        if self._succession is not None and is_alone:
            self._succession.release()
        elif self._succession is not None:
            self.want(voters)

    @property
    def has_standbys(self) -> bool:
        """Return whether another host takes over when this one is lost."""
        return self._succession is not None and self._succession.has_standbys

    def may_go_on_with(self, num_others: int) -> bool:
        """Return whether one of `num_others` other hosts could lead them."""
        return 1 + num_others + (self._witness is not None) >= FEWEST_VOTERS and num_others > 0

    def hand_over(self) -> None:
        """Grant nothing any more that the standbys don't have, to the end: another host is to lead."""
        if self._succession is not None:
            self._succession.hand_over()

    def defer(self, member: int, why: str, voters: Sequence[int]) -> bool:
        """Ask the voters whether to continue without a host; False if there are none."""
        if self._succession is None or self._succession.has_left(member):
            return False
        if member not in self._lost:
            self._lost[member] = why, time.monotonic()
            self.want(voters)
        return True

    def take_agreed(self) -> list[tuple[int, str]]:
        """Return the hosts whose removal was agreed on since the last call.

        Raises:
            LaunchError: a majority has not agreed in time, or has agreed on another leader.
        """
        succession = self._succession
        if succession is None:
            return []
        agreed = [(member, why) for member, (why, _) in self._lost.items() if succession.has_left(member)]
        for member, _ in agreed:
            del self._lost[member]
        if succession.is_deposed or any(time.monotonic() > limit for limit in self._limits):
            why = "have agreed on another leader" if succession.is_deposed else "may have agreed on another leader"
            raise LaunchError(
                f"phalanx run: this host leads the job, and does not go on: it hears {succession.describe_lack()}, and "
                f"the others {why}. Its ranks are ended, so that no two halves train. Read the output of the other "
                "hosts; if none of them goes on, start again from the last checkpoint."
            )
        return agreed

    @property
    def fds(self) -> tuple[int, ...]:
        """Return descriptors that are readable when `receive` has something to do."""
        return () if self._succession is None else self._succession.fds

    @property
    def due(self) -> float | None:
        """Return when to look again although nothing has come."""
        times = [*self._limits, None if self._succession is None else self._succession.due]
        return min((at for at in times if at is not None), default=None)

    @property
    def _limits(self) -> list[float]:
        """Return until when a majority has to agree, to each thing that it is asked about."""
        stands_since = None if self._succession is None else self._succession.stands_since
        return [
            *(at + self._limit_s for _, at in self._lost.values()),
            *(() if stands_since is None else (stands_since + self._limit_s,)),
        ]

    def take_standbys(self) -> tuple[int, ...] | None:
        """Return who takes over if this host is lost, if that has changed since the last call."""
        return None if self._succession is None else self._succession.take_standbys()

    @property
    def polling_places(self) -> tuple[str, ...]:
        """Return the addresses at which hosts learn the leader if this one is lost; none without standbys."""
        return () if self._succession is None else self._succession.polling_places

    def receive(self) -> list[str]:
        """Repeat unanswered messages, and remove standbys that delay the others; return lines for the user."""
        return [] if self._succession is None else self._succession.receive()

    def hear(self, message: ControlMessage) -> None:
        """Process a host's message on the succession.

        Raises:
            KeyError, TypeError, ValueError: the message is invalid.
        """
        if self._succession is None:
            return
        if message.kind == "stands by":
            self._succession.on_standby(message.member, str(message.body["ticket"]), str(message.body["address"]))
        else:
            self._succession.hear(message.member, message.body)

    def close(self) -> None:
        """Hold nothing back any more."""
        if self._succession is not None:
            self._succession.close()

    def forget(self) -> None:
        """Have the witness forget the job, which is over on all hosts; after `close`."""
        if self._succession is not None and self._witness is not None:
            with contextlib.suppress(PhalanxError, OSError):  # it keeps some hundred bytes
                self._witness.forget()
            self._witness.close()
