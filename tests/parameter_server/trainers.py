"""Trainers and servers that meet, train and are compared."""

import contextlib
from functools import partial

import pytest
import torch
import torch._dynamo  # every optimizer loads it: once here, and not once in each worker
from tests.comparisons import assert_equal
from tests.rpc.workers import set_event, wait_event

import phalanx
from phalanx import rpc
from phalanx.errors import PeerLostError

TRAINERS = ["t0", "t1"]


@contextlib.contextmanager
def join(name, rank, world_size, folder, *, loses=False):
    """This process as a worker until all have come to the end; with `loses` some of them never do."""
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    if loses:
        with pytest.raises(PeerLostError):
            rpc.shutdown()
    else:
        rpc.shutdown()


def meet(me, key):
    """Both trainers have come here."""
    for one in TRAINERS:
        rpc.rpc_sync(one, set_event, (f"{key} {me}",))
    for one in TRAINERS:
        wait_event(f"{key} {one}")


def check_equal_states(one, other):
    values, others = ({key: part for key, part in state.items() if key != "groups"} for state in (one, other))
    assert_equal(values, others)
    assert one["groups"] == other["groups"]


def _counting(servers, trainers=TRAINERS, **options):
    """A table and a vector from which every push of ones takes one."""
    return phalanx.ParameterServer(
        servers,
        trainers,
        dense={"d": torch.zeros(3)},
        tables={"t": torch.zeros(7, 2)},
        optimizer=partial(torch.optim.SGD, lr=1.0),
        **options,
    )


def _ones(ids):
    return {"d": torch.ones(3)}, {"t": (ids, torch.ones(len(ids), 2))}
