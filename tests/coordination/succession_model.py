"""A job of a few hosts as data, and all that can happen to it: what the take-over is checked with.

A step is one thing that one host does: it does a request, proposes, stands for a new term, or reads one of the messages
that were ever sent. Messages stay: each may be read late, twice, in any order, or never; a host that is lost is one
that takes no further step. The protocol is the project's own (`phalanx._job.hosts.succession`); what it has around
it, sockets and clocks, is what is modelled here.

What only adds to what somebody may do is done at once, as that makes more promises and breaks none: a standby's
acknowledgement and a voter's acceptance are heard when they are given, and what can be granted is granted. Who is
refused does nothing by that: nobody is forced to go on.

`Job` numbers the hosts' states and the messages as they come up, so that a state of all is a few numbers; what a host
does with a message is worked out once. Two ways through it: `explore`, every state; `stroll`, one at random.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from phalanx._job.hosts.succession.candidate import Candidate
from phalanx._job.hosts.succession.config import Config, Term
from phalanx._job.hosts.succession.primary import Primary
from phalanx._job.hosts.succession.voter import ConfigAccepted, TermPromised, TermRefused, Voter

NEVER: Term = (0, -1)


class BrokenPromise(AssertionError):
    """A state that must never be."""


@dataclass(frozen=True)
class Sync:
    """The whole state, from the primary of a term: it starts a standby anew."""

    term: Term
    to: int
    log: tuple[int, ...]


@dataclass(frozen=True)
class Log:
    """One change, from the primary of a term."""

    term: Term
    to: int
    index: int
    request: int


@dataclass(frozen=True)
class Acknowledged:
    """A standby has so many changes. It is heard at once."""

    term: Term
    standby: int
    count: int


@dataclass(frozen=True)
class Solicit:
    """A candidate asks for promises."""

    term: Term


@dataclass(frozen=True)
class Propose:
    """A primary or a candidate proposes."""

    config: Config


@dataclass(frozen=True)
class Agent:
    """One host. `counts` are, of a primary, how many changes each standby has acknowledged; -1: not its state yet."""

    voter: Voter
    log: tuple[int, ...] = ()
    synced_in: Term = NEVER  # the term whose primary `log` is from
    primary: Primary | None = None
    counts: tuple[tuple[int, int], ...] = ()
    num_granted: int = 0
    candidate: Candidate | None = None

    @property
    def member(self) -> int:
        """Its number."""
        return self.voter.member


class Step(NamedTuple):
    """What a host does: its state then, what it sends, what is in force by that, and what kind of step it was."""

    agent: Agent
    sent: tuple[object, ...] = ()
    committed: Config | None = None
    elected: bool = False
    kind: str = ""  # of those that are counted


class Limits(NamedTuple):
    """How many steps of a kind there are at most."""

    request: int
    stand: int
    change: int
    sync: int


KINDS = Limits._fields


def act(agent: Agent, num_agents: int, num_requests: int) -> Iterator[Step]:
    """Every step of a host that is no answer to a message; `num_requests` were made already."""
    primary, candidate = agent.primary, agent.candidate
    if primary is not None:
        yield from _act_as_primary(agent, primary, num_agents, num_requests)
    config = agent.voter.newest
    if config is not None and agent.synced_in == config.term and agent.member in (config.primary, *config.standbys):
        term = (agent.voter.promised[0] + 1, agent.member)
        voter, reply = agent.voter.solicit(term)
        stands = replace(agent, voter=voter, primary=None, candidate=Candidate(term, config))
        yield _hear(stands, reply, Solicit(term))._replace(kind="stand")
    if candidate is not None and candidate.elected is not None:
        serves = replace(agent, candidate=None, primary=candidate.elected, counts=(), synced_in=candidate.term)
        serves = replace(serves, num_granted=len(agent.log))
        yield Step(serves, committed=candidate.elected.committed, elected=True)


def _act_as_primary(agent: Agent, primary: Primary, num_agents: int, num_requests: int) -> Iterator[Step]:
    member, term, counts = agent.member, primary.committed.term, dict(agent.counts)
    logs = [Log(term, standby, len(agent.log), num_requests) for standby in counts]
    yield Step(grant(replace(agent, log=(*agent.log, num_requests))), tuple(logs), kind="request")
    for other in primary.newest.voters - {member, *counts}:
        follows = tuple(sorted({**counts, other: -1}.items()))
        yield Step(replace(agent, counts=follows), (Sync(term, other, agent.log),), kind="sync")
    if primary.proposed is None and primary.committed.is_joint:
        yield _propose(agent, primary.finish())
    elif primary.proposed is None:
        config = primary.committed
        able = tuple(each for each, count in agent.counts if count >= agent.num_granted)
        for standbys in {config.standbys, able, able[::-1], able[1:]}:
            for voters in _draw_voters(config.newest_voters, member, num_agents):
                if voters >= set(standbys) and (voters, standbys) != (config.newest_voters, config.standbys):
                    yield _propose(agent, primary.change(voters, standbys))._replace(kind="change")


def _draw_voters(old: frozenset[int], member: int, num_agents: int) -> set[frozenset[int]]:
    one_more_or_less = {old ^ {other} for other in range(num_agents)}
    alone_or_two = {frozenset([member, other]) for other in old}
    return {voters for voters in (old, *one_more_or_less, *alone_or_two) if member in voters}


def _propose(agent: Agent, primary: Primary) -> Step:
    assert primary.proposed is not None
    voter, reply = agent.voter.propose(primary.proposed)
    return _hear(replace(agent, voter=voter, primary=primary), reply, Propose(primary.proposed))


def grant(agent: Agent) -> Agent:
    """Grant what all standbys have that must."""
    counts = dict(agent.counts)
    if agent.primary is None:
        return agent
    required = agent.primary.required_standbys - {agent.member}
    granted = min([len(agent.log), *(counts.get(each, -1) for each in required)])
    return replace(agent, num_granted=max(agent.num_granted, granted))


def _hear(agent: Agent, reply: ConfigAccepted | TermPromised | TermRefused, *sent: object) -> Step:
    """A reply, from itself or another one, has reached whoever asked."""
    committed = None
    if agent.primary is not None:
        primary = agent.primary.on_reply(reply)
        committed = primary.committed if primary.committed != agent.primary.committed else None
        agent = grant(replace(agent, primary=primary))
    if agent.candidate is not None:
        candidate = agent.candidate.on_reply(reply)
        if candidate.proposed is not None and agent.candidate.proposed is None:
            voter, own = agent.voter.propose(candidate.proposed)
            agent, candidate = replace(agent, voter=voter), candidate.on_reply(own)
            sent = (*sent, Propose(candidate.proposed))  # type: ignore[arg-type]
        agent = replace(agent, candidate=candidate)
    return Step(agent, sent, committed)


def read(agent: Agent, message: Any) -> Step | None:
    """What a host does when it reads a message."""
    voter, member = agent.voter, agent.member
    if isinstance(message, Propose) and message.config.primary != member and member in message.config.voters:
        changed, reply = voter.propose(message.config)
        return Step(replace(agent, voter=changed), (reply,))
    if isinstance(message, Solicit) and message.term[1] != member:
        changed, reply = voter.solicit(message.term)
        return Step(replace(agent, voter=changed), (reply,))
    if isinstance(message, TermPromised | ConfigAccepted) and message.voter != member and message.term[1] == member:
        return _hear(agent, message)
    if isinstance(message, Sync) and message.to == member and message.term > agent.synced_in:
        follows = replace(agent, log=message.log, synced_in=message.term)
        return Step(follows, (Acknowledged(message.term, member, len(message.log)),))
    awaited = (member, agent.synced_in, len(agent.log))
    if isinstance(message, Log) and (message.to, message.term, message.index) == awaited:
        follows = replace(agent, log=(*agent.log, message.request))
        return Step(follows, (Acknowledged(message.term, member, len(follows.log)),))
    if isinstance(message, Acknowledged) and agent.primary is not None:
        counts = dict(agent.counts)
        if message.term == agent.primary.committed.term and message.count > counts.get(message.standby, 99):
            counts[message.standby] = message.count
            return Step(grant(replace(agent, counts=tuple(sorted(counts.items())))))
    return None


def is_over(agent: Agent, message: Any) -> bool:
    """Whether a message to which this host does nothing now is one to which it never will: it has gone further."""
    if isinstance(message, Solicit):
        return message.term < agent.voter.promised or message.term[1] == agent.member
    if isinstance(message, Propose):
        config = message.config
        return config.term < agent.voter.promised or agent.member == config.primary or agent.member not in config.voters
    if isinstance(message, TermPromised):
        return message.term[1] != agent.member or agent.candidate is None or agent.candidate.term > message.term
    if isinstance(message, Sync):
        return message.to != agent.member or message.term <= agent.synced_in
    assert isinstance(message, Log)
    here = (message.term, message.index)
    return message.to != agent.member or here < (agent.synced_in, len(agent.log))


class State(NamedTuple):
    """A state of all: numbers of the hosts' states, a bit for each message that was sent, and what has happened.

    Messages that can change nothing any more are left out: states that differ by those alone are one.
    """

    agents: tuple[int, ...]
    messages: int
    counts: tuple[int, ...]  # of steps, by kind
    newest: int  # the newest config in force, by its number


class Resolved(NamedTuple):
    """A step, with the number of the host's state behind it, the bits of what is sent, and what is heard at once."""

    step: Step
    then: int
    bits: int
    heard: tuple[int, ...]  # numbers of messages


class Job:
    """A job of so many hosts, and all that can happen to it within `limits`."""

    def __init__(self, num_agents: int, standbys: tuple[int, ...], limits: Limits) -> None:
        self.num_agents = num_agents
        self.limits = limits
        self._numbers: dict[object, int] = {}
        self._values: list[Any] = []
        self._messages: dict[object, int] = {}
        self._message_values: list[Any] = []
        self._read: dict[tuple[int, int], Resolved | None] = {}
        self._acts: dict[tuple[int, int], list[Resolved]] = {}
        self._over: dict[int, tuple[int, int]] = {}  # by a host's state: of so many messages, the bits of those over
        config = Config.begin(0).with_voters(range(num_agents), standbys).final()
        agents = [
            Agent(
                Voter(member, config.term, config),
                synced_in=config.term if member in (0, *standbys) else NEVER,
                primary=Primary(config) if member == 0 else None,
                counts=tuple((standby, 0) for standby in standbys) if member == 0 else (),
            )
            for member in range(num_agents)
        ]
        self.start = State(tuple(map(self._number, agents)), 0, (0,) * len(KINDS), self._number(config))

    def agents(self, state: State) -> list[Agent]:
        """The hosts of a state."""
        return [self._values[number] for number in state.agents]

    def _number(self, value: object) -> int:
        number = self._numbers.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def _number_message(self, message: object) -> int:
        number = self._messages.setdefault(message, len(self._message_values))
        if number == len(self._message_values):
            self._message_values.append(message)
        return number

    def _resolve(self, step: Step) -> Resolved:
        kept = [each for each in step.sent if not isinstance(each, ConfigAccepted | Acknowledged | TermRefused)]
        heard = [each for each in step.sent if isinstance(each, ConfigAccepted | Acknowledged)]
        bits = sum(1 << self._number_message(each) for each in set(kept))
        return Resolved(step, self._number(step.agent), bits, tuple(map(self._number_message, heard)))

    def _resolve_read(self, agent: int, message: int) -> Resolved | None:
        key = (agent, message)
        if key not in self._read:
            found = read(self._values[agent], self._message_values[message])
            self._read[key] = self._resolve(found) if found is not None else None
        return self._read[key]

    def _find_over(self, agent: int) -> int:
        """The bits of the messages that can change nothing at a host in this state any more."""
        known, over = self._over.get(agent, (0, 0))
        num_messages = len(self._message_values)
        for message in range(known, num_messages):
            value = self._message_values[message]
            if isinstance(value, ConfigAccepted | Acknowledged):  # it is heard at once, and has no bit
                continue
            found = self._resolve_read(agent, message)
            is_idle = found is None or (found.then == agent and not found.bits and not found.heard)
            if is_idle and is_over(self._values[agent], value):
                over |= 1 << message
        self._over[agent] = num_messages, over
        return over

    def _leave_out(self, state: State) -> State:
        over = state.messages
        for agent in state.agents:
            over &= self._find_over(agent)
        return state._replace(messages=state.messages & ~over) if over else state

    def next(self, state: State) -> Iterator[tuple[State, str]]:
        """Every state that can follow, with the step that leads there, in words; see `State` for what is left out.

        Raises:
            BrokenPromise: it must not be.
        """
        for then, what in self.all_next(state):
            yield self._leave_out(then), what

    def all_next(self, state: State) -> Iterator[tuple[State, str]]:
        """Do what `next` does, with all messages: to leave some out takes longer than one path through the states.

        Raises:
            BrokenPromise: it must not be.
        """
        num_requests = state.counts[0]
        for member, number in enumerate(state.agents):
            steps = self._acts.get((number, num_requests))
            if steps is None:
                acts = act(self._values[number], self.num_agents, num_requests)
                steps = self._acts[number, num_requests] = [self._resolve(step) for step in acts]
            for found in steps:
                kind = found.step.kind
                if not kind or state.counts[KINDS.index(kind)] < self.limits[KINDS.index(kind)]:
                    yield self._follow(state, member, found), f"{member} {kind or 'goes on'}"
            left = state.messages
            while left:
                bit = left & -left
                left ^= bit
                resolved = self._resolve_read(number, bit.bit_length() - 1)
                if resolved is not None and (resolved.then != number or resolved.bits & ~state.messages):
                    yield self._follow(state, member, resolved), f"{member} reads {bit.bit_length() - 1}"

    def _follow(self, state: State, member: int, resolved: Resolved) -> State:
        step, then, bits, heard = resolved
        counts = state.counts
        if step.kind:
            at = KINDS.index(step.kind)
            counts = (*counts[:at], counts[at] + 1, *counts[at + 1 :])
        agents = (*state.agents[:member], then, *state.agents[member + 1 :])
        followed = State(agents, state.messages | bits, counts, state.newest)
        if step.elected:
            self._check_elected(followed, step.agent, self._values[state.agents[member]].candidate)
        if step.committed is not None:
            followed = followed._replace(newest=self._check_committed(followed, step.committed))
        if step.agent.num_granted > self._values[state.agents[member]].num_granted and not step.elected:
            self._check_granted(followed, step.agent)
        for message in heard:
            receiver = self._message_values[message].term[1]
            if receiver != member and (reply := self._resolve_read(followed.agents[receiver], message)) is not None:
                followed = self._follow(followed, receiver, reply)
        return followed

    def _check_granted(self, state: State, by: Agent) -> None:
        assert by.primary is not None
        for other in self.agents(state):
            later = other.primary is not None and other.primary.committed.term > by.primary.committed.term
            if later and other.log[: by.num_granted] != by.log[: by.num_granted]:
                raise BrokenPromise(f"{by.member} grants a request, and {other.member} goes on without it")

    def _check_elected(self, state: State, agent: Agent, was: Candidate) -> None:
        newest: Config = self._values[state.newest]
        if was.known.stamp < newest.stamp and newest.term < was.term:
            raise BrokenPromise(f"{agent.member} takes over by {was.known}, but {newest} was in force")
        for other in self.agents(state):
            granted = other.log[: other.num_granted]
            if agent.log[: len(granted)] != granted and agent.synced_in > other.synced_in:
                raise BrokenPromise(f"{agent.member} takes over without what {other.member} has granted")

    def _check_committed(self, state: State, config: Config) -> int:
        """A config is in force: from now on its primary may have its voters train together, and they alone."""
        known: Config = self._values[state.newest]
        if config.stamp > known.stamp:
            return self._number(config)
        voters = [self._values[state.agents[each]].voter for each in config.newest_voters]
        if not any(voter.promised > config.term for voter in voters):
            raise BrokenPromise(f"two halves train, by {config} and by {known}")
        return state.newest

    def explain(self, path: list[State]) -> str:
        """Return the steps between states, in words."""
        said = [next(what for then, what in self.next(a) if then == b) for a, b in pairwise(path)]
        return "\n".join(
            f"  {step}: {self._message_values[int(step.split()[-1])]}" if "reads" in step else f"  {step}"
            for step in said
        )


def explore(job: Job, most: int = 10**9) -> int:
    """Look at every state; return how many there are, or `most`.

    Raises:
        BrokenPromise: one of them must not be; the message has the steps that lead there.
    """
    came: dict[State, State | None] = {job.start: None}
    todo = deque([job.start])
    state = job.start
    try:
        while todo and len(came) < most:
            state = todo.popleft()
            for then, _ in job.next(state):
                if then not in came:
                    came[then] = state
                    todo.append(then)
    except BrokenPromise as error:
        path = [state]
        while (before := came[path[-1]]) is not None:
            path.append(before)
        raise BrokenPromise(f"{error}, after\n{job.explain(path[::-1])}") from None
    return len(came)


def stroll(job: Job, rng: random.Random, num_steps: int) -> State:
    """Return where a random path ends."""
    state = job.start
    for _ in range(num_steps):
        following = [then for then, _ in job.all_next(state)]
        if not following:
            break
        state = rng.choice(following)
    return state
