"""A witness's vote lies in a register that all who ask change by turns; with real coordinators and a real etcd."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.coordination.etcd_server import find_free_ports, run_etcd
from tests.threads import map_in_threads

from phalanx._comm.control.key import Key
from phalanx._job.coordinator.service import Service
from phalanx._job.hosts.succession.config import Config, Electorate, Stamp, Term
from phalanx._job.hosts.succession.successor import WitnessCheck
from phalanx._job.hosts.succession.voter import ConfigAccepted, Reply, TermPromised, TermRefused
from phalanx._job.hosts.succession.witness.calls import WitnessCalls
from phalanx._job.hosts.succession.witness.etcd_register import EtcdRegister
from phalanx._job.hosts.succession.witness.witness import WITNESS, CoordinatorRegister, Witness, open_register
from phalanx.errors import AuthenticationError, CoordinationError

KEY = Key(bytes(32))


@pytest.fixture(params=["coordinator", "etcd"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a witness's vote may lie."""
    if request.param == "coordinator":
        with Service("127.0.0.1:0", KEY) as service:
            yield str(service.address)
    else:
        with run_etcd(tmp_path) as found:
            yield found


def make_config(term: Term, version: int) -> Config:
    voters = frozenset([0, 1, WITNESS])
    return Config(term, version, term[1], (1,), (Electorate(voters, term[1]),), ((1, "10.0.0.1:5"),))


def test_it_votes_as_a_host_does_and_forgets_a_job_that_is_over(address: str) -> None:
    witness = Witness(address, KEY, "job")
    witness.begin()
    first = make_config((1, 0), 3)
    assert witness.propose(first) == ConfigAccepted(WITNESS, (1, 0), 3)
    assert witness.solicit((2, 1)) == TermPromised(WITNESS, (2, 1), first)
    assert witness.propose(make_config((1, 0), 4)) == TermRefused(WITNESS, (2, 1))
    with contextlib.closing(Witness(address, KEY, "job")) as again:  # its asker repeats it
        assert again.solicit((2, 1)) == TermPromised(WITNESS, (2, 1), first)
    witness.begin()  # changes nothing
    assert witness.solicit((1, 0)) == TermRefused(WITNESS, (2, 1))
    witness.forget()
    witness.forget()
    witness.close()


def test_it_has_no_vote_in_a_job_of_which_it_knows_nothing(address: str) -> None:
    """It may have promised another host something, and forgotten it."""
    other = Witness(address, KEY, "another job")
    other.begin()
    witness = Witness(address, KEY, "job")
    with pytest.raises(CoordinationError, match="it does not know this job"):
        witness.solicit((2, 1))
    with pytest.raises(CoordinationError, match="it does not know this job"):
        witness.propose(make_config((1, 0), 1))
    witness.close()
    other.close()


def test_what_somebody_else_has_written_there_is_told(address: str) -> None:
    witness = Witness(address, KEY, "job")
    witness._open().write("phalanx/witness/job", b"", b"{}")
    with pytest.raises(CoordinationError, match="Phalanx has not written its value"):
        witness.solicit((2, 1))
    witness.close()


@pytest.mark.slow(but=("coordinator-0", "etcd-0"))
@pytest.mark.parametrize("seed", range(4))
def test_it_takes_nothing_back_whoever_asks_at_the_same_time(address: str, seed: int) -> None:
    """After a reply nothing of an earlier term is promised or accepted, for whatever was asked after that reply."""
    with contextlib.closing(Witness(address, KEY, "job")) as witness:
        witness.begin()
    heard: list[tuple[float, float, Term, Reply]] = []

    def ask(member: int) -> None:
        chance = random.Random(f"{seed} {member}")
        witness = Witness(address, KEY, "job")
        for count in range(1, 15):
            term = chance.randint(1, count), member
            asked_at = time.monotonic()
            if chance.random() < 0.5:
                reply = witness.solicit(term)
            else:
                reply = witness.propose(make_config(term, count))
            heard.append((asked_at, time.monotonic(), term, reply))
        witness.close()

    map_in_threads(ask, range(4))
    assert len(heard) == 4 * 14
    granted = [one for one in heard if not isinstance(one[3], TermRefused)]
    assert granted
    for _, answered_at, term, _ in granted:
        for asked_at, _, later, _ in granted:
            assert asked_at < answered_at or later >= term
    newest: dict[Stamp, Config] = {}
    for _, _, _, reply in heard:  # what is told of a term is what was accepted, and always the same
        if isinstance(reply, TermPromised) and reply.newest is not None:
            stamp = reply.newest.stamp
            assert stamp[0] <= reply.term
            assert newest.setdefault(stamp, reply.newest) == reply.newest


def test_a_coordinator_that_may_have_voted_and_forgot_it_is_not_asked_to_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer to the first write was lost, another host was promised something, and the coordinator restarted."""
    (port,) = find_free_ports(1)
    witness = Witness(f"127.0.0.1:{port}", KEY, "job")
    write = CoordinatorRegister.write

    def write_without_an_answer(self: CoordinatorRegister, name: str, expected: bytes, value: bytes) -> bool:
        write(self, name, expected, value)
        raise CoordinationError("no answer")

    with Service(f"127.0.0.1:{port}", KEY):
        with monkeypatch.context() as patched:
            patched.setattr(CoordinatorRegister, "write", write_without_an_answer)
            with pytest.raises(CoordinationError, match="no answer"):
                witness.begin()
        with contextlib.closing(Witness(f"127.0.0.1:{port}", KEY, "job")) as other:
            assert other.solicit((2, 1)) == TermPromised(WITNESS, (2, 1), None)
        witness.close()
    with Service(f"127.0.0.1:{port}", KEY):
        witness.begin()
        with pytest.raises(CoordinationError, match="it does not know this job"):
            witness.propose(make_config((1, 0), 1))
        witness.close()


def test_a_job_begins_at_an_etcd_that_did_not_answer_at_first(tmp_path: Path) -> None:
    (port,) = find_free_ports(1)
    witness = Witness(f"etcd://127.0.0.1:{port}", KEY, "job")
    with pytest.raises(CoordinationError, match="etcd does not answer"):
        witness.begin()
    with run_etcd(tmp_path, port) as address:
        assert address == witness.address
        witness.begin()
        assert witness.propose(make_config((1, 0), 1)) == ConfigAccepted(WITNESS, (1, 0), 1)
        witness.forget()


def test_of_two_that_write_in_place_of_the_same_value_one_succeeds(address: str) -> None:
    one, two = open_register(address, KEY), open_register(address, KEY)
    name, another = "phalanx/witness/name", "phalanx/witness/another"
    assert one.write(name, b"", b"1")
    assert not two.write(name, b"", b"2")
    assert two.read(name) == b"1"
    assert two.write(name, b"1", b"3")
    assert not one.write(name, b"1", b"4")
    assert not one.write(another, b"1", b"4")
    assert (one.read(name), one.read(another)) == (b"3", b"")
    two.delete(name)
    assert one.read(name) == b""
    one.close()
    two.close()


def test_the_leader_is_told_that_it_does_not_answer_once_and_that_it_does_again(tmp_path: Path) -> None:
    (port,) = find_free_ports(1)
    calls = WitnessCalls(Witness(f"127.0.0.1:{port}", KEY, "job"), is_new=True)

    def take() -> Reply | str:
        while True:
            for each in calls.receive():
                return each
            threading.Event().wait(0.01)

    calls.ask(make_config((1, 0), 1))
    said = take()
    assert isinstance(said, str)
    assert f"the witness at 127.0.0.1:{port} does not vote: " in said
    with Service(f"127.0.0.1:{port}", KEY):
        while True:  # as the succession does, until it has answered
            calls.ask(make_config((1, 0), 2))
            threading.Event().wait(0.05)
            if found := calls.receive():  # and not a second time that it does not answer
                break
        assert found[0] == f"the witness at 127.0.0.1:{port} votes"
        assert (found[1] if len(found) > 1 else take()) == ConfigAccepted(WITNESS, (1, 0), 2)
        calls.close()


def test_a_wrong_key_is_told() -> None:
    with Service("127.0.0.1:0", KEY) as service, pytest.raises(AuthenticationError):
        Witness(str(service.address), Key(bytes([1]) * 32), "job").begin()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", b"no HTTP\r\n\r\n", b""])
def test_what_is_no_etcd_is_told(answer: bytes) -> None:
    def serve(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.recv(1000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), name="phalanx-test-server")
        thread.start()
        with pytest.raises(CoordinationError, match="etcd"):
            EtcdRegister(f"etcd://127.0.0.1:{server.getsockname()[1]}").read("name")
        thread.join()


@pytest.mark.parametrize("answers", [True, False])
def test_a_host_that_stands_by_is_told_at_once_that_it_cannot_ask_the_witness(answers: bool) -> None:
    with Service("127.0.0.1:0", KEY) as service:
        address = str(service.address)
        trial = WitnessCheck(Witness(address, KEY if answers else Key(bytes([1]) * 32), "job"))
        trial._thread.join()
        said = trial.receive()
        trial.close()
    if answers:
        assert said == []
    else:
        assert f"the witness at {address} does not answer this host: " in said[0]
