"""A witness's vote lies in a Lease of Kubernetes, which others change, too. `kubernetes_api.py` is the API server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.coordination import kubernetes_api
from tests.coordination.kubernetes_api import NAMESPACE, TOKEN, Answer, ApiServer, LeaseStore

from phalanx.coordination.succession.config import Config, Electorate, Term
from phalanx.coordination.succession.voter import Accepted, Promised, Refused, Reply
from phalanx.coordination.witness import json_service, service_account
from phalanx.coordination.witness.json_service import JsonService
from phalanx.coordination.witness.lease_register import ANNOTATION, LeaseRegister
from phalanx.coordination.witness.witness import WITNESS, Witness
from phalanx.errors import CoordinationError

ADDRESS = "lease://phalanx"
_ORDERS = 100
Pod = tuple[ApiServer, Path]


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    """This process is a pod, and there is an API server."""
    with kubernetes_api.serving(tmp_path) as (server, account):
        kubernetes_api.enter_pod(monkeypatch, server, account)
        yield server, account


def make_config(term: Term) -> Config:
    voters = frozenset([0, 1, WITNESS])
    return Config(term, 1, term[1], (1,), (Electorate(voters, term[1]),), ((1, "10.0.0.1:5"),))


def test_the_lease_is_created_and_shows_who_wrote_last(pod: Pod) -> None:
    register = LeaseRegister(f"lease://{NAMESPACE}/phalanx")
    assert register.write("job", b"", b'{"a": "\xff"}')
    assert LeaseRegister(ADDRESS).read("job") == b'{"a": "\xff"}'  # the pod's own namespace
    lease = pod[0].store.leases[NAMESPACE, "phalanx"]
    assert lease["spec"]["holderIdentity"] == f"phalanx_{socket.gethostname()}"
    assert lease["spec"]["renewTime"].endswith("Z")
    assert list(json.loads(lease["metadata"]["annotations"][ANNOTATION])) == ["job"]
    assert pod[0].store.asked == [("GET", 404), ("POST", 201), ("GET", 200)]


def test_what_others_have_put_into_the_lease_stays_there(pod: Pod) -> None:
    store = pod[0].store
    metadata = {"name": "phalanx", "labels": {"team": "vision"}, "annotations": {"owner": "ada"}}
    made = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
    path = f"{kubernetes_api.PREFIX}{NAMESPACE}/leases"
    assert store.answer("POST", path, f"Bearer {TOKEN}", made)[0] == 201
    register = LeaseRegister(ADDRESS)
    assert register.write("job", b"", b"1")
    assert register.write("another job", b"", b"2")
    register.delete("job")
    found = store.leases[NAMESPACE, "phalanx"]["metadata"]
    assert found["labels"] == {"team": "vision"}
    assert found["annotations"] == {"owner": "ada", ANNOTATION: '{"another job": "2"}'}
    assert found["managedFields"]


def test_a_lease_by_which_others_elect_their_leader_is_left_alone(pod: Pod) -> None:
    path = f"{kubernetes_api.PREFIX}{NAMESPACE}/leases"
    made = {"metadata": {"name": "phalanx"}, "spec": {"holderIdentity": "operator-7"}}
    body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **made}
    assert pod[0].store.answer("POST", path, f"Bearer {TOKEN}", body)[0] == 201
    with pytest.raises(CoordinationError, match="the Lease ml/phalanx is held by operator-7, not by Phalanx"):
        LeaseRegister(ADDRESS).write("job", b"", b"1")


@pytest.mark.parametrize("text", ["rubbish", "[]", '{"job": 1}', '{"job": "\\u4e00"}'])
def test_an_annotation_that_makes_no_sense_is_told(pod: Pod, text: str) -> None:
    register = LeaseRegister(ADDRESS)
    assert register.write("job", b"", b"1")
    pod[0].store.leases[NAMESPACE, "phalanx"]["metadata"]["annotations"][ANNOTATION] = text
    with pytest.raises(CoordinationError, match="has no annotation phalanx/witness as Phalanx writes it"):
        register.read("job")


@pytest.mark.parametrize(("method", "created"), [("POST", False), ("PUT", True)])
def test_a_writer_that_another_one_overtook_looks_whether_its_own_value_has_changed(
    pod: Pod, method: str, created: bool
) -> None:
    """409: another job has written, then somebody to the same job."""
    server, other, register = pod[0], LeaseRegister(ADDRESS), LeaseRegister(ADDRESS)
    if created:
        assert other.write("third job", b"", b"0")
    overtaken: list[str] = []

    def overtake(name: str) -> None:
        def meddle(asked: str, do: Callable[[], Answer]) -> Answer:
            if asked == method:
                server.meddler = None
                assert other.write(name, b"", b"2")
                overtaken.append(name)
            return do()

        server.meddler = meddle

    overtake("another job")
    assert register.write("job", b"", b"1")
    method = "PUT"
    overtake("one more job")
    assert not register.write("one more job", b"", b"1")
    assert overtaken == ["another job", "one more job"]
    assert [code for _, code in server.store.asked].count(409) == 2
    assert [register.read(name) for name in ("job", "another job", "one more job")] == [b"1", b"2", b"2"]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_lease_that_was_deleted_has_no_vote(pod: Pod, is_made_again: bool) -> None:
    """Between GET and PUT, so that the PUT comes to none, or to another one of that name."""
    server, witness = pod[0], Witness(ADDRESS, None, "job")

    def delete(method: str, do: Callable[[], Answer]) -> Answer:
        if method == "PUT":
            server.meddler = None
            server.store.leases.clear()
            if is_made_again:
                assert LeaseRegister(ADDRESS).write("another job", b"", b"1")
        return do()

    witness.begin()
    server.meddler = delete
    with pytest.raises(CoordinationError, match="it knows nothing of this job"):
        witness.propose(make_config((1, 0)))
    assert ("PUT", 409) in server.store.asked


def test_the_answer_to_a_write_that_was_done_is_lost_and_the_step_is_taken_once(pod: Pod) -> None:
    server, witness = pod[0], Witness(ADDRESS, None, "job")

    def lose(method: str, do: Callable[[], Answer]) -> Answer | None:
        answer = do()
        if method == "GET":
            return answer
        server.meddler = None
        return None

    server.meddler = lose
    with pytest.raises(CoordinationError, match="Kubernetes does not answer"):
        witness.begin()
    witness.begin()
    server.meddler = lose
    with pytest.raises(CoordinationError, match="Kubernetes does not answer"):
        witness.solicit((2, 1))
    version = server.store.leases[NAMESPACE, "phalanx"]["metadata"]["resourceVersion"]
    assert witness.solicit((2, 1)) == Promised(WITNESS, (2, 1), None)
    assert server.store.leases[NAMESPACE, "phalanx"]["metadata"]["resourceVersion"] == version
    assert witness.propose(make_config((1, 0))) == Refused(WITNESS, (2, 1))


@pytest.mark.parametrize("when", ["before it answers", "within its answer", "within TLS"])
def test_a_server_that_hangs_is_left_in_time(pod: Pod, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_service, "_ANSWER_S", 0.3)
    over = threading.Event()
    if when == "before it answers":
        pod[0].meddler = lambda method, do: (over.wait(), None)[1]
        with pytest.raises(CoordinationError, match="Kubernetes does not answer within"):
            LeaseRegister(ADDRESS).read("job")
        over.set()
        return

    def serve(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.settimeout(0.02)
            while not over.is_set():
                with contextlib.suppress(OSError):
                    connection.recv(1000)
                with contextlib.suppress(OSError):  # a byte from time to time keeps a socket's own timeout away
                    connection.send(b"H" if when == "within its answer" else b"")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), name="phalanx-test-server")
        thread.start()
        tls = json_service.make_tls() if when == "within TLS" else None
        with pytest.raises(CoordinationError, match="Kubernetes does not answer within"):
            JsonService("Kubernetes", "127.0.0.1", server.getsockname()[1], tls).call("GET", "/")
        over.set()
        thread.join()


@pytest.mark.parametrize("verb", ["get", "create", "update"])
def test_a_role_that_lacks_a_verb_is_told_with_all_that_are_needed(pod: Pod, verb: str) -> None:
    pod[0].store.verbs.remove(verb)
    register = LeaseRegister(ADDRESS)
    if verb == "update":
        assert register.write("another job", b"", b"1")
    with pytest.raises(CoordinationError) as caught:
        register.write("job", b"", b"1")
    said = str(caught.value)
    assert f'cannot {verb} resource "leases" in API group "coordination.k8s.io"' in said
    assert "needs a Role in namespace ml with the verbs get, create and update on leases" in said
    assert len(said.splitlines()) == 1  # a host shows the first line


def test_the_token_is_read_again_for_each_call(pod: Pod) -> None:
    server, account = pod
    register = LeaseRegister(ADDRESS)
    assert register.write("job", b"", b"1")
    server.store.tokens = {"the-second-token"}
    with pytest.raises(CoordinationError, match=r"answers 401 .*: Unauthorized \(it does not take the token in "):
        register.read("job")
    (account / "token").write_text("the-second-token\n")
    assert register.read("job") == b"1"


def test_a_namespace_that_is_not_there_is_told(pod: Pod) -> None:
    with pytest.raises(CoordinationError, match='answers 404 for the Lease vision/phalanx: namespaces "vision" not'):
        LeaseRegister("lease://vision/phalanx").write("job", b"", b"1")


def test_a_server_that_another_ca_has_signed_is_told(pod: Pod, tmp_path: Path) -> None:
    server, account = pod
    (tmp_path / "another").mkdir()
    ca, _, _ = kubernetes_api.make_certificates(tmp_path / "another", "127.0.0.1")
    (account / "ca.crt").write_bytes(ca.read_bytes())
    with pytest.raises(CoordinationError, match=r"the certificate of Kubernetes is not accepted: .*ca\.crt, has not"):
        LeaseRegister(ADDRESS).read("job")
    assert server.store.asked == []


def test_a_server_that_is_not_there_is_told(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(free.getsockname()[1]))
    with pytest.raises(CoordinationError, match=r"Kubernetes does not answer: .*refused"):
        LeaseRegister(ADDRESS).read("job")


def test_what_is_no_pod_or_has_no_service_account_is_told(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    account = pod[1]
    for name in ("namespace", "ca.crt"):
        os.rename(account / name, account / "away")
        with pytest.raises(CoordinationError, match=f"{name} cannot be read: .*automountServiceAccountToken"):
            LeaseRegister(ADDRESS)
        os.rename(account / "away", account / name)
    (account / "ca.crt").write_text("rubbish")
    with pytest.raises(CoordinationError, match=r"ca\.crt cannot be read"):
        LeaseRegister(ADDRESS)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(CoordinationError, match="this host is no pod of Kubernetes"):
        LeaseRegister(ADDRESS)


# Two hosts ask at the same time, their requests in an order that is drawn.


class NoAnswer(CoordinationError):
    """The answer to a request that was done is lost."""


@dataclass
class Turns:
    """Two threads of which one goes at a time: each waits before it asks the API server, until it is told to go on.

    `chance` draws who goes on at each turn, and whether the answer is lost of what it asks then.
    """

    chance: random.Random
    store: LeaseStore = field(default_factory=LeaseStore)
    waiting: dict[int, str] = field(default_factory=dict)  # the methods of those that wait
    ended: set[int] = field(default_factory=set)
    told: tuple[int, bool] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    mine: threading.local = field(default_factory=threading.local)

    def call(self, method: str, path: str, body: Any = None, headers: Any = None) -> Answer:
        """Ask the API server in turn; before the threads run, at once."""
        is_lost, me = False, getattr(self.mine, "number", None)
        with self.changed:
            if me is not None:
                self.waiting[me] = method
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.told is not None and self.told[0] == me)
                assert self.told is not None
                is_lost, self.told = self.told[1], None
                del self.waiting[me]
            answer = self.store.answer(method, path, headers["Authorization"], body)
        if is_lost:
            raise NoAnswer("no answer")
        return answer

    def run(self, host: Callable[[int], None]) -> list[tuple[int, bool]]:
        """Have both hosts ask, to the end; return who went on at each turn, and whether the answer was lost."""

        def run_one(number: int) -> None:
            self.mine.number = number
            try:
                host(number)
            finally:
                with self.changed:
                    self.ended.add(number)
                    self.changed.notify_all()

        threads = [threading.Thread(target=run_one, args=(n,), name=f"phalanx-test-{n}") for n in range(2)]
        for thread in threads:
            thread.start()
        gone = []
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.told is None and len(self.waiting) + len(self.ended) == 2)
                if not self.waiting:
                    break
                number = self.chance.choice(sorted(self.waiting))
                self.told = number, self.waiting[number] != "GET" and self.chance.random() < 0.2
                gone.append(self.told)
                self.changed.notify_all()
        for thread in threads:
            thread.join()
        return gone


def ask_in_many_orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have two hosts ask for the lead in many orders of their requests; yield what was wrong."""
    account = service_account.ServiceAccount("10.0.0.1", 443, Path())
    monkeypatch.setattr(service_account.ServiceAccount, "find", lambda environ: account)
    monkeypatch.setattr(service_account.ServiceAccount, "namespace", NAMESPACE)
    monkeypatch.setattr(service_account.ServiceAccount, "token", TOKEN)
    monkeypatch.setattr(service_account.ServiceAccount, "tls", lambda self: None)
    orders = set()
    for seed in range(_ORDERS):
        turns = Turns(random.Random(seed))
        heard: dict[int, list[Reply]] = {0: [], 1: []}

        def host(number: int, heard: dict[int, list[Reply]] = heard) -> None:
            """Ask for votes and propose a config, as a host does that wants to lead."""
            term = 2, number
            witness = Witness(ADDRESS, None, "job")
            heard[number].append(repeat(lambda: witness.solicit(term)))
            if isinstance(heard[number][0], Promised):
                heard[number].append(repeat(lambda: witness.propose(make_config(term))))

        monkeypatch.setattr(JsonService, "call", lambda self, *args, turns=turns: turns.call(*args))
        Witness(ADDRESS, None, "job").begin()
        orders.add(tuple(turns.run(host)))
        if why := find_mistake(heard):
            yield f"{why}: {heard}"
    assert len(orders) > _ORDERS / 2


def repeat(ask: Callable[[], Reply]) -> Reply:
    """Ask again where the answer was lost, as a successor does."""
    while True:
        with contextlib.suppress(NoAnswer):
            return ask()


def find_mistake(heard: dict[int, list[Reply]]) -> str:
    """Return what the witness has taken back. Host 1 asks for the later term."""
    first, second = heard[0], heard[1]
    if not (isinstance(second[0], Promised) and isinstance(second[1], Accepted)):
        return "the later term was refused"
    if isinstance(first[0], Promised) and first[0].newest is not None:
        return "the earlier term was promised after the later one was accepted"
    if len(first) > 1 and isinstance(first[1], Accepted) and second[0].newest != make_config((2, 0)):
        return "the later term was promised, and the earlier one accepted"
    return ""


def test_of_two_hosts_that_want_to_lead_none_has_taken_back_what_the_other_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(ask_in_many_orders(monkeypatch)) == []


def test_a_register_that_writes_over_what_it_has_not_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake is put in: after a 409 the newest Lease is written to, whatever value it has."""

    def write(self: LeaseRegister, name: str, expected: bytes, value: bytes) -> bool:
        while not self._put(lease := self._get(), {**self._values_of(lease), name: value}):
            pass
        return True

    monkeypatch.setattr(LeaseRegister, "write", write)
    assert any(
        "the later term was promised, and the earlier one accepted" in one for one in ask_in_many_orders(monkeypatch)
    )
