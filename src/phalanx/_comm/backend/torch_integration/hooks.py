"""Call torch's hooks before and after each operation (torch 2.14 and later), such as those of `register_pre_hook`.

torch calls a group's hooks when the dispatcher runs a c10d operator, and our calls bypass the dispatcher. So a group
with a hook changes its class to one whose methods are torch's own:

    group.allreduce ─▶ torch's C++ ─▶ c10d::allreduce_ ─▶ hooks ─▶ the backend behind the group ─▶ our allreduce

A group without a hook keeps its class, and its calls do not check for hooks. The hook of torch's flight recorder does
not count, because our `flight_recorder` records the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx._base.torch_names import report_loss
from phalanx._comm.backend.overloads import METHODS, OLDER_NAMES
from phalanx._comm.backend.torch_integration.patch import patch

_Group = TypeVar("_Group", bound=type)
_torch_group: Any = dist.ProcessGroup

_KINDS = ("pre_hook", "post_hook")
_hookable: list[type] = []


class _ThisThread(threading.local):
    """A `_ThisThread` records whether this thread is in an operation whose hooks torch calls, and the latest work."""

    inside = False
    work: Any = None


_this_thread = _ThisThread()


def hookable(cls: _Group) -> _Group:
    """Make groups of this class call their registered hooks, if torch's groups have hooks."""
    _hookable.append(cls)
    for kind in _KINDS:
        if hasattr(_torch_group, f"register_{kind}"):
            setattr(cls, f"register_{kind}", _registering(kind))
            setattr(cls, f"unregister_{kind}", _unregistering(kind))
    return cls


def _registering(kind: str) -> Callable[..., None]:
    theirs = getattr(_torch_group, f"register_{kind}")

    def register(self: Any, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call `hook` for each operation from now on; operations then go through torch's dispatcher."""
        if not _has_backend(self):
            raise RuntimeError(
                f"register_{kind}: this torch does not let Python create a Backend, so the hook is not called"
            )
        theirs(self, hook_id, hook)
        call_hooks(self, (kind, hook_id))

    return register


def _unregistering(kind: str) -> Callable[..., None]:
    theirs = getattr(_torch_group, f"unregister_{kind}")

    def unregister(self: Any, hook_id: int) -> None:
        """Unregister the hook with this number."""
        theirs(self, hook_id)
        _stop_calling(self, (kind, hook_id))

    return unregister


def call_hooks(group: Any, reason: object) -> None:
    """Make each operation of the group call its hooks, until `_stop_calling` is called with the same reason."""
    group.__dict__.setdefault("hook_reasons", set()).add(reason)
    if not hasattr(group, "class_without_hooks"):
        kind: Any = type(group)
        group.__class__ = _class_with_hooks(kind)


def _stop_calling(group: Any, reason: object) -> None:
    reasons = group.__dict__.get("hook_reasons", set())
    reasons.discard(reason)
    if not reasons and hasattr(group, "class_without_hooks"):
        group.__class__ = group.class_without_hooks


@functools.cache
def _class_with_hooks(cls: Any) -> type:
    methods: dict[str, Any] = {"class_without_hooks": cls}
    for name in METHODS:
        methods[name] = _dispatched(cls, name)
    for name in OLDER_NAMES.values():
        if hasattr(_torch_group, name):
            methods[name] = getattr(_torch_group, name)  # a C++ method, which torch does not count as an override
    made: type = type(cls)(cls.__name__, (cls,), methods)
    return made


def _dispatched(cls: Any, name: str) -> Callable[..., Any]:
    ours, theirs = getattr(cls, name), getattr(_torch_group, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _this_thread.inside:
            return ours(self, *args, **kwargs)
        _this_thread.work = None
        work = theirs(self, *args, **kwargs)
        mine, _this_thread.work = _this_thread.work, None
        return work if mine is None else mine

    # With this name, torch's C++ continues to the dispatcher instead of calling this override again.
    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    return call


def carry_out(group: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Run an operation for torch's C++, which calls the hooks itself."""
    method = getattr(getattr(group, "class_without_hooks", type(group)), name)
    before, _this_thread.inside = _this_thread.inside, True
    try:
        work = method(group, *args)
    finally:
        _this_thread.inside = before
    _this_thread.work = work
    return work


def patch_group_hooks() -> None:
    """Make our groups' operations call the hooks that torch attaches to each group; skip hooks that cannot attach."""
    if hasattr(dist.distributed_c10d, "NanCheckHook"):  # from torch 2.14 on
        _patch_nan_check()
    if hasattr(dist.distributed_c10d, "FlightRecorderHook"):  # from torch 2.15 on
        _patch_recorder()


_NO_NAN_CHECK = "TORCH_DIST_NAN_CHECK=1 does not check operations of Phalanx groups"


@patch("torch.distributed.distributed_c10d.NanCheckHook.attach", loses=_NO_NAN_CHECK)
def _patch_nan_check() -> None:
    hook: Any = dist.distributed_c10d.NanCheckHook  # type: ignore[attr-defined]
    theirs = hook.attach

    @functools.wraps(theirs)
    def attach(pg: Any) -> Any:
        attached = _attach("NanCheckHook", theirs, pg, loses=_NO_NAN_CHECK)
        if attached is not None and isinstance(pg, tuple(_hookable)):
            call_hooks(pg, "nan check")
        return attached

    hook.attach = staticmethod(attach)


def _patch_recorder() -> None:
    """Let groups be created even if torch cannot attach its flight recorder; our `flight_recorder` records the same."""
    hook: Any = dist.distributed_c10d.FlightRecorderHook  # type: ignore[attr-defined]
    if hook in _patched:
        return
    _patched.append(hook)
    theirs = hook.attach

    @functools.wraps(theirs)
    def attach(pg: Any, *args: Any) -> Any:
        return _attach("FlightRecorderHook", theirs, pg, *args, loses="hooks of Phalanx groups are not called")

    hook.attach = staticmethod(attach)


_patched: list[Any] = []


def _attach(name: str, theirs: Callable[..., Any], group: Any, *args: Any, loses: str) -> Any:
    """Attach one of torch's hooks to a group; if that fails for one of our groups, log it once and return None."""
    if not isinstance(group, tuple(_hookable)):
        return theirs(group, *args)
    problem = "" if _has_backend(group) else "does not let Python create a Backend"
    if not problem:
        try:
            return theirs(group, *args)
        except RuntimeError as error:
            problem = f"cannot attach its {name} to Phalanx groups ({error})"
    report_loss(problem, loses)
    return None


def _has_backend(group: Any) -> bool:
    """Return whether the group has a `Backend` through which torch's C++, such as the dispatcher, can call it."""
    return getattr(group, "_inner_backend", None) is not None
