"""Wrap each method of a group: accept PyTorch's overloads, notify its tools of the call, and skip fake tensors."""

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
    """Wrap a collective or message of a group so that it accepts all of PyTorch's overloads.

    The method itself receives the form in which torch's functions call it: positional arguments, the options last. It
    may raise `FakeCall`. PyTorch's tools see the call. `allreduce` does all this itself, because another Python frame
    would cost too much there.
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
            resolve(name, args, {})  # raises TypeError if the call matches no overload
            raise

    del call.__wrapped__  # code that unwraps decorators, such as `untraced`, must find this function
    return call
