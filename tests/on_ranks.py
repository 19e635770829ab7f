"""Tests whose body runs on several ranks, each a real process.

@on_ranks(2)
def test_all_reduce_leaves_the_sum_on_every_rank(rank):
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    assert tensor.item() == 1.0
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from phalanx.testing import run_ranks


def on_ranks(world_size: int | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function that `run_ranks` calls on each rank, with these options.

    The function takes `rank` and `world_size` if it names them, and fixtures and parameters as any test does; what it
    returns is dropped. Without a number here its parameter `world_size` says how many ranks there are, and where it
    takes `backend`, that names the backend of their group.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(body)
        ours = {"rank"} if world_size is None else {"rank", "world_size"}
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in ours]

        @functools.wraps(body)
        def test(**given: Any) -> None:
            def call(rank: int, world_size: int) -> None:
                places = {"rank": rank, "world_size": world_size}
                body(**given | {name: place for name, place in places.items() if name in signature.parameters})

            call.__qualname__ = body.__qualname__
            backend = {"backend": given["backend"]} if "backend" in given else {}
            run_ranks(call, world_size or given["world_size"], **options | backend)

        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return decorate
