"""The take-over, in every order of events: nothing that was granted is lost, and never do two halves train."""

import random
from dataclasses import replace

import pytest
from tests.coordination.succession_model import BrokenPromise, Job, Limits, explore, stroll

from phalanx._job.hosts.succession.candidate import Candidate
from phalanx._job.hosts.succession.config import Config, Electorate
from phalanx._job.hosts.succession.primary import Primary
from phalanx._job.hosts.succession.voter import ConfigAccepted, TermPromised, Voter

WHOLE = [  # every state, in a few seconds
    ((1,), Limits(request=1, stand=1, change=1, sync=0)),
    ((1,), Limits(request=1, stand=1, change=0, sync=1)),
    ((1, 2), Limits(request=1, stand=1, change=0, sync=0)),
    ((1, 2), Limits(request=1, stand=2, change=0, sync=0)),  # two candidates
    ((), Limits(request=1, stand=1, change=1, sync=0)),
]
LARGE = [
    ((), Limits(request=1, stand=1, change=1, sync=1)),
    ((1,), Limits(request=1, stand=2, change=1, sync=0)),
    ((1,), Limits(request=2, stand=2, change=1, sync=1)),
    ((1, 2), Limits(request=1, stand=2, change=2, sync=1)),
    ((1, 2), Limits(request=2, stand=3, change=2, sync=2)),
]


@pytest.mark.slow(but=("standbys2-limits2",))
@pytest.mark.parametrize(("standbys", "limits"), WHOLE)
def test_three_hosts_lose_nothing_and_never_part_in_any_order(standbys, limits):
    assert explore(Job(3, standbys, limits)) > 1000


def find_all(job):
    """Return what hosts can come to, whatever messages there still are."""
    came, todo = {job.start}, [job.start]
    while todo:
        for then, _ in job.next(todo.pop()):
            if then not in came:
                came.add(then)
                todo.append(then)
    return {(tuple(job.agents(state)), state.counts) for state in came}, len(came)


@pytest.mark.slow(but=("case0",))
@pytest.mark.parametrize("case", [WHOLE[2], ((1,), Limits(request=1, stand=1, change=0, sync=1))])
def test_hosts_come_to_the_same_whether_or_not_messages_are_left_out_that_change_nothing(case, monkeypatch):
    found, num_states = find_all(Job(3, *case))
    monkeypatch.setattr(Job, "_leave_out", lambda job, state: state)
    assert find_all(Job(3, *case))[0] == found
    assert find_all(Job(3, *case))[1] > 2 * num_states


@pytest.mark.slow
@pytest.mark.parametrize(("standbys", "limits"), LARGE)
def test_and_with_more_going_on_as_many_states_as_there_is_time_for(standbys, limits, effort):
    explore(Job(3, standbys, limits), 30_000 * effort)


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("seed", range(4))
def test_five_hosts_on_paths_at_random(seed, effort):
    rng = random.Random(seed)
    took_over = 0
    for standbys in ((1, 2), (3, 1)):
        job = Job(5, standbys, Limits(request=3, stand=4, change=4, sync=3))
        for _ in range(30 * effort):
            agents = job.agents(stroll(job, rng, rng.randrange(20, 120)))
            took_over += any(agent.primary is not None and agent.primary.committed.term[0] > 1 for agent in agents)
    assert took_over


# Mistakes that the checker must find, each in one line of the protocol.


def forgets_its_promise(monkeypatch):
    monkeypatch.setattr(Voter, "solicit", lambda voter, term: (voter, TermPromised(voter.member, term, voter.newest)))


def accepts_an_old_term(monkeypatch):
    def propose(voter, config):
        return replace(voter, newest=config), ConfigAccepted(voter.member, config.term, config.version)

    monkeypatch.setattr(Voter, "propose", propose)


def takes_over_though_no_standby(monkeypatch):
    monkeypatch.setattr(Candidate, "is_eligible", True)


def takes_half_for_a_majority(monkeypatch):
    monkeypatch.setattr(
        Electorate, "is_decided_by", lambda each, members: 2 * len(each.voters & set(members)) >= len(each.voters)
    )


def grants_what_only_old_standbys_have(monkeypatch):
    monkeypatch.setattr(Primary, "required_standbys", property(lambda primary: frozenset(primary.committed.standbys)))


def grants_what_only_new_standbys_have(monkeypatch):
    monkeypatch.setattr(Primary, "required_standbys", property(lambda primary: frozenset(primary.newest.standbys)))


def exchanges_members_without_asking_the_old_ones(monkeypatch):
    def with_voters(config, voters, standbys):
        electorate = Electorate(frozenset(voters), config.primary)
        return replace(config, version=config.version + 1, standbys=standbys, electorates=(electorate,))

    begin = Config.begin(0).with_voters(range(3), (1,))
    monkeypatch.setattr(Config, "with_voters", with_voters)
    assert begin.is_joint


def takes_over_without_asking_as_the_old_one_did(monkeypatch):
    def begin_term(config, term):
        electorate = Electorate(config.newest_voters, term[1])
        return replace(config, term=term, version=0, primary=term[1], standbys=(), electorates=(electorate,))

    monkeypatch.setattr(Config, "begin_term", begin_term)


def serves_before_it_is_accepted(monkeypatch):
    elected = property(lambda candidate: None if candidate.proposed is None else Primary(candidate.proposed))
    monkeypatch.setattr(Candidate, "elected", elected)


def keeps_standbys_that_do_not_follow_it(monkeypatch):
    right = Config.begin_term
    monkeypatch.setattr(
        Config, "begin_term", lambda config, term: replace(right(config, term), standbys=config.standbys)
    )


def ignores_newer_configs(monkeypatch):
    right = Candidate.on_reply

    def on_reply(candidate, reply):
        if isinstance(reply, TermPromised):
            reply = replace(reply, newest=candidate.known)
        return right(candidate, reply)

    monkeypatch.setattr(Candidate, "on_reply", on_reply)


MISTAKES = [
    (forgets_its_promise, LARGE[1]),
    (accepts_an_old_term, LARGE[1]),
    (takes_over_though_no_standby, LARGE[1]),
    (takes_half_for_a_majority, LARGE[1]),
    (grants_what_only_old_standbys_have, LARGE[0]),
    (grants_what_only_new_standbys_have, LARGE[1]),
    (exchanges_members_without_asking_the_old_ones, LARGE[1]),
    (takes_over_without_asking_as_the_old_one_did, LARGE[1]),
    (serves_before_it_is_accepted, LARGE[1]),
    (keeps_standbys_that_do_not_follow_it, LARGE[1]),
    (ignores_newer_configs, LARGE[1]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "case"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES])
def test_the_checker_finds_a_protocol_that(mistake, case, monkeypatch):
    mistake(monkeypatch)
    standbys, limits = case
    with pytest.raises(BrokenPromise):
        explore(Job(3, standbys, limits), 300_000)
