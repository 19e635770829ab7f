"""Queues of a store in a file. Under `phalanx run`, `queue_push` said "queue support is not implemented"."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx._comm.backend import store_queues
from phalanx.testing import run_ranks

if not hasattr(dist, "QueueEmptyError"):
    pytest.skip("this torch has no queues", allow_module_level=True)

MINUTE = timedelta(minutes=1)


def test_values_come_in_their_order_as_from_a_tcp_store(tmp_path):
    def said(push, pop, length):
        push("q", "a")
        push("q", b"b".decode())
        push("other", "c")
        counted = [length("q"), length("nothing")]
        values = [pop("q", True), pop("q", False), pop("other", True)]
        with pytest.raises(dist.QueueEmptyError):
            pop("q", False)
        push("q", "d")
        return counted, values, pop("q", True), length("q")

    file = dist.PrefixStore("in", dist.FileStore(str(tmp_path / "store"), 1))
    ours = said(
        lambda key, value: store_queues.push(file, key, value),
        lambda key, block: store_queues.pop(file, key, MINUTE, block),
        lambda key: store_queues.length(file, key),
    )
    memory = dist.HashStore()  # torch's own
    assert ours == said(memory.queue_push, memory.queue_pop, memory.queue_len)


def test_a_queue_that_stays_empty_ends_the_wait_with_its_name(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(dist.DistStoreError, match=r"queue 'jobs' stayed empty for 0\.1 s"):
        store_queues.pop(store, "jobs", timedelta(seconds=0.1))


def test_each_value_goes_to_one_of_many_ranks(tmp_path):
    def check(rank, world_size):
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        for i in range(20):
            store_queues.push(store, "q", f"{rank}-{i}")
        return [store_queues.pop(store, "q", MINUTE).decode() for _ in range(20)]

    results = run_ranks(check, 4, init=False)
    assert sorted(value for values in results for value in values) == sorted(
        f"{r}-{i}" for r in range(4) for i in range(20)
    )
    for values in results:  # of one who pushes, nobody gets a later value first
        for r in range(4):
            numbers = [int(value.split("-")[1]) for value in values if value.startswith(f"{r}-")]
            assert numbers == sorted(numbers)
