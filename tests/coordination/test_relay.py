"""A relay: what its clients see is what they would see at the coordinator itself."""

import contextlib
import random
import select
import threading
import time

import pytest
from tests.coordination.cable import Cable

from phalanx._comm.backend.coordination_store import CoordinationStore
from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._comm.control.wire import WRITE_ONCE, Op, pack, pack_number
from phalanx._comm.diagnostics.failure_signals import FailureSignals
from phalanx._job.coordinator.coordinator import FORGOTTEN_AFTER_S, Coordinator
from phalanx._job.coordinator.relay import Relay
from phalanx._job.coordinator.service import Service
from phalanx._job.coordinator.session import DirectRoute
from phalanx.errors import ClosedError, CoordinationError, DeadlineError

KEY = Key(bytes(range(32)))


@pytest.fixture
def service():
    with Service("127.0.0.1:0", KEY, job="job 1", lost_after_s=2.0) as made:
        yield made


@pytest.fixture
def relay(service):
    made = Relay(f"tcp://{service.address}", KEY)
    yield made
    made.close()


def test_a_relay_sleeps_again_after_it_was_redirected(service, relay):
    """What woke it was never read, since pyzmq's poll returns descriptors for what is no socket of ZeroMQ's: from then
    on it kept a processor busy until the job's end.
    """
    relay.redirect(f"tcp://{service.address}", b"")
    wait_until(lambda: not select.select([relay._wakeup], [], [], 0)[0])


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 14, (1 << 14) + 1, 1 << 20])
def test_values_of_all_lengths_come_by_every_way(service, relay, num_bytes):
    """Long ones are not copied for each who waits for them."""
    value = random.Random(num_bytes).randbytes(num_bytes)
    with contextlib.ExitStack() as stack:
        ways = [(service.local, None), (str(service.address), KEY), (relay.path, None), (relay.path, None)]
        clients = [stack.enter_context(Client(*way)) for way in ways]
        waiting = [in_thread(lambda client=client: client.get("key")) for client in clients]
        wait_until(lambda: sum(len(each.parked) for each in list(service.coordinator.sessions.values())) == 4)
        clients[0].set("key", value)
        for thread, results in waiting:
            thread.join()
            assert results == [value]
        assert [client.get("key") for client in clients] == [value] * 4


def in_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), name="phalanx-test-caller")
    thread.start()
    return thread, results


def wait_until(condition):
    while not condition():
        time.sleep(0.005)


def requests_of(service):
    """What the coordinator is asked from here on."""
    asked = []
    handle = service.coordinator._handle

    def note(session, message):
        asked.append((message.what, message.number))
        return handle(session, message)

    service.coordinator._handle = note
    return asked


@pytest.mark.slow
def test_random_calls_through_a_relay_are_answered_as_without_one(service, relay):
    """The same calls at the coordinator's own socket are the anchor."""
    for seed in range(20):
        random_ = random.Random(seed)
        with Client(relay.path) as far, Client(service.local) as near:
            for _ in range(60):
                name = random_.choice("abc")
                value = random_.randbytes(random_.choice((0, 1, 10, 70_000)))
                amount = random_.randrange(9)
                call = random_.choice((
                    lambda c, k, n=name, v=value: c.set(k + n, v),
                    lambda c, k, n=name: c.get(k + n, 1.0) if c.check([k + n]) else None,
                    lambda c, k, n=name, v=value: c.compare_set(k + n, b"", v),
                    lambda c, k, n=name, v=value: c.append(k + n, v),
                    lambda c, k, n=name: c.delete_key(k + n),
                    lambda c, k, a=amount: c.add(k + "number", a),
                    lambda c, k, v=value: c.queue_push(k + "queue", v),
                    lambda c, k: c.queue_pop(k + "queue", False),
                    lambda c, k: c.queue_len(k + "queue"),
                    lambda c, k: [name.removeprefix(k) for name in c.list_keys(k)],
                    lambda c, k, n=name: c.multi_get([k + n], 1.0) if c.check([k + n]) else None,
                ))  # fmt: skip
                assert call(far, f"far{seed}/") == call(near, f"near{seed}/")


def test_clients_of_one_relay_are_one_connection_of_the_coordinator(service, relay):
    clients = [Client(relay.path) for _ in range(20)]
    assert service.num_open == 1
    assert [client.job for client in clients] == ["job 1"] * 20
    waits = [in_thread(lambda c=client: c.barrier("all", 20, 20.0)) for client in clients]
    for thread, _ in waits:
        thread.join()
    for client in clients:
        client.close()


def test_a_value_that_is_written_once_is_fetched_once_for_all(service, relay):
    key, value = f"facts{WRITE_ONCE}", bytes(300_000)
    clients = [Client(relay.path) for _ in range(8)]
    asked = requests_of(service)
    waits = [in_thread(lambda c=client: c.get(key, 20.0)) for client in clients]
    wait_until(lambda: any(what == Op.GET for what, _ in asked))
    with Client(service.local) as near:
        near.set(key, value)
    for thread, results in waits:
        thread.join()
        assert results == [value]
    assert clients[0].get(key, 20.0) == value  # from what the relay keeps
    assert len({number for what, number in asked if what == Op.GET}) == 1  # a request that is woken is handled twice
    for client in clients:
        client.close()


def test_ranks_of_a_host_wait_together_for_the_next_failure(service, relay):
    """Each had a request of its own at the coordinator, which it sent again every twenty seconds."""
    stores = [CoordinationStore(relay.path) for _ in range(8)]
    listening = [FailureSignals(store, WRITE_ONCE) for store in stores]
    assert [each.receive() for each in listening] == [set()] * 8
    wait_until(lambda: any(s.parked for s in list(service.coordinator.sessions.values())))
    assert len(stores[0].list_keys("")) == 0  # whatever was asked before has come
    assert sum(len(s.parked) for s in service.coordinator.sessions.values()) == 1
    with contextlib.closing(CoordinationStore(service.local)) as near:
        FailureSignals(near, WRITE_ONCE).send("group")
    for each in listening:
        found = set()
        wait_until(lambda each=each, found=found: found.update(each.receive()) or found)
        assert found == {"group"}
        each.close()
    for store in stores:
        store.close()


def test_a_wait_for_such_a_value_can_be_given_up(service, relay):
    with Client(relay.path) as one, Client(relay.path) as other:
        thread, results = in_thread(lambda: other.get(f"late{WRITE_ONCE}", 20.0))
        with pytest.raises(DeadlineError, match="wait timeout"):
            one.get(f"late{WRITE_ONCE}", 0.1)
        one.set(f"late{WRITE_ONCE}", b"now")
        thread.join()
        assert results == [b"now"]
        with pytest.raises(DeadlineError):
            one.get(f"never{WRITE_ONCE}", 0.1)
        wait_until(lambda: not any(s.parked for s in list(service.coordinator.sessions.values())))


def test_an_item_whose_taker_died_is_for_another_one(service, relay):
    """It waits at the coordinator; its process ends without a word, and then the item comes."""
    dying = Client(relay.path)

    def pop():
        with pytest.raises(ClosedError):
            dying.queue_pop("queue", True, 30.0)

    thread, _ = in_thread(pop)
    wait_until(lambda: any(s.parked for s in list(service.coordinator.sessions.values())))
    dying._transmit_raw = lambda message: None  # it does not say that it waits no more
    dying.close()
    thread.join()
    with Client(service.local) as near:
        near.queue_push("queue", b"item")
        assert near.queue_pop("queue", True, 10.0) == b"item"


def test_the_question_of_a_client_that_died_is_asked_no_more(service, relay):
    dying = Client(relay.path)

    def get():
        with pytest.raises(ClosedError):
            dying.multi_get(["never"], 30.0)

    thread, _ = in_thread(get)
    wait_until(lambda: any(s.parked for s in list(service.coordinator.sessions.values())))
    dying._transmit_raw = lambda message: None
    dying.close()
    thread.join()

    def is_forgotten():
        relay._requests.resume()  # as if much time had passed
        return not any(s.parked for s in list(service.coordinator.sessions.values()))

    wait_until(is_forgotten)


def test_after_a_cut_what_was_asked_is_asked_again(service):
    line = Cable(service.address.port)
    relay = Relay(f"tcp://{line.address}", KEY)
    with Client(relay.path) as client, Client(service.local) as near:
        client.set("before", b"1")
        thread, results = in_thread(lambda: client.get("later", 30.0))
        once, once_results = in_thread(lambda: client.get(f"later{WRITE_ONCE}", 30.0))
        wait_until(lambda: sum(len(s.parked) for s in list(service.coordinator.sessions.values())) == 2)
        line.cut()
        near.set("later", b"2")
        near.set(f"later{WRITE_ONCE}", b"3")
        thread.join()
        once.join()
        assert (results, once_results) == ([b"2"], [b"3"])
        assert client.add("n", 1) == 1
    relay.close()
    line.close()


def test_what_ranks_of_a_lost_host_took_from_a_queue_last_is_there_again_and_they_take_no_more(service):
    """Their calls waited for another minute, and what others put into the queue went to them."""
    with Client(service.local) as near, Client(str(service.address), KEY) as agent:
        near.join({"host": "first"})
        agent.join({"host": "second"}, watch=())
        relay = Relay(f"tcp://{service.address}", KEY, lambda: agent.member)
        with Client(relay.path) as one, Client(relay.path) as two, Client(relay.path) as three:
            for item in ("done", "begun"):
                near.queue_push("work", item)
            assert [one.queue_pop("work"), two.queue_pop("work")] == [b"done", b"begun"]
            one.set("result", "of what is done")
            thread, results = in_thread(lambda: queue_pop_or_error(three))
            sessions = service.coordinator.sessions
            wait_until(lambda: any(each.parked for each in list(sessions.values())))
            wait_until(lambda: any(each.relay_owner == agent.member for each in list(sessions.values())))
            near.expel(agent.member, "it is cut off")
            assert near.queue_pop("work") == b"begun"
            near.queue_push("work", "new")
            assert near.queue_pop("work") == b"new"
            assert near.queue_len("work") == 0
            relay.close()
            thread.join()
            assert results == [None]


def test_the_coordinator_knows_whose_a_relay_is_also_after_a_long_silence():
    """After ten minutes without a request of a rank it had forgotten: what they took last was lost with their host."""
    coordinator = Coordinator(lost_after_s=9.0)
    agent, relay, other = DirectRoute(1, b"agent"), DirectRoute(1, b"relay"), DirectRoute(0, b"other")
    coordinator.handle(agent, pack(Op.JOIN, 1, b"{}", b"all"), 0.0)
    coordinator.handle(relay, pack(Op.RELAY_OWNER, 0, pack_number(0)), 0.0)
    now = 2 * FORGOTTEN_AFTER_S
    coordinator.handle(agent, pack(Op.HEARTBEAT, 0, pack_number(0), b""), now)
    coordinator.tick(now)
    coordinator.handle(other, pack(Op.QUEUE_PUSH, 1, b"q", b"work"), now)
    coordinator.handle(relay, pack(Op.RELAY, 0, b"rank", pack(Op.QUEUE_POP, 1, b"q", b"1")), now)
    assert coordinator.store.queue_len(b"q") == 0
    coordinator.tick(now + 10.0)
    assert not list(coordinator.members)
    assert coordinator.store.queue_len(b"q") == 1
    coordinator.tick(now + 10.0 + FORGOTTEN_AFTER_S + 1.0)
    assert not coordinator.sessions


def queue_pop_or_error(client):
    with contextlib.suppress(CoordinationError):
        return client.queue_pop("work", timeout=60.0)
    return None


def test_clients_of_a_host_that_joins_again_are_those_of_its_new_member(service):
    with Client(service.local) as near, Client(str(service.address), KEY) as agent:
        near.join({"host": "first"})
        agent.join({"host": "second"}, watch=())
        relay = Relay(f"tcp://{service.address}", KEY, lambda: agent.member)
        with contextlib.closing(relay), Client(relay.path) as rank:
            near.queue_push("work", "begun")
            assert rank.queue_pop("work") == b"begun"
            before = agent.member
            agent.leave()
            agent.join({"host": "second"}, watch=())
            sessions = service.coordinator.sessions
            wait_until(lambda: any(each.relay_owner == agent.member for each in list(sessions.values())))
            assert agent.member != before
            assert near.queue_len("work") == 0
            near.expel(agent.member, "it is lost")
            assert near.queue_pop("work") == b"begun"


@pytest.mark.slow
def test_who_asks_hears_that_the_relay_has_gone(service):
    relay = Relay(f"tcp://{service.address}", KEY)
    with Client(relay.path) as client:
        client.set("a", b"1")
        relay.close()
        with pytest.raises(CoordinationError, match="the connection was cut"):
            client.get("b", 60.0)


def test_a_relay_with_another_key_is_not_let_in(service):
    relay = Relay(f"tcp://{service.address}", Key(bytes(32)))
    with pytest.raises(DeadlineError):
        Client(relay.path, timeout=1.0)
    relay.close()


def test_a_member_may_join_through_a_relay(service, relay):
    with Client(service.local) as near, Client(relay.path) as far:
        near.join({"host": "first"})
        number = far.join({"host": "second"}, watch=(0,))
        assert [(event.kind, event.member) for event in near.wait_event(10.0)] == [("joined", number)]
        near.post(number, b"hello")
        assert [event.body for event in far.wait_event(10.0)] == [b"hello"]
        near.leave("done")
        assert [(event.kind, event.member) for event in far.wait_event(10.0)] == [("left", 0)]


def test_of_all_who_come_only_those_who_watch_a_member_hear_of_it(service):
    with Client(service.local) as first, Client(service.local) as second, Client(service.local) as third:
        first.join({})
        second.join({}, watch=(0,))
        third.join({}, watch=())
        heard = []
        while len(heard) < 2:
            heard += [event.member for event in first.wait_event(10.0)]
        assert heard == [1, 2]
        third.leave()
        first.leave()
        assert [(event.kind, event.member) for event in second.wait_event(10.0)] == [("left", 0)]
        assert third.receive_events() == []
