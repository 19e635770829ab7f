"""Make `torch.futures.collect_all` work with the futures of `phalanx.rpc`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx._comm.backend.torch_integration.patch import patch


def collect_calls(has_calls: Callable[[Any], bool], collect_all: Callable[[Any], Any]) -> None:
    """Make `torch.futures.collect_all` and `wait_all` use `collect_all` for lists of futures that pass `has_calls`."""
    _collectors[:] = [(has_calls, collect_all)]
    _collect_calls()


_collectors: list[tuple[Callable[[Any], bool], Callable[[Any], Any]]] = []


@patch(
    "torch._C._collect_all",
    loses="torch.futures.collect_all and wait_all wait for all calls of phalanx.rpc, even after one has failed",
)
def _collect_calls() -> None:
    import torch

    functions: Any = torch._C
    original = functions._collect_all

    def collect(futures: Any) -> Any:
        has_calls, collect_all = _collectors[0]
        ours = isinstance(futures, list | tuple) and has_calls(futures)
        return (collect_all if ours else original)(futures)

    functions._collect_all = collect
