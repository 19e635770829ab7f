"""Wrap each method of a group: take PyTorch's overloads, tell its tools of the call, and skip fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from phalanx._comm.backend.arguments import ArgumentError
from phalanx._comm.backend.memoryless import FakeCall, nothing_done
from phalanx._comm.backend.overloads import plain_form, resolve
from phalanx._comm.backend.process_group.observed import (
    early_modes,
    is_recorded,
    num_modes,
    profiler,
    record,
    transform,
)


def entry_point(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a collective or a message of a group take the arguments that PyTorch's takes.

    The method is written for one form of its arguments, the one in which torch's functions call it: every argument in
    its place, the options last. It may raise `FakeCall`; PyTorch's tools see it. `allreduce` sees to all that by
    itself: it is the call for which a frame more is much.
    """
    name = method.__name__
    count, last = plain_form(name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != count or type(args[-1]) is not last:
            args = resolve(name, args, kwargs)
        if (
            num_modes() or early_modes[0] is not None or transform() is not None or profiler._is_profiler_enabled
        ) and not is_recorded():
            return record(self, name, args)
        try:
            return method(self, *args)
        except FakeCall:
            return nothing_done(name, args)
        except ArgumentError:
            resolve(name, args, {})  # a TypeError, if it is no call of PyTorch's at all
            raise

    del call.__wrapped__  # code that looks through decorators, as `untraced` does, shall find this function
    return call
