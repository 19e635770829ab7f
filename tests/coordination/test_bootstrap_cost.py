"""A start asks the store for as much per rank, however many ranks there are."""

import json
import threading
import time
from dataclasses import replace

import pytest

from phalanx.backend.coordination_store import CoordinationStore
from phalanx.coordination.bootstrap import Bootstrap, exchange
from phalanx.coordination.rank_info import Arrival, RankInfo, host_identity, pack_infos, unpack_infos
from phalanx.coordination.service import Service
from phalanx.deadline import Deadline
from phalanx.errors import DeadlineError
from phalanx.symmetric_memory.watch import ProcessId

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
        store.set(f"0/rank/{index}", json.dumps(Arrival(rank, world_size, INFO).to_json()))


def test_the_first_reads_all_who_have_come_at_once(store):
    first = Bootstrap(store, 0, 200, INFO, "0", Deadline.after(60.0))
    before = store.num_requests
    first._arrive()
    come_all(store, range(1, 200), 200)
    assert len(unpack_infos(first._wait()["ranks"])) == 200
    assert store.num_requests - before - 2 * 199 < 40


def test_one_who_died_before_it_could_say_who_it_is_hides_nobody(store):
    come_all(store, range(1, 100), 200)
    store.add("0/came", 1)
    come_all(store, range(100, 200), 200)
    first = Bootstrap(store, 0, 200, INFO, "0", Deadline.after(60.0))
    before = store.num_requests
    assert sorted(one.rank for one in first._arrived().values()) == list(range(1, 200))
    assert store.num_requests - before < 60


def test_who_waits_for_the_first_asks_seldom(store):
    """It waits for two seconds, and two more for the first to say who is missing."""
    come_all(store, [0], 3)
    before = store.num_requests
    with pytest.raises(DeadlineError, match="rank 2 of 3 never came"):
        exchange(store, 1, 3, INFO, "0", Deadline.after(2.0))
    assert store.num_requests - before < 150  # asking every 20 ms makes 200 and more


def test_who_waits_hears_that_all_have_come(store):
    """In a group of many, whose ranks look after themselves every five seconds."""
    first = Bootstrap(store, 0, 5000, INFO, "0", Deadline.after(60.0))
    first._arrive()
    heard = []
    waiter = threading.Thread(
        target=lambda: heard.append(exchange(store.clone(), 1, 5000, INFO, "0", Deadline.after(60.0))),
        name="phalanx-test-waiter",
    )
    waiter.start()
    while not store.check(["0/rank/1"]):
        time.sleep(0.01)
    come_all(store, range(2, 5000), 5000)
    first._wait()
    waiter.join()
    assert len(heard[0].infos) == 5000


def test_what_ranks_know_of_each_other_comes_back_and_secrets_of_others_do_not():
    """Of each host the first token is kept, of all ranks the first secret."""
    infos = [
        replace(INFO, host=f"host {rank // 3}", token=f"token {rank}", secret=f"secret {rank}", cpus=frozenset({rank}))
        for rank in range(7)
    ]
    expected = [
        replace(info, token=info.token if rank % 3 == 0 else "", secret=info.secret if rank == 0 else "")
        for rank, info in enumerate(infos)
    ]
    assert unpack_infos(pack_infos(infos)) == expected
    assert "secret 0" not in repr(infos[0])
