"""Call the hooks before and after each operation (torch 2.14 and on), such as `group.register_pre_hook`'s.

torch calls a group's hooks where the dispatcher carries an operator of c10d out. A call of ours is Python from end to
end and does not come by there. So a group that has a hook changes its class for one whose methods are torch's own:

    group.allreduce ─▶ torch's C++ ─▶ c10d::allreduce_ ─▶ hooks ─▶ the backend behind the group ─▶ our allreduce

A group without a hook keeps its class, and checks nothing at a call. The flight recorder's hook alone does not count,
since our recorder writes the same down (`flight_recorder`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx._base.torch_names import report_loss
from phalanx._comm.backend.torch_integration.patch import patch

_Group = TypeVar("_Group", bound=type)
_torch_group: Any = dist.ProcessGroup

# Torch dispatches these; they are by the name under which its C++ looks for an override, and by older names of the
# same.
_METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "all_gather_single",
    "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "alltoall", "all_to_all_single", "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip
_ALIASES = (
    "_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "alltoall_base",
)  # fmt: skip
_KINDS = ("pre_hook", "post_hook")
_hookable: list[type] = []


class _ThisThread(threading.local):
    """`_ThisThread` holds the operation whose hooks this thread has called, and its result."""

    inside = False
    work: Any = None


_this_thread = _ThisThread()


def hookable(cls: _Group) -> _Group:
    """Let groups of this class call hooks that are registered with them, where torch's groups have hooks."""
    _hookable.append(cls)
    for kind in _KINDS:
        if hasattr(_torch_group, f"register_{kind}"):
            setattr(cls, f"register_{kind}", _registering(kind))
            setattr(cls, f"unregister_{kind}", _unregistering(kind))
    return cls


def _registering(kind: str) -> Callable[..., None]:
    theirs = getattr(_torch_group, f"register_{kind}")

    def register(self: Any, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call `hook` at each operation from now on; collectives then take the way through torch's dispatcher."""
        if not _has_backend(self):
            raise RuntimeError(f"register_{kind}: this torch lets Python make no Backend, so nothing calls the hook")
        theirs(self, hook_id, hook)
        call_hooks(self, (kind, hook_id))

    return register


def _unregistering(kind: str) -> Callable[..., None]:
    theirs = getattr(_torch_group, f"unregister_{kind}")

    def unregister(self: Any, hook_id: int) -> None:
        """Call the hook of this number no more."""
        theirs(self, hook_id)
        _stop_calling(self, (kind, hook_id))

    return unregister


def call_hooks(group: Any, reason: object) -> None:
    """Let each operation of the group call its hooks, until `_stop_calling` with the same reason."""
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
    for name in _METHODS:
        if hasattr(_torch_group, name):
            methods[name] = _dispatched(cls, name)
    for name in _ALIASES:
        if hasattr(_torch_group, name):
            methods[name] = getattr(_torch_group, name)  # C++, which it does not take for an override
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

    # torch's C++ goes on to the dispatcher, instead of back here, where the caller has the method's name.
    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    return call


def carry_out(group: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Do what torch's C++ asks of the backend behind the group, when it has called the hooks."""
    method = getattr(getattr(group, "class_without_hooks", type(group)), name)
    before, _this_thread.inside = _this_thread.inside, True
    try:
        work = method(group, *args)
    finally:
        _this_thread.inside = before
    _this_thread.work = work
    return work


def patch_group_hooks() -> None:
    """Let the hooks that torch itself hangs on each group be called at our groups' operations, or be left out."""
    if hasattr(dist.distributed_c10d, "NanCheckHook"):  # from torch 2.14 on
        _patch_nan_check()
    if hasattr(dist.distributed_c10d, "FlightRecorderHook"):  # from torch 2.15 on
        _patch_recorder()


_NO_NAN_CHECK = "TORCH_DIST_NAN_CHECK=1 does not look at our groups' operations"


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
    """Let a group begin also where torch can't hang its recorder on it, which ours answers for (`flight_recorder`)."""
    hook: Any = dist.distributed_c10d.FlightRecorderHook  # type: ignore[attr-defined]
    if hook in _patched:
        return
    _patched.append(hook)
    theirs = hook.attach

    @functools.wraps(theirs)
    def attach(pg: Any, *args: Any) -> Any:
        return _attach("FlightRecorderHook", theirs, pg, *args, loses="hooks of our groups are not called")

    hook.attach = staticmethod(attach)


_patched: list[Any] = []


def _attach(name: str, theirs: Callable[..., Any], group: Any, *args: Any, loses: str) -> Any:
    """Hang a hook of torch's on a group; where it can't be hung on one of ours, say so once and return None."""
    if not isinstance(group, tuple(_hookable)):
        return theirs(group, *args)
    problem = "" if _has_backend(group) else "lets Python make no Backend"
    if not problem:
        try:
            return theirs(group, *args)
        except RuntimeError as error:
            problem = f"can't hang its {name} on our groups ({error})"
    report_loss(problem, loses)
    return None


def _has_backend(group: Any) -> bool:
    """Return whether torch's C++ finds our group behind its own: the way of operations through the dispatcher."""
    return getattr(group, "_inner_backend", None) is not None
