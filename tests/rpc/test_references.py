"""References: made, used, handed on to third workers, counted and dropped."""

import gc
import time

import pytest
import torch
from tests.rpc.workers import Counter, fail, run_caller, same, set_event, wait_event
from tests.threads import map_in_threads

from phalanx import rpc
from phalanx.errors import DeadlineError
from phalanx.rpc import current

_kept = {}


def _keep(name, rref):
    _kept[name] = rref


def _use(name):
    return _kept[name].to_here()


def _hand_on(name, to):
    rpc.rpc_sync(to, _keep, (name, _kept.pop(name)))
    gc.collect()


def _drop(name):
    del _kept[name]
    gc.collect()


def _make_local(value):
    return rpc.RRef(value)


def _counts():
    gc.collect()
    return current.agent().references.count()


def _wait_until_free(*workers):
    """Until no worker owns an object that others refer to; a drop is told in the background."""
    end = time.monotonic() + 60
    while any(sum(rpc.rpc_sync(to, _counts).values()) for to in workers):
        assert time.monotonic() < end, [rpc.rpc_sync(to, _counts) for to in workers]
        time.sleep(0.001)


def _everything():
    _check_basics()
    _check_proxies()
    _check_third_workers()
    _check_errors()
    _wait_until_free("w0", "w1", "w2")


def _check_basics():
    for to in ("w0", "w1"):
        rref = rpc.remote(to, torch.add, (torch.ones(2), 3))
        assert isinstance(rref, rpc.RRef)
        assert rref.to_here().tolist() == [4, 4]
        assert (rref.owner(), rref.owner_name()) == (rpc.get_worker_info(to), to)
        assert rref.is_owner() == (to == "w0")
        assert rref.confirmed_by_owner()
    with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user"):
        rref.local_value()
    mine = rpc.RRef(Counter(5))
    assert mine.is_owner()
    assert mine.confirmed_by_owner()
    assert mine.to_here() is mine.local_value()
    assert rpc.rpc_sync("w1", _read_and_add, (mine,)) == 6
    assert mine.local_value().value == 6, "the method ran here"
    assert rpc.rpc_sync("w1", _make_local, ("there",)).to_here() == "there"
    slow = rpc.remote("w1", wait_event, ("slow",))
    assert not slow.confirmed_by_owner()
    rpc.rpc_sync("w1", set_event, ("slow",))
    assert slow.to_here() == "slow"


def _read_and_add(rref):
    assert rref.to_here().value == 5
    return rref.rpc_sync().add(1)


def _check_proxies():
    for to in ("w0", "w1"):
        counter = rpc.remote(to, Counter, (10,))
        assert counter.rpc_sync().add(1) == 11
        assert counter.rpc_async().add(2, twice=True).wait() == 15
        assert counter.remote().add(5).to_here() == 20
        assert counter.rpc_sync().add_later(1) == 21
        assert counter.rpc_sync(timeout=30).add(1) == 22
        with pytest.raises(AttributeError, match="'Counter' object has no attribute 'sub'"):
            counter.rpc_sync().sub(1)
    numbers = rpc.remote("w1", list, ([4, 5, 6],)).rpc_sync()
    assert (numbers.__len__(), numbers.__getitem__(1), numbers.__contains__(6)) == (3, 5, True)


def _check_third_workers():
    for owner in ("w0", "w1", "w2"):
        rref = rpc.remote(owner, same, (f"of {owner}",))
        rpc.rpc_sync("w1", _keep, (owner, rref))
        del rref
        for to in ("w2", "w0", "w1"):
            rpc.rpc_sync({"w2": "w1", "w0": "w2", "w1": "w0"}[to], _hand_on, (owner, to))
            assert rpc.rpc_sync(to, _use, (owner,)) == f"of {owner}"
        rpc.rpc_sync("w1", _drop, (owner,))
    # A reference that is handed on before its owner has made the object.
    rref = rpc.remote("w1", wait_event, ("handed on",))
    rpc.rpc_sync("w2", _keep, ("early", rref))
    got = rpc.rpc_async("w2", _use, ("early",))
    rpc.rpc_sync("w1", set_event, ("handed on",))
    assert got.wait() == "handed on"
    rpc.rpc_sync("w2", _drop, ("early",))
    many = [rpc.remote("w1", same, (n,)) for n in range(50)]
    back = rpc.rpc_sync("w2", same, (many,))
    assert [one.to_here() for one in back] == list(range(50))
    nested = rpc.remote("w1", _nest, ("w2",))
    assert nested.to_here().to_here() == "inner"


def _nest(to):
    return rpc.remote(to, same, ("inner",))


def _return_late(name):
    wait_event(name)
    return rpc.RRef(name)


def _check_errors():
    for to in ("w0", "w1"):
        rref = rpc.remote(to, fail, (ValueError("not made"),))
        for _ in range(2):
            with pytest.raises(ValueError, match="not made"):
                rref.to_here()
        with pytest.raises(ValueError, match="not made"):
            rref.rpc_sync().anything()
    slow = rpc.remote("w1", _return_late, ("made at last",))
    for _ in range(2):
        with pytest.raises(DeadlineError):  # which was what it raised from then on, for ever
            slow._get_type(timeout=0.05)
    rpc.rpc_sync("w1", set_event, ("made at last",))
    assert slow._get_type() is rpc.RRef
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        rref.__reduce__()
    with pytest.raises(TypeError, match="cannot pickle"):
        rpc.rpc_sync("w1", same, (rref, rpc.RRef(3), wait_event.__globals__["threading"].Lock()))


def test_references_are_used_handed_on_and_dropped_by_three_workers():
    run_caller(_everything, 3)


def _make_counter_at(to, value):
    return rpc.remote(to, Counter, (value,))


def _comes_home_early():

    def use(first):
        for number in range(first, first + 400):
            rref = rpc.rpc_sync("w1", _make_counter_at, ("w0", number))
            assert rref.rpc_sync().add(1) == number + 1
            if number % 2:
                assert rref.to_here().value == number + 1

    map_in_threads(use, (0, 1000, 2000))
    _wait_until_free("w0", "w1")


@pytest.mark.slow
def test_a_reference_may_come_home_before_the_request_that_makes_its_object():
    """Its entry was given up with the first use, and the object was put into another one: the next use hung."""
    run_caller(_comes_home_early, 2, options=dict(rpc_timeout=20))
