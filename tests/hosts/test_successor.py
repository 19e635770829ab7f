"""Standbys that stand for the lead, alone or with others that have lost the leader, too. Coordinators are real."""

import contextlib
import time

import pytest

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._job.coordinator.service import Service
from phalanx._job.hosts.control_channel import ControlChannel, ControlMessage
from phalanx._job.hosts.succession.config import Electorate
from phalanx._job.hosts.succession.leader_state import KEY as LEADER_STATE
from phalanx._job.hosts.succession.message import reply_to_json, term_from_json
from phalanx._job.hosts.succession.moved_job import LEADER_KEY
from phalanx._job.hosts.succession.proposer import Proposer
from phalanx._job.hosts.succession.successor import Successor
from phalanx._job.hosts.succession.voter import TermRefused, Voter

KEY = Key.generate()


class Agents:
    """The agents of three hosts, whose first one leads; the second one stands by."""

    def __init__(self, stack):
        self.service = stack.enter_context(Service("127.0.0.1:0", KEY))
        self.channels = []
        for number in range(3):
            client = Client(str(self.service.address), KEY)
            client.join({"host": f"host{number}"})
            self.channels.append(ControlChannel(client))
            stack.callback(self.channels[-1].close)
        self.proposer = Proposer(self.channels[0], self.service.coordinator.replicas)
        stack.callback(self.proposer.close)
        self.is_leader_deaf = False
        self.successors = {}
        for number in (1, 2):
            self.successors[number] = Successor(self.channels[number], KEY, "127.0.0.1", 1.0)
            stack.callback(self.successors[number].close_coordinator)
            stack.callback(self.successors[number].close)
        self.channels[0].put_key(LEADER_STATE, b"what was decided")
        self.proposer.set_voters([0, 1, 2])
        self.run_until(lambda: self.proposer.has_standbys)

    def run_until(self, condition):
        """Have all read what the others say."""
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.proposer.receive()
            for number, channel in enumerate(self.channels):
                for message in channel.receive():
                    if isinstance(message, ControlMessage):
                        self.hear(number, message)
            time.sleep(0.01)

    def hear(self, number, message):
        if number == 0 and self.is_leader_deaf:
            return
        if message.kind == "standby ready":
            self.proposer.on_standby(message.member, message.body["ticket"], message.body["address"])
        elif message.kind == "become standby":
            self.successors[number].stand_by(self.channels[number].endpoint, message.body)
        elif number == 0:
            self.proposer.process(message.member, message.body)
        else:
            self.successors[number].vote(message.member, message.body)


@pytest.fixture
def agents():
    with contextlib.ExitStack() as stack:
        yield Agents(stack)


def test_a_standby_that_alone_has_lost_the_leader_goes_on_with_it(agents):
    """It promised its vote to itself: the leader took itself for deposed at its next proposal, and ended the job."""
    standby = agents.successors[1]
    assert standby.begin_election()
    time.sleep(1.0)  # the others have not lost the leader, so that nobody comes to vote
    assert standby.cancel_election()
    assert standby.receive_result() == []
    agents.proposer.set_voters([0, 1])
    agents.run_until(lambda: agents.proposer.has_left(2))
    assert not agents.proposer.is_deposed
    assert not standby.is_electing


def test_hosts_that_cannot_elect_a_leader_say_how_many_would_have_to_be_left(agents):
    standby, other = agents.successors[1], agents.successors[2]
    words = "no other host was elected: of the 3 hosts that were in the job together, 2 are needed for that"
    assert other.describe_lack() == words
    assert standby.begin_election()
    while standby.describe_lack() == words:  # until it stands
        pass
    assert standby.describe_lack() == f"{words}, and 1 of them is left"
    assert standby.cancel_election()


@pytest.mark.parametrize("size", range(2, 8))
@pytest.mark.parametrize("member", [0, 1])
def test_the_fewest_that_decide_are_as_many_as_are_said_to_be_needed(size, member):
    electorate = Electorate(frozenset(range(size)), 0)
    living = range(member, size)  # the first host, which has the casting vote, or all others
    enough = [count for count in range(size + 1) if electorate.is_decided_by(living[:count])]
    assert electorate.fewest_with(member) == min(enough, default=size)


def test_the_same_standby_is_told_again_once_it_can_take_over_again(agents):
    """A host had left and come back: nobody was told that another one could lead again."""
    proposer = agents.proposer
    assert proposer.pop_standbys() == (1,)
    assert proposer.pop_standbys() is None
    proposer.set_voters([0, 1])  # of two hosts none is a majority
    agents.run_until(lambda: proposer.has_left(2) and proposer.pop_standbys() is None)
    assert not proposer.has_standbys
    proposer.set_voters([0, 1, 2])
    agents.run_until(lambda: proposer.has_standbys)
    assert proposer.pop_standbys() == (1,)


def test_a_standby_that_others_vote_for_is_elected_and_goes_back_no_more(agents):
    for successor in agents.successors.values():
        assert successor.begin_election()
    results = []
    deadline = time.monotonic() + 30
    while len(results) < 2:
        assert time.monotonic() < deadline
        results += [result for successor in agents.successors.values() for result in successor.receive_result()]
    assert results[0] == results[1]
    assert results[0].member == agents.channels[1].member == agents.channels[2].first
    assert not any(successor.cancel_election() for successor in agents.successors.values())
    with Client(results[0].address, KEY) as client:
        assert client.get(LEADER_KEY) == str(results[0].member).encode()
        assert client.get(LEADER_STATE) == b"what was decided"


def test_who_had_lost_the_leader_in_an_earlier_election_does_not_count_as_present(agents):
    """What a voter had left at the polling place decided the next election, in which the standby was alone."""
    voter, standby = agents.successors[2], agents.successors[1]
    assert voter.begin_election()
    time.sleep(1.0)
    assert voter.cancel_election()
    assert standby.begin_election()
    time.sleep(1.0)
    assert standby.cancel_election()
    assert (voter.receive_result(), standby.receive_result()) == ([], [])


def test_after_an_election_that_nobody_won_the_next_one_begins_anew(agents, monkeypatch):
    standby, voter = agents.successors[1], agents.successors[2]
    poll = Successor._poll_voters
    monkeypatch.setattr(Successor, "_poll_voters", lambda self, *given: (poll(self, *given), None)[1])
    assert standby.begin_election()
    assert voter.begin_election()
    results = []
    while len(results) < 2:
        results += [result for each in (standby, voter) for result in each.receive_result()]
        time.sleep(0.05)
    assert results == [None, None]
    for each in (standby, voter):
        each.end_election()
    assert voter.begin_election()
    time.sleep(1.0)
    assert voter.cancel_election()  # nobody asks it for anything


def elect(agents):
    """Have all that do not lead elect another leader; return the results."""
    for successor in agents.successors.values():
        assert successor.begin_election()
    results = []
    deadline = time.monotonic() + 30
    while len(results) < len(agents.successors):
        assert time.monotonic() < deadline
        results += [result for successor in agents.successors.values() for result in successor.receive_result()]
        time.sleep(0.01)
    return results


def test_a_leader_that_hears_nobody_and_is_still_heard_does_not_keep_the_others_from_electing(agents):
    """It took both for lost. They heard and accepted what it proposed, in which nobody was to take over any more."""
    agents.is_leader_deaf = True
    agents.proposer.set_voters([0, 2])
    end = time.monotonic() + 1.0
    agents.run_until(lambda: time.monotonic() > end)
    assert not agents.proposer.has_left(agents.channels[1].member)
    assert [result and result.member for result in elect(agents)] == [agents.channels[1].member] * 2


def test_a_leader_goes_on_where_a_standby_has_asked_for_votes_and_was_not_elected(agents):
    """The leader took itself for deposed, and the job ended: it had no standby yet, so that nobody else could lead."""
    standby, leader = agents.successors[1], agents.proposer
    term = (standby._voter.promised[0] + 1, agents.channels[1].member)
    standby._voter, _ = standby._voter.solicit(term)
    leader.set_voters([0, 1])
    agents.run_until(lambda: leader.has_left(agents.channels[2].member))
    leader.set_voters([0, 1, 2])
    agents.run_until(lambda: leader.has_standbys)
    assert not leader.is_deposed
    assert [result and result.member for result in elect(agents)] == [agents.channels[1].member] * 2


def test_a_leader_that_asks_for_votes_again_ends_where_another_one_was_proposed_to_a_voter(agents):
    leader, member, rival = agents.proposer, agents.channels[2].member, (2, agents.channels[1].member)
    voter, _ = Voter(member).propose(leader._voter.newest.begin_term(rival))
    leader.process(member, reply_to_json(TermRefused(member, rival)))
    assert not leader.is_deposed
    agents.is_leader_deaf = True
    asked = []
    while not asked:
        leader.receive()
        asked = [each.body["term"] for each in agents.channels[2].receive() if each.body.get("kind") == "solicit"]
    _, reply = voter.solicit(term_from_json(asked[0]))
    leader.process(member, reply_to_json(reply))
    assert leader.is_deposed
