"""`Proposer` proposes configs for the leader: who votes, and who would take over.

    hosts of the generation ──► standbys follow the journal ──► a config that all hosts vote on
    a host is lost ──► a config without it ──accepted──► the others continue

`Primary` and `Candidate` are the protocol. This module sends their messages, repeats them until they are answered, and
appoints the standbys. Nothing here blocks.

The leader proposes no change before a majority has answered the current config: otherwise a leader that can still send,
but no longer receives, would remove its possible successors. If a standby has asked for votes in a later term, and was
not elected, the leader is elected again, in a still later term.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from phalanx._base.ipc.wakeup import Mailbox
from phalanx._job.coordinator.standby_replicas import StandbyReplicas
from phalanx._job.hosts.control_channel import ControlChannel
from phalanx._job.hosts.succession.candidate import Candidate
from phalanx._job.hosts.succession.config import Config, Stamp, Term
from phalanx._job.hosts.succession.message import config_to_json, reply_from_json
from phalanx._job.hosts.succession.primary import Primary
from phalanx._job.hosts.succession.voter import ConfigAccepted, Reply, Voter
from phalanx._job.hosts.succession.witness.calls import WitnessCalls
from phalanx._job.hosts.succession.witness.witness import WITNESS

FEWEST_VOTERS = 3  # with two voters, the other one is no majority without the first host
_MOST_STANDBYS = 2
_NOTHING: Stamp = ((0, -1), -1)  # before every config
_RESTORE_S = 5.0  # the time until a host that delayed answers may be a standby again
_AGAIN_S = 0.3  # the time until a proposal is resent to the voters that have not answered
_LONGEST_PAUSE_S = 0.3  # the maximum pause before the leader asks for votes again, so that other candidates have a turn
_NO_STANDBY: frozenset[bytes] = frozenset([b"nobody"])  # no standby has this ticket: all answers are delayed


class Proposer:
    """`Proposer` is the leader's side of the protocol.

    Arguments:
        replicas: the standby copies of this host's coordinator.
        witness: one more voter, which `close` closes.
        primary, voter: the state of an elected host; by default this host leads first, as the only voter.
    """

    def __init__(
        self,
        channel: ControlChannel,
        replicas: StandbyReplicas,
        witness: WitnessCalls | None = None,
        primary: Primary | None = None,
        voter: Voter | None = None,
    ) -> None:
        self._channel = channel
        self._replicas = replicas
        self._primary = primary or Primary(Config.begin(channel.member))
        self._voter = voter or Voter(channel.member)
        self._witness = witness
        # in the order of candidacy, once `set_voters` has been called
        self._wanted_voters: tuple[int, ...] = tuple(sorted(self._primary.committed.newest_voters))
        self._tickets: dict[int, bytes] = {}  # of the hosts that were asked to become standbys
        self._addresses: dict[int, str] = {}  # the polling places of the standbys that have the whole state
        self._stalled: Mailbox[bytes] = Mailbox()
        self._proposed_at = 0.0
        self._accepted: dict[int, Stamp] = {}  # voter -> the newest config that the voter is known to have accepted
        self._present: set[int] | None = (
            None  # the voters that have answered since a change was requested; None: no change is requested
        )
        self._candidate: Candidate | None = None  # while this leader is a candidate again
        self.candidate_since: float | None = None
        self._candidacy_at = 0.0  # when this leader asks for votes in the next term
        self._announced: tuple[int, ...] = ()  # what `pop_standbys` returned last
        self._restore_standby_at: float | None = None  # when a late standby is appointed again
        self.due: float | None = None
        self._is_handed_over = self._is_released = False
        replicas.leader = channel.member
        replicas.on_stalled = self._stalled.put

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll before `receive`."""
        return (self._stalled.fileno(), *(() if self._witness is None else (self._witness.fileno(),)))

    @property
    def is_deposed(self) -> bool:
        """Return whether another host was elected, or may have been: a voter has accepted that host's first config."""
        return self._candidate is not None and not self._candidate.is_eligible

    def pop_standbys(self) -> tuple[int, ...] | None:
        """Return the standbys, in the order in which they would lead; None if they are the same as in the last call.

        A change counts once every host has accepted it: before that, some hosts do not know the candidates.
        """
        config = self._primary.committed
        if not config.standbys and not config.is_joint:
            self._announced = ()  # the same successors are reported again, once they can take over again
        if not self.has_standbys or config.standbys == self._announced:
            return None
        self._announced = config.standbys
        return config.standbys

    @property
    def has_standbys(self) -> bool:
        """Return whether another host takes over if this host is lost, and all hosts know the candidates."""
        config, is_elected = self._primary.committed, self._candidate is None
        return is_elected and not config.is_joint and bool(config.standbys) and not self._find_behind(config)

    @property
    def polling_places(self) -> tuple[str, ...]:
        """Return the addresses at which the standbys publish the result of an election."""
        return tuple(address for _, address in self._primary.committed.addresses)

    def has_left(self, member: int) -> bool:
        """Return whether this host has no vote: it never had one, or a majority has agreed to continue without it."""
        return member not in self._primary.committed.newest_voters

    def describe_lack(self) -> str:
        """Describe which voters are missing for a majority."""
        electorate = self._primary.newest.electorates[0]
        voters, needed = electorate.voters, electorate.fewest_with(self._channel.member)
        replied = self._primary.accepted_by if self._candidate is None else self._candidate.promised_by
        others = frozenset() if self.is_deposed else replied | (self._present or set())
        agreed = voters & (others | {self._channel.member})
        hosts = f"{len(agreed - {WITNESS})} of the {len(voters - {WITNESS})} hosts that were in the job together"
        if WITNESS not in voters:
            return f"{hosts} ({needed} are needed)"
        return f"{hosts}, and {'the' if WITNESS in agreed else 'not the'} witness ({needed} of these are needed)"

    def set_voters(self, members: Collection[int]) -> None:
        """Set the voters, which include this host, and appoint some of them as standbys."""
        is_witnessed = self._witness is not None and len(members) > 1
        self._wanted_voters = (*members, *((WITNESS,) if is_witnessed else ()))
        for member in set(self._tickets) - set(members):
            self._forget(member)
        others = [member for member in members if member != self._channel.member]
        for member in others[: self._num_standbys]:
            if member not in self._tickets:
                self._tickets[member] = os.urandom(16)
                term = list(self._primary.committed.term)
                witness = None if self._witness is None else self._witness.witness.to_json()
                self._channel.put(
                    member, "become standby", ticket=self._tickets[member].hex(), term=term, witness=witness
                )
        self._advance()

    @property
    def _num_standbys(self) -> int:
        return min((len(self._wanted_voters) - 1) // 2, _MOST_STANDBYS)

    def on_standby(self, member: int, ticket: str, address: str) -> None:
        """Record that a standby has the whole state, and that its polling place is at `address`."""
        if self._tickets.get(member) == bytes.fromhex(ticket):
            self._addresses[member] = address
            self._advance()

    def process(self, member: int, body: Mapping[str, Any]) -> None:
        """Process a host's reply to a proposal.

        Raises:
            KeyError, TypeError, ValueError: the reply is invalid.
        """
        reply = reply_from_json(body)
        if reply.voter == member:
            self._count(reply)
            self._advance()

    def _count(self, reply: Reply) -> None:
        if isinstance(reply, ConfigAccepted):
            self._accepted[reply.voter] = max((reply.term, reply.version), self._accepted.get(reply.voter, _NOTHING))
            if self._present is not None and reply.term == self._primary.committed.term:
                self._present.add(reply.voter)
        if self._candidate is not None:
            self._candidate = self._candidate.on_reply(reply)
        else:
            self._primary = self._primary.on_reply(reply)

    def receive(self) -> list[str]:
        """Remove standbys that delay answers, and repeat unanswered messages; return lines for the user."""
        notices = []
        for reply in () if self._witness is None else self._witness.receive():
            if isinstance(reply, str):
                notices.append(reply)
            else:
                self._count(reply)
        for ticket in self._stalled.receive_all():
            for member in [member for member, known in self._tickets.items() if known == ticket]:
                self._forget(member)
                self._restore_standby_at = time.monotonic() + _RESTORE_S
        if self._restore_standby_at is not None and time.monotonic() >= self._restore_standby_at:
            self._restore_standby_at = None
            self.set_voters([member for member in self._wanted_voters if member != WITNESS])
        self._advance()
        return notices

    def _forget(self, member: int) -> None:
        self._tickets.pop(member)
        self._addresses.pop(member, None)

    def _advance(self) -> None:
        now = time.monotonic()
        if self._is_released:
            self._replicas.required, self.due = frozenset(), None
            return
        if self._primary.deposed_by is not None and self._candidate is None:
            self._become_candidate(self._primary.deposed_by, now)
        if self._candidate is not None:
            self._advance_candidate(self._candidate, now)
        while self._candidate is None and self._primary.proposed is None and self._propose():
            pass
        required = self._primary.required_standbys - {self._channel.member}
        tickets = frozenset(self._tickets.get(member, b"gone") for member in required)
        self._replicas.required = tickets if self._candidate is None else _NO_STANDBY
        self._replicas.confirmed_members = self._primary.committed.voters | self._primary.newest.voters
        asked = self._find_unanswered()
        if asked and now >= self._proposed_at + _AGAIN_S:
            self._proposed_at = now
            self._ask(asked)
        self.due = self._proposed_at + _AGAIN_S if asked else self._restore_standby_at

    def _find_unanswered(self) -> list[int]:
        """Return the voters that have not answered the current request."""
        others = sorted(self._primary.newest.voters - {self._channel.member})
        if self._candidate is not None:
            replied = self._candidate.promised_by if self._candidate.proposed is None else self._candidate.accepted_by
            return [member for member in sorted(self._candidate.electors) if member not in replied]
        if self._primary.proposed is None and self._present is not None:
            return [member for member in others if member not in self._present]
        return self._find_behind(self._primary.newest)

    def _ask(self, members: Collection[int]) -> None:
        candidate = self._candidate
        asked = self._primary.newest if candidate is None else candidate.proposed or candidate.term
        for member in members:
            if member == WITNESS and self._witness is not None:
                self._witness.ask(asked)
            elif isinstance(asked, Config):
                self._channel.put_datagram(member, kind="propose", config=config_to_json(asked))
            else:
                self._channel.put_datagram(member, kind="solicit", term=list(asked))

    # The leader is elected again.

    def _become_candidate(self, refused_by: Term, now: float) -> None:
        """Ask for votes in a term after `refused_by`."""
        self.candidate_since = self.candidate_since or now
        known = self._voter.newest
        assert known is not None  # it has accepted its own proposal
        term = max(refused_by, self._voter.promised)[0] + 1, self._channel.member
        self._voter, reply = self._voter.solicit(term)
        self._candidate = Candidate(term, known).on_reply(reply)
        self._proposed_at = 0.0
        self._candidacy_at = now + random.uniform(0, _LONGEST_PAUSE_S)

    def _advance_candidate(self, candidate: Candidate, now: float) -> None:
        if candidate.refused_by is not None and now >= self._candidacy_at:
            self._become_candidate(candidate.refused_by, now)
        elif candidate.proposed is not None and self._channel.member not in candidate.accepted_by:
            self._voter, reply = self._voter.propose(candidate.proposed)
            self._candidate = candidate.on_reply(reply)
            self._proposed_at = 0.0
        elif candidate.elected is not None:
            self._primary, self._candidate, self.candidate_since = candidate.elected, None, None
            self._tickets, self._addresses = {}, {}  # these standbys follow a leader of an earlier term
            self._announced, self._restore_standby_at = (), now

    def _find_behind(self, config: Config) -> list[int]:
        """Return the other voters that are not known to have accepted a config."""
        others = config.voters - {self._channel.member}
        return [member for member in sorted(others) if self._accepted.get(member, _NOTHING) < config.stamp]

    def _propose(self) -> bool:
        """Propose the next config on the way to the requested voters; return False if nothing is proposed."""
        primary, committed = self._primary, self._primary.committed
        if committed.is_joint:
            changed = primary.finish()
        else:
            able = [member for member in self._wanted_voters if member in self._addresses][: self._num_standbys]
            if frozenset(self._wanted_voters) == committed.newest_voters and tuple(able) == committed.standbys:
                self._present = None
                return False
            if not self._is_answered(committed):
                return False
            changed = primary.change(self._wanted_voters, tuple(able))
        assert changed.proposed is not None
        addresses = tuple((member, self._addresses.get(member, "")) for member in changed.proposed.standbys)
        proposed = replace(changed.proposed, addresses=addresses)
        required = replace(changed, proposed=proposed).required_standbys - {self._channel.member}
        self._replicas.required = frozenset(self._tickets.get(member, b"gone") for member in required)
        self._voter, reply = self._voter.propose(proposed)
        self._primary = replace(changed, proposed=proposed).on_reply(reply)
        self._proposed_at = 0.0
        return True

    def _is_answered(self, committed: Config) -> bool:
        """Return whether a majority has answered since a change was requested; request answers for a new change."""
        if self._present is None:
            self._present, self._proposed_at = {self._channel.member}, 0.0
        if not committed.is_decided_by(self._present):
            return False
        self._present = None
        return True

    def release(self) -> None:
        """Stop the votes, and stop delaying answers, because the other hosts have finished and none will lead."""
        self._is_released = True
        self._advance()

    def hand_over(self) -> None:
        """Keep delaying answers to unreplicated changes, even after `close`: a standby will take over."""
        self._is_handed_over = True

    def close(self) -> None:
        """Close the descriptors, and stop delaying answers, except after `hand_over`."""
        if not self._is_handed_over:
            self._replicas.required = frozenset()
        self._replicas.on_stalled = lambda ticket: None
        if self._witness is not None:
            self._witness.close()
        self._stalled.close()
