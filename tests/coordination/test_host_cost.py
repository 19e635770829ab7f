"""A start of a group costs the coordinator as much for eight ranks of a host as for one."""

import threading

import pytest
from tests.threads import map_in_threads
from torch.distributed import PrefixStore

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.coordination_store import CoordinationStore
from phalanx._comm.control.client import Client
from phalanx._comm.control.pending_call import PendingCall
from phalanx._comm.control.wire import Status, pack, unpack
from phalanx._comm.engines.gloo import GlooAddresses
from phalanx._comm.rendezvous import bootstrap
from phalanx._comm.rendezvous.rank_info import RankInfo
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.host_requests import HostRequests
from phalanx._job.coordinator.session import Direct


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Let no rank look after the others, which it does four times a second: on a busy machine that counted as cost."""
    monkeypatch.setattr(bootstrap, "_CHECK_PROCESSES_S", 1000.0)


class Job:
    """Hosts whose ranks are threads, and a coordinator that answers when each rank waits for an answer.

    So ranks of a host ask at the same time, as they do where the coordinator has much to do.
    """

    def __init__(self, num_hosts, ranks_per_host):
        self.size, self._ranks_per_host = num_hosts * ranks_per_host, ranks_per_host
        self._coordinator = Coordinator()
        self._hosts = [HostRequests() for _ in range(num_hosts)]
        self._calls = {}
        self._awaited = set()
        self._num_running = self.size
        self._lock = threading.Lock()
        self.num_asked = 0
        handle = self._coordinator._handle

        def count(session, message):
            self.num_asked += 1
            return handle(session, message)

        self._coordinator._handle = count

    def ask(self, rank, call):
        with self._lock:
            self._calls[b"%d" % rank, call.number] = call
            self._hosts[rank // self._ranks_per_host].take(b"%d" % rank, call.message)

    def wait(self, call):
        """Let a rank wait until its call is answered."""
        with self._lock:
            if not call.is_over:
                self._awaited.add(call)
                self.pause()
        assert call.wake.acquire(timeout=60.0)

    def pause(self):
        """A rank waits, or has ended; if it was the last that ran, all that was asked is answered."""
        self._num_running -= 1
        while not self._num_running and self._calls:
            envelopes = [(host, frame) for host in self._hosts for frame in host.take_outgoing(0.0)]
            for host, frame in envelopes:
                assert self._coordinator.handle(Direct(1, b"%d" % self._hosts.index(host)), frame, 0.0)
            for session, answers in self._coordinator.take_outgoing():
                _, identity = session.route.relay
                frame = pack(Status.RELAYED, 0, session.route.route, b"".join(answers))
                self._hosts[int(identity)].hear(frame, 0.0)
            handed_over = [each for host in self._hosts for each in host.take_answers()]
            assert envelopes or handed_over, "all wait, and nothing is asked"
            for route, answers in handed_over:
                for status, number, fields in unpack(answers):
                    if status != Status.PARKED:
                        call = self._calls.pop((route, number))
                        call.answer, call.fields = status, fields
                        self._num_running += call in self._awaited
                        self._awaited.discard(call)
                        call.wake.release()

    def run(self, play):
        """Let each rank do `play(store, rank)`; return what each returned."""

        def come(rank):
            store = CoordinationStore("", client=Rank(self, rank))
            found = play(PrefixStore("default_pg/", store), rank)
            with self._lock:
                self.pause()
            return found

        return map_in_threads(come, range(self.size))


class Rank(Client):
    """A client of such a coordinator."""

    def __init__(self, job, rank):
        self._job, self._rank, self._number, self._is_closed, self.timeout = job, rank, 0, False, 60.0
        self.address = "nowhere"

    def _begin(self, what, *fields, deadline):
        self._number += 1
        call = PendingCall(self._number, what, pack(what, self._number, *fields))
        call.wake = threading.Lock()
        call.wake.acquire()
        self._job.ask(self._rank, call)
        return call

    def _begin_all(self, requests, deadline):
        return [self._begin(what, *fields, deadline=deadline) for what, fields in requests]

    def _await(self, call, deadline):
        self._job.wait(call)

    def _look(self, call):
        pass

    def _end(self, call):
        assert call.is_over

    def _call(self, what, *fields, deadline=None, waits_for=()):
        call = self._begin(what, *fields, deadline=deadline)
        self._await(call, deadline)
        return call.result("the coordinator")


def num_asked(num_hosts, ranks_per_host):
    """What the start of one group of them asks of the coordinator."""
    job = Job(num_hosts, ranks_per_host)

    def start(store, rank):
        host = f"host {rank // ranks_per_host}"
        info = RankInfo(host, host, "", ProcessId.of_self(), frozenset(), 1)
        met = bootstrap.exchange(store, rank, job.size, info, "0", Deadline.after(60.0))
        addresses = GlooAddresses(PrefixStore("gloo", store), rank, job.size)
        addresses.set(f"0/{rank}", bytes([rank]) * 100)
        return [one.host for one in met.infos], [addresses.get(f"0/{other}") for other in range(job.size)]

    hosts = [f"host {rank // ranks_per_host}" for rank in range(job.size)]
    assert job.run(start) == [(hosts, [bytes([rank]) * 100 for rank in range(job.size)])] * job.size
    return job.num_asked


@pytest.mark.parametrize("num_hosts", [1, 4])
def test_eight_ranks_of_a_host_cost_hardly_more_than_one(num_hosts):
    one, eight = num_asked(num_hosts, 1), num_asked(num_hosts, 8)
    assert eight <= one + 10


@pytest.mark.slow
def test_the_cost_of_a_start_grows_as_the_number_of_hosts():
    four, forty = num_asked(4, 4), num_asked(40, 4)
    assert forty <= 11 * four
