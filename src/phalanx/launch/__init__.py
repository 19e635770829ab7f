"""Starting jobs: `phalanx run` on one host, from the command's words to the last process gone.

    settings, target      what was asked for, checked before anything starts
    devices, placement    how many ranks, which cores and threads each
    environment           the variables that a rank sees
    agent                 the process that the user started: signals, restarts, the exit code
    zygote                imports torch once and forks the ranks; kills every descendant when the agent dies
    worker                turns the fork into the user's `python script.py`
    failure               which failure came first, and how it is told
    calls                 `phalanx.launch(fn)`: a function of this process, called in the ranks

Nothing here imports torch, except the zygote, inside a function: that is what it is for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


class Launch(ModuleType):
    """The type of this package, which is also a function: `phalanx.launch(fn, args)`."""

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        nproc_per_node: int | str = "auto",
        nnodes: int | str = 1,
        **options: object,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` in every rank of a job, and return what each returned, by rank."""
        from phalanx.launch.calls.call import launch as call

        return call(fn, args, kwargs, nproc_per_node=nproc_per_node, nnodes=nnodes, **options)

    @staticmethod
    def ray(
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        nproc_per_node: int | str = "auto",
        nnodes: int | None = None,
        **options: object,
    ) -> list[Any]:
        """Call it on the Ray cluster of this driver, on `nnodes` of its nodes (default: all)."""
        from phalanx.launch.on_ray import launch_on_ray

        return launch_on_ray(fn, args, kwargs, nproc_per_node=nproc_per_node, nnodes=nnodes, **options)


launch: Launch = sys.modules[__name__]  # type: ignore[assignment]
launch.__class__ = Launch
