"""`Successor` is an agent's part in the succession: its vote, its copy of the state, and the election.

    while there is a leader     vote on its proposals; a standby follows its journal, and opens a polling place
    when the leader is lost     each standby becomes a candidate, and all other agents vote at the polling places:

    voter ── its number ────────────▶ polling place of a standby (a coordinator of its own)
          ── reads ask/0, ask/1, … ── once a majority is present
          ── its replies ───────────▶ replies             │
                                                          └─ elected: its copy becomes the job's coordinator

A polling place serves only elections. A standby that is the only host to have lost the leader asks for no votes, and
continues when the leader answers again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

from phalanx._base.descriptors import wait_readable
from phalanx._base.ipc.wakeup import Mailbox
from phalanx._comm.control.address import Address
from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._comm.control.wire import MALFORMED
from phalanx._job.agent.plan import find_free_port
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.rendezvous import join_endpoint
from phalanx._job.coordinator.service import Service
from phalanx._job.coordinator.session import THIS_HOST
from phalanx._job.hosts.control_channel import ControlChannel
from phalanx._job.hosts.succession.candidate import Candidate
from phalanx._job.hosts.succession.config import Config, Term
from phalanx._job.hosts.succession.handover import ElectedLeader, Handover
from phalanx._job.hosts.succession.leader_state import KEY as LEADER_STATE
from phalanx._job.hosts.succession.message import (
    config_from_json,
    config_to_json,
    reply_from_json,
    reply_to_json,
    term_from_json,
)
from phalanx._job.hosts.succession.moved_job import LEADER_KEY
from phalanx._job.hosts.succession.primary import Primary
from phalanx._job.hosts.succession.standby import Standby
from phalanx._job.hosts.succession.voter import Voter
from phalanx._job.hosts.succession.witness.witness import WITNESS, Witness
from phalanx.errors import DeadlineError, PhalanxError

_LEAST_S = 3.0  # the minimum time for an election, however short the hosts' timeout is
_TURN_S = 1.0  # the time until the next standby becomes a candidate, too
_TRY_S, _PAUSE_S, _POLL_S = 2.0, 0.1, 0.25
_REDIRECT_S = 5.0
_PRESENT = "present"  # a polling place's queue of the members that are present
_OBSERVE_S = 5.0  # extra time, because a waiting host is notified of the loss earlier than hosts that poll the leader


class Successor:
    """`Successor` is this agent's part in the succession. `own` is the address at which other hosts reach this one.

    `fileno` is readable when an election is over: `receive_result` returns the result.
    """

    def __init__(self, channel: ControlChannel, key: Key | None, own: str, host_timeout_s: float) -> None:
        self._channel = channel
        self._key = key
        self._own = own
        self._host_timeout_s = host_timeout_s
        self._lock = threading.Lock()  # guards the vote and the end of an election
        self._voter = Voter(channel.member)
        self._standby: Standby | None = None
        self._standby_term: Term | None = None
        self._witness: Witness | None = None  # the witness of the job, once this host stands by
        self.witness_check: WitnessCheck | None = None  # the result of asking the witness once
        self._place: Service | None = None  # the polling place
        self._polling_places: tuple[str, ...] = ()  # where standbys publish the result, for a host without a vote
        self._num_asked = 0
        self._answered_at = -_TURN_S  # when this host last answered another candidate
        self._results: Mailbox[ElectedLeader | None] = Mailbox()
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._has_promised = False  # whether this host has voted in the newest election, or follows its winner
        self.handover: Handover | None = None  # once this host was elected
        self.is_electing = False
        self._present: frozenset[int] = frozenset()  # on a candidate: the voters that have also lost the leader

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive_result` has something."""
        return self._results.fileno()

    # While there is a leader.

    def vote(self, leader: int, body: Mapping[str, Any]) -> None:
        """Vote on the leader's proposal, or for the leader in a later term.

        Raises:
            KeyError, TypeError, ValueError: the message is invalid.
        """
        config = config_from_json(body["config"]) if body["kind"] == "propose" else None
        term = term_from_json(body["term"]) if config is None else config.term
        if term[1] != leader:
            raise ValueError("the term belongs to another host")
        with self._lock:
            self._voter, reply = self._voter.solicit(term) if config is None else self._voter.propose(config)
        self._channel.survives = self.may_elect
        self._channel.put_datagram(leader, **reply_to_json(reply))

    def note_standbys(self, body: Mapping[str, Any]) -> None:
        """Store the polling places, where a host without a vote (waiting, or starting its ranks) reads the result.

        Raises:
            KeyError, TypeError: the message is invalid.
        """
        self._polling_places = tuple(map(str, body["addresses"]))

    def stand_by(self, endpoint: str, body: Mapping[str, Any]) -> None:
        """Become a standby: follow the coordinator at `endpoint`, and open a polling place.

        Raises:
            OSError, CoordinationError: a socket cannot be created.
            KeyError, TypeError, ValueError: the leader's message is invalid.
        """
        self._dismiss()
        ticket = str(body["ticket"])
        self._standby_term = term_from_json(body["term"])
        self._witness = None if body["witness"] is None else Witness.from_json(body["witness"], self._key)
        if self._witness is not None and self.witness_check is None:
            self.witness_check = WitnessCheck(Witness.from_json(body["witness"], self._key))
        if self._place is None:
            self._place = Service(join_endpoint(self._own, 0), self._key)
        address = str(self._place.address)

        def report() -> None:
            self._channel.put(self._channel.first, "standby ready", ticket=ticket, address=address)

        self._standby = Standby(endpoint, self._key, bytes.fromhex(ticket), report)

    def _dismiss(self) -> None:
        if self._standby is not None:
            self._standby.stop()
            self._standby = None

    @property
    def may_elect(self) -> bool:
        """Return whether the hosts could elect another leader, with this host's vote."""
        config = self._voter.newest
        return config is not None and self._channel.member in config.voters and bool(config.addresses)

    def describe_lack(self) -> str:
        """Describe why no other host was elected."""
        config = self._voter.newest
        if config is None:
            return "no other host was elected"
        electorate = config.electorates[-1]
        hosts, needed = electorate.voters - {WITNESS}, electorate.fewest_with(self._channel.member)
        num_left = len(self._present & hosts)
        left = f", and {num_left} of them {'is' if num_left == 1 else 'are'} left" if num_left else ""
        witness = " and the witness" if WITNESS in electorate.voters else ""
        return (
            f"no other host was elected: of the {len(hosts)} hosts that were in the job together{witness}, "
            f"{needed} are needed for that{left}"
        )

    # The election.

    def begin_election(self, *, is_candidate: bool = True) -> bool:
        """Begin to elect another leader; return False if that is impossible.

        A standby becomes a candidate only if `is_candidate`.
        """
        config = self._voter.newest
        if config is None or not self.may_elect or self._channel.is_removed or self.is_electing:
            return False
        self.is_electing, self._has_promised, self._present = True, False, frozenset()
        self._over = over = threading.Event()
        end = time.monotonic() + max(_LEAST_S, 2 * self._host_timeout_s)
        order = [member for member, _ in config.addresses]
        member = self._channel.member
        for place, (standby, address) in enumerate(config.addresses):
            if standby != member:
                self._start(self._vote_for, address, over, True)
            elif is_candidate and self._may_be_candidate(config):
                self._start(self._run_for_leader, config, end, over, _TURN_S * place)
        self._start(self._give_up, end, over)
        return bool(order)

    def _may_be_candidate(self, config: Config) -> bool:
        return self._standby is not None and self._place is not None and self._standby_term == config.term

    def observe_election(self, limit_s: float | None = None) -> bool:
        """Begin to observe the election of other hosts; return False if this host knows no polling place.

        The observation ends after `limit_s`; by default, slightly later than an election.
        """
        places = self._polling_places
        if not places and self._voter.newest is not None:  # this host had a vote until the others removed it
            places = tuple(
                address for member, address in self._voter.newest.addresses if member != self._channel.member
            )
        if not places or self._channel.is_removed or self.is_electing:
            return False
        self.is_electing = True
        self._over = over = threading.Event()
        usual_s = max(_LEAST_S, 2 * self._host_timeout_s) + _OBSERVE_S
        end = time.monotonic() + (usual_s if limit_s is None else limit_s)
        for address in places:
            self._start(self._vote_for, address, over, False)
        self._start(self._give_up, end, over)
        return True

    def cancel_election(self) -> bool:
        """Cancel the election because the leader answers again; return False if this host has already voted."""
        with self._lock:
            if self._has_promised or self._over.is_set():
                return False
            self._over.set()
        self.is_electing = False
        return True

    def receive_result(self) -> list[ElectedLeader | None]:
        """Return the result of the election, if there is one: the leader, or None if no host was elected in time."""
        return self._results.receive_all()

    def await_result(self, over: threading.Event) -> ElectedLeader | None:
        """Wait for the result, and return the elected leader; None if no host was elected, or `over` is set."""
        while not over.is_set():
            if wait_readable([self], _PAUSE_S):
                return self.receive_result()[0]
        return None

    def end_election(self) -> None:
        """End the election, after its result was processed."""
        self.is_electing = False

    def _start(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, name="phalanx-election", daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]  # there may be many elections
        thread.start()

    def _finish(self, over: threading.Event, result: ElectedLeader | None) -> None:
        if self._end_once(over):
            self._results.put(result)

    def _end_once(self, over: threading.Event) -> bool:
        """End an election; return False if another thread has already ended it."""
        with self._lock:
            if over.is_set():
                return False
            over.set()
        return True

    def _give_up(self, end: float, over: threading.Event) -> None:
        if not over.wait(end - time.monotonic()):
            self._finish(over, None)

    def _vote_for(self, address: str, over: threading.Event, votes: bool) -> None:
        """Vote at a standby's polling place, or only read there whether the standby is elected."""
        asked = 0
        while not over.is_set():
            try:
                with Client(address, self._key, timeout=_TRY_S) as client:
                    announced_at = -_TURN_S
                    while not over.is_set():
                        if votes and time.monotonic() >= announced_at + _TURN_S:  # a new candidate clears the queue
                            announced_at = time.monotonic()
                            client.queue_push(_PRESENT, str(self._channel.member))
                        try:
                            ask = json.loads(client.get(f"ask/{asked}", _POLL_S))
                        except DeadlineError:
                            continue
                        asked += "elected" not in ask  # the result is read again if the elected host is not reached
                        if (votes or "elected" in ask) and self._answer(client, ask, over):
                            return
            except (PhalanxError, *MALFORMED):
                over.wait(_PAUSE_S)

    def _answer(self, client: Client, ask: Mapping[str, Any], over: threading.Event) -> bool:
        """Answer a standby's request; return whether the election is over."""
        if "elected" in ask:
            with self._lock:
                if over.is_set():
                    return True
                self._has_promised = True
            elected = ElectedLeader.from_json(ask["elected"])
            self._follow(elected)
            self._finish(over, elected)
            return True
        with self._lock:  # the end of an election and this host's vote exclude each other
            if over.is_set():
                return True
            self._has_promised = True
            if "solicit" in ask:
                self._voter, reply = self._voter.solicit(term_from_json(ask["solicit"]))
            else:
                self._voter, reply = self._voter.propose(config_from_json(ask["propose"]))
            self._answered_at = time.monotonic()
        client.queue_push("replies", json.dumps(reply_to_json(reply)))
        return False

    def _follow(self, elected: ElectedLeader) -> None:
        address = Address.parse(elected.address)
        self._channel.redirect(elected.member, address, elected.epoch, _REDIRECT_S)

    def _run_for_leader(self, config: Config, end: float, over: threading.Event, wait_s: float) -> None:
        """Ask for votes at this host's own polling place, as a candidate."""
        assert self._place is not None
        if over.wait(wait_s):
            return
        try:
            with Client(self._place.local) as client:
                self._clear_place(client)
                self._await_voters(client, config, over)
                with self._lock:
                    self._has_promised |= not over.is_set()
                while not over.is_set():
                    self._yield_to_candidate(over)
                    primary = self._poll_voters(client, end, over)
                    if primary is not None:
                        self._take_over(client, primary, over)
                        return
                    over.wait(random.uniform(_PAUSE_S, _TURN_S))  # two simultaneous candidates avoid each other
                self._clear_place(client)
        except (PhalanxError, OSError, *MALFORMED):
            self._finish(over, None)

    def _yield_to_candidate(self, over: threading.Event) -> None:
        """Wait while another candidate, for which this host has voted, may be elected."""
        while (left_s := self._answered_at + _TURN_S - time.monotonic()) > 0 and not over.wait(left_s):
            pass

    def _clear_place(self, client: Client) -> None:
        """Remove the voters, requests and replies of an earlier election from the polling place."""
        for queue in (_PRESENT, "replies"):
            while client.queue_pop(queue, block=False) is not None:
                pass
        client.delete_prefix("ask/")
        self._num_asked = 0

    def _await_voters(self, client: Client, config: Config, over: threading.Event) -> None:
        """Wait until a majority is present: these voters have lost the leader as well."""
        present = {self._channel.member} | ({WITNESS} if self._witness is not None else set())
        while not over.is_set() and not config.is_decided_by(present):
            self._present = frozenset(present)
            with contextlib.suppress(DeadlineError):
                present.add(int(client.queue_pop(_PRESENT, timeout=_POLL_S) or b"-1"))

    def _poll_voters(self, client: Client, end: float, over: threading.Event) -> Primary | None:
        """Request votes in a new term; return the elected primary.

        Return None if another candidate has a later term, or the election is over.
        """
        with self._lock:
            known = self._voter.newest
            assert known is not None
            term = self._voter.promised[0] + 1, self._channel.member
            self._voter, reply = self._voter.solicit(term)
        candidate = Candidate(term, known).on_reply(reply)
        self._ask(client, solicit=list(term))
        has_proposed = False
        while not over.is_set() and time.monotonic() < end and candidate.refused_by is None:
            if candidate.proposed is not None and not has_proposed:
                has_proposed = True
                with self._lock:
                    self._voter, reply = self._voter.propose(candidate.proposed)
                candidate = candidate.on_reply(reply)
                self._ask(client, propose=config_to_json(candidate.proposed or known))
            candidate = self._ask_witness(candidate)
            if candidate.elected is not None:
                return candidate.elected
            if candidate.proposed is not None and not has_proposed:
                continue
            try:
                received = client.queue_pop("replies", timeout=_POLL_S)
            except DeadlineError:
                continue
            if received is not None:
                candidate = candidate.on_reply(reply_from_json(json.loads(received)))
        if candidate.refused_by is not None:
            with self._lock:  # so that this host's next term is later than the other candidate's
                later = candidate.refused_by[0], self._channel.member
                if later > self._voter.promised:
                    self._voter, _ = self._voter.solicit(later)
        return None

    def _ask_witness(self, candidate: Candidate) -> Candidate:
        """Add the witness's reply to the candidate, unless the witness has replied before."""
        replied = candidate.promised_by if candidate.proposed is None else candidate.accepted_by
        if self._witness is None or WITNESS not in candidate.electors or WITNESS in replied:
            return candidate
        try:
            if candidate.proposed is None:
                return candidate.on_reply(self._witness.solicit(candidate.term))
            return candidate.on_reply(self._witness.propose(candidate.proposed))
        except (PhalanxError, OSError):  # the next call repeats the request
            self._witness.close()
            return candidate

    def _ask(self, client: Client, **ask: Any) -> None:
        client.set(f"ask/{self._num_asked}", json.dumps(ask))
        self._num_asked += 1

    def _take_over(self, client: Client, primary: Primary, over: threading.Event) -> None:
        """Open the job's coordinator on this host, and publish its address to the voters."""
        copy = self._standby.stop() if self._standby is not None else None
        state = copy.store.get(LEADER_STATE.encode()) if copy is not None else None
        if copy is None or not state or over.is_set():
            self._finish(over, None)
            return
        gone = dict(copy.members.gone)
        unread = prepare(copy, primary.committed.primary, self._channel.first)
        copy.store.set(LEADER_KEY.encode(), str(self._channel.member).encode())
        service = Service(join_endpoint(self._own, 0), self._key, coordinator=copy)
        elected = ElectedLeader(primary.committed.primary, str(service.address), copy.epoch, find_free_port())
        if not self._end_once(over):
            service.close()
            return
        self.handover = Handover(state, service, primary, self._voter, unread, gone, self._witness)
        result = None
        try:
            self._ask(client, elected=elected.to_json())  # first, so that the other hosts follow in time
            self._follow(elected)
            self._channel.attach_to(service)
            result = elected
        finally:
            self._results.put(result)

    def close(self) -> None:
        """Close everything except an elected host's coordinator, which runs until `close_coordinator`."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._dismiss()
        if self.witness_check is not None:
            self.witness_check.close()
        if self._place is not None:
            self._place.close()
            self._place = None
        self._results.close()

    def close_coordinator(self) -> None:
        """Close the coordinator of this host, if it was elected."""
        if self.handover is not None:
            self.handover.service.close()


def prepare(copy: Coordinator, leader: int, lost: int) -> list[tuple[int, bytes]]:
    """Turn a copy into the coordinator of the new leader `leader`; return the messages that `lost` has not read.

    `lost` is the former leader. The leader watches all members, and the others watch the leader.
    """
    now = time.monotonic()
    copy.take_over(now)
    copy.epoch = os.urandom(8)
    gone = copy.members.get(lost)
    unread = [] if gone is None else gone.unread_messages()
    for member in copy.members:
        copy.members.watch(member, None if member.id == leader else frozenset([leader]))
    if gone is not None:
        copy.lose(gone, "its host is lost")
    copy.end_clients(session for session in copy.sessions.values() if session.route[0] == THIS_HOST)
    return unread


_END_S = 2.0  # how long `close` waits for a pending answer


class WitnessCheck:
    """`WitnessCheck` checks once, in a thread, that the witness answers this host; it owns and closes the witness.

    `fileno` is readable when `receive` has something.
    """

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._lines: Mailbox[str] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="phalanx-witness", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something."""
        return self._lines.fileno()

    def receive(self) -> list[str]:
        """Return lines for the user if the witness did not answer."""
        return self._lines.receive_all()

    def _run(self) -> None:
        try:
            self._witness.check()
        except (PhalanxError, OSError) as error:
            why = str(error).splitlines()[0].rstrip(".")  # the other lines are advice on a job's own coordinator
            self._lines.put(
                f"the witness at {self._witness.address} does not answer this host: {why}. If it still does not "
                "answer when the leader is lost, this host may not become the leader"
            )
        finally:
            self._witness.close()

    def close(self) -> None:
        """Close the descriptor; wait at most two seconds for the thread, which may wait for an answer."""
        self._thread.join(_END_S)
        self._lines.close()
