"""Neither side of a call sees what the other one changes in arguments and results."""

import random
from typing import Any

import numpy
import torch
from tests.rpc.workers import run_caller

from phalanx import rpc

_kept: list[Any] = []


def tensors_in(values: Any) -> list[Any]:
    """The tensors and arrays in lists and dictionaries, in order."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [one for value in values for one in tensors_in(value)]
    if isinstance(values, torch.Tensor) and values.is_sparse:
        return [values._indices(), values._values()]
    return [values] if isinstance(values, torch.Tensor | numpy.ndarray) else []


def spoil(values: Any) -> None:
    """Change whatever memory has come."""
    for one in tensors_in(values):
        one[...] = 7


def make_values(rng: random.Random) -> list[Any]:
    """Random nested values with tensors and arrays, small and large."""

    def make() -> Any:
        count = rng.choice([1, 3, 100, 30_000])
        indices = torch.zeros(1, count, dtype=torch.int64)
        makers = [
            lambda: torch.zeros(count),
            lambda: torch.zeros(2, count, dtype=torch.int16).t(),
            lambda: numpy.zeros((count, 2)),
            lambda: torch.zeros(2 * count)[::2],
            lambda: torch.sparse_coo_tensor(indices, torch.zeros(count), (2,), check_invariants=True),
            lambda: {"one": make(), "two": [make()]},
            lambda: torch.zeros(count, dtype=torch.uint16),
        ]
        return rng.choice(makers)()

    return [make() for _ in range(rng.randint(1, 4))]


def is_spoilt(values: Any) -> bool:
    return any((one != 0).any() for one in tensors_in(values))


def change_and_keep(values: Any) -> Any:
    """Change what has come, and keep what is returned."""
    spoil(values)
    _kept[:] = [make_values(random.Random(5))]
    return _kept[0]


def kept_is_spoilt() -> bool:
    return is_spoilt(_kept)


@rpc.functions.async_execution
def keep_later(values: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(change_and_keep(values))
    return future


class Keeper:
    def change(self, values: Any) -> Any:
        return change_and_keep(values)


def _copies() -> None:
    rng = random.Random(11)
    for number in range(60):
        values = make_values(rng)
        name = rng.choice(["w0", "w0", "w1"])
        how = number % 4
        if how == 0:
            found = rpc.rpc_sync(name, change_and_keep, (values,))
        elif how == 1:
            found = rpc.rpc_async(name, keep_later, (values,)).wait()
        elif how == 2:
            found = rpc.remote(name, Keeper).rpc_sync().change(values)
        else:
            found = rpc.rpc_sync(name, change_and_keep, kwargs={"values": values})
        assert not is_spoilt(values), (name, how)
        spoil(found)
        assert not rpc.rpc_sync(name, kept_is_spoilt), (name, how)


def test_a_change_on_one_worker_does_not_reach_the_other():
    """A call to oneself shared its tensors with who called: `t.add_()` there changed the caller's."""
    run_caller(_copies, 2)
