"""The agent holds the memory of a bounded number of groups, and remembers a bounded number of older ones."""

import os

import pytest

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.local_listener import new_token
from phalanx._comm.symmetric_memory.fd_server import FdServer
from phalanx._comm.symmetric_memory.memfd import memory
from phalanx._comm.symmetric_memory.memory import LocalRank, SymmetricMemory, open_as_leader
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx._job.agent.attempt import MAX_OBSERVED, FlightRecorders


def make_group(flights: FlightRecorders, name: str, lost: tuple[int, ...] = ()) -> SymmetricMemory:
    message = {"name": name, "world_size": 1, "ranks": [0], "pids": [os.getpid()]}
    with FdServer(new_token()) as counter:
        return open_as_leader(
            counter,
            [LocalRank(ProcessId.of_self(), frozenset({0}))],
            Deadline.after(10),
            lambda missing: None,
            lambda waited_s: None,
            register=lambda fd: flights.add(message, [os.dup(fd)], lost),
        )


@pytest.fixture
def flights():
    held = FlightRecorders()
    yield held
    held.close()


def test_a_group_that_is_over_is_let_go_and_remembered(flights: FlightRecorders) -> None:
    make_group(flights, "first").close()
    second = make_group(flights, "second")
    assert [observer.group_info.name for observer in flights.observed] == ["second"]
    assert [log.name for log in flights.logs()] == ["first", "second"]
    assert flights.logs()[0].ranks[0].left
    second.close()


def test_of_too_many_open_groups_the_newest_are_held(flights: FlightRecorders) -> None:
    memories = [make_group(flights, str(number)) for number in range(MAX_OBSERVED + 3)]
    assert len(flights.observed) == MAX_OBSERVED
    assert flights.observed[0].group_info.name == "3"
    assert [log.name for log in flights.logs()] == [str(number) for number in range(MAX_OBSERVED + 3)]
    for symm_mem in memories:
        symm_mem.close()


def test_of_a_group_that_has_lost_a_process_and_was_formed_anew_only_the_log_is_kept(flights: FlightRecorders) -> None:
    """An agent held the memory of the last 64 generations of an elastic job: those who were killed never leave."""
    first = make_group(flights, "first")
    second = make_group(flights, "second", (os.getpid(),))
    assert [observer.group_info.name for observer in flights.observed] == ["second"]
    assert [log.name for log in flights.logs()] == ["first", "second"]
    first.close()
    second.close()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"name": "x", "world_size": 1, "ranks": [0], "pids": []},
        {"name": "x", "world_size": 1, "ranks": None, "pids": [1]},
        {"name": "x", "world_size": 1, "ranks": [0], "pids": [1]},
    ],
)
def test_what_is_no_group_is_closed(flights: FlightRecorders, message: dict[str, object]) -> None:
    with memory("other", 1 << 16) as fd:
        copy = os.dup(fd)
        flights.add(message, [copy])
        assert not os.path.exists(f"/proc/self/fd/{copy}")
    assert flights.logs() == []
