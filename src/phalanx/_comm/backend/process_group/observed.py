"""Show our operations to PyTorch's own tools: the profiler, and dispatch modes such as CommDebugMode.

A call to one of torch's own groups goes through a dispatcher operator, such as `c10d::allreduce_`, where CommDebugMode,
DebugMode, every TorchDispatchMode and make_fx observe it, and torch.func unwraps its tensors. Our calls bypass the
dispatcher, which makes them fast. A call takes the slow path only while one of these tools is active:

    group.allreduce ─▶ a plain group of torch's, the face ─▶ c10d::allreduce_ ─▶ modes ─▶ our kernel ─▶ group.allreduce
                       (torch packs the arguments)                                       (at BackendSelect)

The kernels have a dispatch key that c10d does not use, below the modes and above the devices' kernels. They redispatch
calls for other groups, and calls with meta tensors. A graph from make_fx calls the same operators, so it works, too.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.torch_names import find

c10d: Any = dist.distributed_c10d  # its stubs lack names used here

_library_of: Any = torch.library.Library
_UNSEEN = "PyTorch's tools (dispatch modes, make_fx, torch.func) do not see Phalanx's operations"
_UNPROFILED = "a profile does not show Phalanx's operations"
num_modes: Any = find("torch._C._len_torch_dispatch_stack", loses=_UNSEEN, instead=int)
# The level of torch.func: functionalize, grad, vmap.
transform: Any = find("torch._C._functorch.maybe_current_level", loses=_UNSEEN, instead=lambda: None)
_is_profiling: Any = find("torch._C._autograd._profiler_enabled", loses=_UNPROFILED, instead=bool)
_keyset_after: Any = find("torch._C._dispatch_keyset_full_after", loses=_UNSEEN)
_place: Any = find("torch._C.DispatchKey.BackendSelect", loses=_UNSEEN)  # the dispatch key of our kernels
_begin_event: Any = find("torch._C._autograd._record_function_with_args_enter", loses=_UNPROFILED)
_end_event: Any = find("torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction", loses=_UNPROFILED)
_has_flag = find("torch.autograd.profiler._is_profiler_enabled", loses=_UNPROFILED, instead=None) is not None
profiler: Any = torch.autograd.profiler if _has_flag else types.SimpleNamespace(_is_profiler_enabled=False)
"""The object whose `_is_profiler_enabled` shows an active profiler. Each call reads it, so it is looked up once."""
# make_fx(pre_dispatch=True) has its own list of modes, [tracing, functionalisation]. The list is read directly, since
# torch's accessor takes a tenth of a microsecond.
early_modes: list[Any] = getattr(
    find("torch._ops._mode_stack_state_for_pre_dispatch", loses=_UNSEEN, instead=None),
    "_ModeStackStateForPreDispatch__infra_modes",
    [None, None],
)
_Kernel = Callable[[Any, dict[str, Any]], Any]  # its arguments: the group, and the operator's arguments by name

# By method: the profiler's event, and the index of the argument with the input tensors.
_EVENTS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", -1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recvAnySource", 0),
}


def is_recorded() -> bool:
    """Return whether PyTorch's tools have already recorded the call, or none of them is active in this thread."""
    if getattr(_this_thread, "is_recorded", False):
        _this_thread.is_recorded = False  # it applies to this call only
        return True
    return not _is_dispatched() and not _is_profiling()


def record(group: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Run `group.<name>` so that the modes or the profiler observe it."""
    return (_through_dispatcher if _is_dispatched() else _profiled)(group, name, args)


def _is_dispatched() -> bool:
    """Return whether a dispatch mode or a transform of torch.func is active for this call."""
    if getattr(_this_thread, "below", False):
        return False
    return bool(num_modes()) or early_modes[0] is not None or transform() is not None


# is_recorded: the tools have recorded this thread's next call; below: the thread is inside one of our kernels;
# reduce_op, work: the reduction and the work of the operator that the thread has called.
_this_thread = threading.local()


# -- the profiler ------------------------------------------------------------------------------------------------------


def _profiled(group: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Run the call inside an asynchronous event, which ends when the operation completes, as in torch's backends."""
    title, position = _EVENTS[name]
    read = list(_tensors(args[position])) if 0 <= position < len(args) else []
    event = _begin_event(f"{group.getBackendName()}:{title}", *read)
    over: torch.futures.Future[None] = torch.futures.Future()
    caller = threading.get_ident()

    def leave(_: object = None) -> None:
        if threading.get_ident() != caller:
            over.set_result(None)
            return
        # torch shows an event as asynchronous only if it ends in another thread.
        thread = threading.Thread(target=over.set_result, args=(None,), name="phalanx-profiled")
        thread.start()
        thread.join()

    _end_event(event, over)
    try:
        _this_thread.is_recorded = True
        work = getattr(group, name)(*args)
    except BaseException:
        _this_thread.is_recorded = False
        leave()
        raise
    work.get_future().add_done_callback(leave)
    return work


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence):
        for item in value:
            yield from _tensors(item)


# -- the dispatcher ----------------------------------------------------------------------------------------------------

_library: list[Any] = []
_faces: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # a group's face, kept while it exists
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by face: a weak reference to its group


def _through_dispatcher(group: Any, name: str, args: tuple[Any, ...]) -> Any:
    if not _library:
        _library.append(_offer_kernels())
    face = _faces.get(group)
    if face is None:
        _faces[group] = face = c10d.ProcessGroup(group.rank(), group.size())
        _groups[face] = weakref.ref(group)
    method = getattr(face, name)
    _this_thread.reduce_op = next((r for r in map(_reduction, args) if r is not None), None)
    _this_thread.work = None
    try:
        work = method(*args)
        return work if _this_thread.work is None else _this_thread.work
    finally:
        _this_thread.reduce_op = _this_thread.work = None


def _reduction(argument: Any) -> Any:
    return argument if isinstance(argument, dist.ReduceOp) else getattr(argument, "reduceOp", None)


def _offer_kernels() -> Any:
    library: Any = _library_of("c10d", "IMPL")  # never released, since graphs may outlive their groups
    for operator, carry_out in _KERNELS.items():
        library.impl(operator, _kernel(operator, carry_out), "BackendSelect", with_keyset=True)
    return library


def _kernel(operator: str, carry_out: Callable[..., Any]) -> Callable[..., Any]:
    overload = getattr(torch.ops.c10d, operator).default
    names = [argument.name for argument in overload._schema.arguments]
    defaults = {a.name: a.default_value for a in overload._schema.arguments if a.has_default_value()}
    below = _keyset_after(_place)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        group = _group_behind(given["process_group"])
        if group is None or any(t.is_meta for v in given.values() for t in _tensors(v)):
            return overload.redispatch(keyset & below, *args, **kwargs)
        _this_thread.below = True
        try:
            return carry_out(group, given)
        finally:
            _this_thread.below = False

    return kernel


def _group_behind(process_group: Any) -> Any:
    """Return our group that has this face; None if it is another group."""
    reference = _groups.get(c10d.ProcessGroup.unbox(process_group))
    return reference() if reference is not None else None


def _options(kind: Callable[[], Any], given: dict[str, Any]) -> Any:
    options = kind()
    options.asyncOp = given.get("async_op", True)
    if given.get("timeout", -1) > 0:
        options.timeout = timedelta(milliseconds=given["timeout"])
    if "root_rank" in given:
        options.rootRank = given["root_rank"]
    if "reduce_op" in given:
        options.reduceOp = _unboxed(given["reduce_op"])
    return options


def _boxed(group: Any, work: Any) -> Any:
    """Return torch's half of `work`, which operators return; the group keeps a reference to our half."""
    _this_thread.work = work
    group.recent_works.append(work)
    return work.boxed()


def _unboxed(boxed: Any) -> Any:
    """Return the reduction in an operator's argument, which lacks the factor of PREMUL_SUM in Python."""
    kinds = c10d.ReduceOp.RedOpType
    kind = kinds(boxed.op())
    if kind != kinds.PREMUL_SUM:
        return dist.ReduceOp(kind)
    if (asked := getattr(_this_thread, "reduce_op", None)) is None:
        raise ValueError(
            "PREMUL_SUM in a graph: torch hides the factor from Python. Scale the tensor, then reduce with SUM."
        )
    return asked


def _lists(
    method: str, kind: Callable[[], Any], *names: str, returns: str = ""
) -> Callable[[Any, dict[str, Any]], Any]:
    """Return a kernel that calls the group's `method` with arguments `names`, and returns `returns` and the work."""

    def carry_out(group: Any, given: dict[str, Any]) -> Any:
        work = _boxed(group, getattr(group, method)(*(given[name] for name in names), _options(kind, given)))
        return (given[returns], work) if returns else work

    return carry_out


def _barrier(group: Any, given: dict[str, Any]) -> Any:
    return _boxed(group, group.barrier(_options(c10d.BarrierOptions, given)))


def _message(method: str, *names: str) -> _Kernel:
    return lambda group, given: _boxed(group, getattr(group, method)(*(given[name] for name in names)))


_REDUCE_SCATTER = c10d.ReduceScatterOptions
_KERNELS: dict[str, _Kernel] = {
    "allreduce_": _lists("allreduce", c10d.AllreduceOptions, "tensors", returns="tensors"),
    "allreduce_coalesced_": _lists("allreduce_coalesced", c10d.AllreduceCoalescedOptions, "tensors"),
    "broadcast_": _lists("broadcast", c10d.BroadcastOptions, "tensors", returns="tensors"),
    "reduce_": _lists("reduce", c10d.ReduceOptions, "tensors"),
    "allgather_": _lists(
        "allgather", c10d.AllgatherOptions, "output_tensors", "input_tensors", returns="output_tensors"
    ),
    "_allgather_base_": _lists(
        "all_gather_single", c10d.AllgatherOptions, "output_tensor", "input_tensor", returns="output_tensor"
    ),
    "allgather_into_tensor_coalesced_": _lists(
        "all_gather_single_coalesced", c10d.AllgatherOptions, "outputs", "inputs"
    ),
    "allgather_coalesced_": _lists("allgather_coalesced", c10d.AllgatherOptions, "output_lists", "input_list"),
    "gather_": _lists("gather", c10d.GatherOptions, "output_tensors", "input_tensors"),
    "scatter_": _lists("scatter", c10d.ScatterOptions, "output_tensors", "input_tensors", returns="output_tensors"),
    "reduce_scatter_": _lists(
        "reduce_scatter", _REDUCE_SCATTER, "output_tensors", "input_tensors", returns="output_tensors"
    ),
    "_reduce_scatter_base_": _lists(
        "reduce_scatter_single", _REDUCE_SCATTER, "output_tensor", "input_tensor", returns="output_tensor"
    ),
    "reduce_scatter_tensor_coalesced_": _lists("reduce_scatter_single_coalesced", _REDUCE_SCATTER, "outputs", "inputs"),
    "alltoall_": _lists("alltoall", c10d.AllToAllOptions, "output_tensors", "input_tensors", returns="output_tensors"),
    "alltoall_base_": _lists(
        "all_to_all_single", c10d.AllToAllOptions, "output", "input", "output_split_sizes", "input_split_sizes"
    ),
    "barrier": _barrier,
    "send": _message("send", "tensors", "dst", "tag"),
    "recv_": _message("recv", "tensors", "src", "tag"),
    "recv_any_source_": _message("recv_anysource", "tensors", "tag"),
}
