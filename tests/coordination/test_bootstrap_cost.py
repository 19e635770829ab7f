"""A start asks the store for as much per rank, however many ranks there are."""

import json
import random
import threading
from dataclasses import replace

import pytest
from torch.distributed import PrefixStore

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.coordination_store import CoordinationStore
from phalanx._comm.control.wire import Op
from phalanx._comm.rendezvous import bootstrap
from phalanx._comm.rendezvous.bootstrap import Bootstrap, exchange
from phalanx._comm.rendezvous.rank_info import RankArrival, RankInfo, host_identity, pack_infos, unpack_infos
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx._job.coordinator.service import Service

INFO = RankInfo(host_identity(), "here", "", ProcessId.of_self(), frozenset(), 1)


@pytest.fixture
def store():
    with Service() as service:
        made = CoordinationStore(service.local)
        handle, made.num_requests = service.coordinator._handle, 0

        def count(session, message):
            made.num_requests += 1
            return handle(session, message)

        service.coordinator._handle = count
        yield made
        made.close()


def come_all(store, ranks, world_size):
    """Say what these ranks say when they arrive."""
    for rank in ranks:
        index = store.add("0/came", 1) - 1
        store.set(f"0/rank/{index}", json.dumps(RankArrival(rank, world_size, INFO).to_json()))


def test_the_first_reads_all_who_have_come_at_once(store):
    first = Bootstrap(store, 0, 200, INFO, "0", Deadline.after(60.0))
    before = store.num_requests
    first._arrivals.arrive()
    come_all(store, range(1, 200), 200)
    assert len(unpack_infos(first._wait()["ranks"])) == 200
    assert store.num_requests - before - 2 * 199 < 40


def test_who_comes_finds_the_start_in_one_round_trip_and_a_later_one_in_two(store):
    frames = []
    client = store._client
    send_requests = client._send_requests

    def count(requests, deadline):
        frames.append([what for what, _ in requests])
        return send_requests(requests, deadline)

    vars(client)["_send_requests"] = count
    check, again = [Op.COMPARE_SET, Op.CHECK], [Op.COMPARE_SET]
    first = Bootstrap(store, 0, 1, INFO, "0", Deadline.after(60.0))
    first._arrivals.arrive()
    assert frames == [check, [Op.ADD_ITEMS], again]
    assert (first._arrivals.number, first._arrivals.index) == (0, 0)
    first.infos = unpack_infos(first._wait()["ranks"])
    first.forget()
    frames.clear()
    second = Bootstrap(store, 0, 1, INFO, "0", Deadline.after(60.0))
    second._arrivals.arrive()
    assert frames == [check, [Op.CHECK], [Op.ADD_ITEMS], again]
    assert (second._arrivals.number, second._arrivals.index) == (1, 0)
    assert not store.check(["0/came"])


def test_the_first_is_told_that_the_last_has_come_and_asks_seldom_before(store, monkeypatch):
    """It asked three things fifty times a second, and looked through all who had come each time."""
    looks = []
    monkeypatch.setattr(bootstrap, "find_problem", lambda arrivals: looks.append(len(arrivals)))
    first = Bootstrap(store, 0, 3, INFO, "0", Deadline.after(60.0))
    first._arrivals.arrive()
    come_all(store, [1], 3)
    before = store.num_requests
    come = threading.Timer(1.5, come_all, (store.clone(), [2], 3))
    come.start()
    assert len(unpack_infos(first._wait()["ranks"])) == 3
    come.join()
    assert store.num_requests - before < 50
    assert looks == [2, 3]


def test_the_first_says_what_does_not_fit_while_others_are_still_missing(store):
    first = Bootstrap(store, 0, 200, INFO, "0", Deadline.after(60.0))
    first._arrivals.arrive()
    come = threading.Timer(0.3, come_all, (store.clone(), [1], 100))
    come.start()
    assert "different world sizes" in first._wait()["failure"]["text"]
    come.join()


def test_who_has_found_the_first_reads_nobody_else_however_long_it_waits(store):
    """It looked among twice as many at each check, so that in the end each rank read all who had come."""
    come_all(store, range(200), 5000)
    late = Bootstrap(store, 200, 5000, INFO, "0", Deadline.after(60.0))
    late._arrivals.arrive()
    for _ in range(20):
        assert not late._check_processes(False)
    assert set(late._arrivals.known) == {0, 200}


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("num_dead", [1, 2, 7, 100])
def test_who_comes_after_others_that_died_in_taking_a_place_is_the_first(store, num_dead):
    store.add("0/came", num_dead)
    heard = []
    waiters = [
        threading.Thread(
            target=lambda rank=rank: heard.append(exchange(store.clone(), rank, 3, INFO, "0", Deadline.after(60.0))),
            name=f"phalanx-test-waiter-{rank}",
        )
        for rank in range(3)
    ]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    assert [len(one.infos) for one in heard] == [3, 3, 3]


@pytest.mark.parametrize("prefixes", [(), ("default_pg/",), ("0/", "cpu/")])
def test_what_a_start_leaves_behind_is_one_key_and_it_takes_few_requests(store, prefixes):
    """The keys of all ranks go with one request; those of other groups stay."""
    store.set("0/rank/1", "another group's, where this one has a prefix")
    prefixed = store
    for prefix in prefixes:
        prefixed = PrefixStore(prefix, prefixed)
    num_before = store.num_keys() if prefixes else 0
    if not prefixes:
        store.delete_key("0/rank/1")
    first = Bootstrap(prefixed, 0, 100, INFO, "0", Deadline.after(60.0))
    first._arrivals.arrive()
    come_all(prefixed, range(1, 100), 100)
    first.infos = unpack_infos(first._wait()["ranks"])
    before = store.num_requests
    first.forget()
    assert store.num_requests - before < 10
    assert store.num_keys() == num_before + 1  # how this start has ended
    second = Bootstrap(prefixed, 0, 1, INFO, "0", Deadline.after(60.0))
    assert len(second.join()) == 1


@pytest.mark.parametrize("seed", range(5))
def test_what_all_ranks_say_arrives_as_it_was_said(seed):
    draw = random.Random(seed)
    texts = ["", "a", 'ä\n"', "0", "1"]
    infos = [
        RankInfo(
            draw.choice(texts),
            draw.choice(texts),
            draw.choice(texts),
            ProcessId(draw.randrange(1 << 22), draw.randrange(1 << 40), draw.choice(texts), draw.random() < 0.5),
            frozenset(draw.sample(range(300), draw.randrange(4))),
            draw.randrange(3),
            draw.choice(texts),
            draw.choice(texts),
            draw.choice(texts),
            draw.random() < 0.5,
            draw.choice(texts),
        )
        for _ in range(draw.choice([1, 2, 17, 300]))
    ]
    hosts, expected = set(), []
    for rank, info in enumerate(infos):  # the tokens of a host's first rank and the secret of rank 0 are kept
        token = "" if info.host in hosts else info.token
        hosts.add(info.host)
        expected.append(replace(info, token=token, secret=info.secret if rank == 0 else ""))
    read = unpack_infos(pack_infos(infos))
    assert read == expected
    assert "a secret" not in repr(replace(INFO, secret="a secret"))
    assert [(type(one.has_pidfds), type(one.pid)) for one in (info.process for info in read)] == [(bool, int)] * len(
        infos
    )
