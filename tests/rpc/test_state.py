"""The states of an agent are the ones that are drawn."""

import re

import pytest

from phalanx.rpc.agent import state
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.agent.state import TRANSITIONS, AgentState


def test_the_drawing_is_the_table():
    drawn, name = {one: frozenset() for one in AgentState}, ""
    for line in state.__doc__.splitlines():
        if begins := re.match("[A-Z]+(?=  )", line):
            name = begins[0]
        if "──► " in line:
            drawn[AgentState[name]] = frozenset(AgentState[to] for to in line.partition("──► ")[2].split(", "))
    assert drawn == TRANSITIONS


def test_every_state_leads_to_the_last_one_and_no_state_to_an_earlier_one():
    order = list(AgentState)
    for one, others in TRANSITIONS.items():
        assert others or one is AgentState.CLOSED
        assert all(order.index(other) > order.index(one) for other in others)


@pytest.mark.parametrize(("old", "new"), [(a, b) for a in AgentState for b in AgentState if b not in TRANSITIONS[a]])
def test_an_agent_refuses_any_other_transition(old, new):
    agent = object.__new__(Agent)
    agent.state = old
    with pytest.raises(AssertionError):
        agent.become(new)
