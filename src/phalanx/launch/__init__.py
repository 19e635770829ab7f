"""Call a function in every rank of a job: `phalanx.launch(fn)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


class Launch(ModuleType):
    """`Launch` is the type of this package, which is also a function: `phalanx.launch(fn, args)`."""

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        nproc_per_node: int | str = "auto",
        **options: object,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` in every rank of a job on this host, and return the results by rank."""
        from phalanx._job.launch.calls.call import launch as call

        return call(fn, args, kwargs, nproc_per_node=nproc_per_node, **options)


launch: Launch = sys.modules[__name__]  # type: ignore[assignment]
launch.__class__ = Launch
