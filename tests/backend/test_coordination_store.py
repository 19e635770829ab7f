"""c10d's Store over the coordinator: PyTorch's own test of a store that is written in Python, TCPStore beside ours."""

import contextlib
import functools
import os
import random
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _test_python_store

from phalanx._comm.backend.coordination_store import CoordinationStore
from phalanx._comm.backend.torch_integration.stores import patch_prefix_store
from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._job.coordinator.service import Service
from phalanx.testing import run_ranks

if not hasattr(dist, "QueueEmptyError"):
    pytest.skip("this torch has no queues", allow_module_level=True)

KEY = Key(bytes(range(32)))
MS, SECOND = timedelta(milliseconds=1), timedelta(seconds=1)


@pytest.fixture(autouse=True, scope="module")
def _loop_of_tcp_store():
    patch_prefix_store()  # as when a group is made
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # libuv keeps a pipe from its first loop on


@contextlib.contextmanager
def store(timeout=timedelta(seconds=20), bind=None):
    with Service(bind, KEY) as service:
        place = service.local if bind is None else str(service.address)
        made = CoordinationStore(place, KEY if bind else None, timeout)
        try:
            yield made
        finally:
            made.close()


def test_pytorchs_own_test_of_a_store_in_python_passes():
    with store(bind="127.0.0.1:0") as ours:
        _test_python_store(ours)


def outcome(call):
    try:
        result = call()
    except Exception as error:
        return type(error).__name__
    return sorted(result) if isinstance(result, list) and result and isinstance(result[0], str) else result


def calls(rng):
    """For what each waits, and a call of each kind, with random arguments; TCPStore answers some by hanging up."""
    key, number, queue = rng.choice(["a", "b", "é/x", ""]), rng.choice(["n", "m"]), rng.choice(["q1", "q2"])
    value, word = rng.choice(["", "1", "x", "ü\0", b"\0\xff"]), rng.choice(["", "1", "x"])
    keys = [rng.choice(["a", "b", "é/x", "n"]) for _ in range(rng.randrange(4))]
    texts = [key for key in keys if key != "n"]
    amount, block, victim = rng.randrange(-5, 6), rng.random() < 0.3, rng.choice([key, number, queue])
    return [
        ([], lambda s: s.set(key, value)),
        ([key], lambda s: s.get(key)),
        ([], lambda s: s.add(number, amount)),
        ([], lambda s: s.compare_set(key, word, value)),
        ([], lambda s: s.append(key, value)),
        ([], lambda s: s.check(keys)),
        ([], lambda s: s.check([queue])),
        (keys, lambda s: s.wait(keys)),
        ([queue], lambda s: s.wait([queue])),
        ([], lambda s: s.delete_key(victim)),
        ([], lambda s: s.num_keys()),
        ([], lambda s: s.list_keys()),
        (keys, lambda s: s.multi_get(keys)),
        ([], lambda s: s.multi_set(texts, [value] * len(texts))),
        ([], lambda s: s.multi_set(["a", "b"], [value])),
        ([], lambda s: s.queue_push(queue, value)),
        ([queue] if block else [], lambda s: s.queue_pop(queue, block)),
        ([], lambda s: s.queue_len(queue)),
        ([], lambda s: s.has_extended_api()),
        ([], lambda s: s.timeout),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_each_call_gives_what_it_gives_with_a_tcp_store_also_behind_prefixes_and_clones(seed):
    rng = random.Random(seed)
    with store() as ours:
        theirs = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        clone = ours.clone()
        pairs = [
            (ours, theirs),
            (clone, theirs),
            (dist.PrefixStore("p", ours), dist.PrefixStore("p", theirs)),
            (dist.PrefixStore("r", dist.PrefixStore("p", clone)), dist.PrefixStore("r", dist.PrefixStore("p", theirs))),
        ]
        for step in range(250):
            mine, its = rng.choice(pairs)
            if rng.random() < 0.1 and mine in (ours, clone):
                key, size = f"bar{rng.randrange(3)}", rng.choice([1, 1, 2])
                limit = 20 * SECOND if size == 1 or its.check([key]) else 20 * MS
                results = [outcome(functools.partial(s.barrier, key, size, limit)) for s in (mine, its)]
                results = ["late" if r in ("DistStoreError", "RuntimeError") else r for r in results]
            else:
                needs, call = rng.choice(calls(rng))
                for s in (mine, its):  # what is there is not late, however slow this machine is
                    s.set_timeout(20 * SECOND if its.check(needs) else 20 * MS)
                results = [outcome(functools.partial(call, s)) for s in (mine, its)]
            assert results[0] == results[1], f"step {step}: ours, TCPStore's"


def test_errors_are_those_that_torchs_callers_catch():
    with store(50 * MS) as ours:
        with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms, keys: a, b"):
            ours.multi_get(["a", "b"])
        with pytest.raises(dist.QueueEmptyError, match="queue 'q' is empty"):
            ours.queue_pop("q", block=False)
        with pytest.raises(ValueError, match="add: the value of 'word' is not a number"):
            ours.set("word", "x") or ours.add("word", 1)
        with pytest.raises(TypeError, match="a value must be a str or bytes, got int"):
            ours.set("a", 5)
        with pytest.raises(TypeError, match="a key must be a str, got int"):
            ours.get(5)
        with pytest.raises(ValueError, match="are allowed"):
            ours.set("big", b"x" * (9 << 20))
        prefixed = dist.PrefixStore("p", ours)
        prefixed.set_timeout(70 * MS)
        with pytest.raises(dist.DistStoreError, match="wait timeout after 70ms, keys: p/a"):
            prefixed.get("a")


def test_a_thread_that_waits_keeps_no_other_one_waiting_and_a_fork_has_a_connection_of_its_own():
    with store() as ours:
        got = []
        threads = [threading.Thread(target=lambda n=n: got.append(ours.get(f"key{n}"))) for n in range(8)]
        for thread in threads:
            thread.start()
        for n in range(8):  # all of them wait on this connection meanwhile
            ours.set(f"key{n}", str(n))
        for thread in threads:
            thread.join()
        assert sorted(got) == [b"%d" % n for n in range(8)]

        child = os.fork()
        if child == 0:
            try:
                ours.set("child", str(ours.add("n", 1)))
            finally:
                os._exit(0)
        assert ours.get("child") == b"1"
        assert os.waitpid(child, 0)[1] == 0
        assert ours.add("n", 1) == 2


def test_torchs_cpp_keeps_a_store_whose_name_is_gone():
    """torch's C++ holds a Python store without its Python object, and then says "pure virtual function"."""
    with Service() as service:
        prefixed = dist.PrefixStore("p", CoordinationStore(service.local))
        prefixed.set("a", "1")
        assert prefixed.clone().get("a") == b"1"
        prefixed.underlying_store.close()


def serve_and_join(rank, world_size, folder, backend):
    """Rank 0 keeps the coordinator; all form a group over it, and a second one of some of them."""
    place = Path(folder, "address")
    with contextlib.ExitStack() as stack:
        if rank == 0:
            service = stack.enter_context(Service("127.0.0.1:0", KEY))
            place.with_suffix(".new").write_text(str(service.address))
            place.with_suffix(".new").rename(place)
        while not place.exists():
            time.sleep(0.01)
        ours = CoordinationStore(place.read_text(), KEY, timedelta(seconds=60))
        stack.callback(ours.close)
        dist.init_process_group(backend, store=ours, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        one = torch.full((4,), float(rank))
        dist.all_reduce(one)
        pair = dist.new_group([0, world_size - 1])
        other = torch.ones(3)
        if rank in (0, world_size - 1):
            dist.all_reduce(other, group=pair)
        gathered = [None] * world_size
        dist.all_gather_object(gathered, rank)
        dist.barrier()
        dist.destroy_process_group()
        ours.barrier("done", world_size)  # before rank 0 takes the coordinator away
        return one.tolist(), other.tolist(), gathered


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_groups_form_over_it(tmp_path, backend):
    results = run_ranks(serve_and_join, 3, str(tmp_path), backend, init=False)
    for rank, (one, other, gathered) in enumerate(results):
        assert one == [3.0] * 4
        assert other == ([1.0] * 3 if rank == 1 else [2.0] * 3)
        assert gathered == [0, 1, 2]


def test_the_coordinator_that_ends_is_a_network_error():
    with Service() as service:
        ours = CoordinationStore(service.local, timeout=300 * MS)
    with pytest.raises((dist.DistNetworkError, dist.DistStoreError), match=r"the coordinator at .* did not answer"):
        ours.get("a")
    ours.close()
    with Service() as service, Client(service.local) as client:
        assert client.num_keys() == 0
