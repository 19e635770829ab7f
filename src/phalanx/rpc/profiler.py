"""Profile remote functions as well: each answer carries the profiler events of its call.

    caller    |- rpc_sync#f(a -> b) -----------------------|       events of its own
    callee         |- f: aten::mul |- rpc_sync#g(b -> c) -|        rpc_sync#f(a -> b)#remote_op: aten::mul, ...

`profile` extends `torch.autograd.profiler_legacy.profile`, because Python code can create the events of the legacy
profiler, but not those of `torch.profiler`.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch.autograd import profiler_legacy as legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from phalanx._base.torch_names import find
from phalanx.rpc import current
from phalanx.rpc.agent.incoming_call import ProfiledResult, RemoteEvent

_profiler_enabled: Any = find(
    "torch.autograd._profiler_enabled", loses="a profile does not show calls of phalanx.rpc", instead=bool
)
_LOSES = "phalanx.rpc.profile does not work"
_parse: Any = find("torch.autograd.profiler_legacy._parse_legacy_records", loses=_LOSES)
_end: Any = find("torch.autograd._disable_profiler_legacy", loses=_LOSES)
_Future: Any = find("torch._C.Future", loses=_LOSES)

_REMOTE = "#remote_op: "  # PyTorch's prefix for remote events
_THREADS = 1 << 20  # more threads than a process has: threads of different workers get different numbers
_thread = threading.local()
_FIELDS = ("id", "name", "thread", "fwd_thread", "input_shapes", "stack", "scope", "cpu_memory_usage", "sequence_nr")
_PLAIN: dict[str, Any] = {**dict.fromkeys(_FIELDS, 0), "input_shapes": [], "stack": [], "sequence_nr": -1}


class profile(legacy.profile):
    """`profile` is `torch.autograd.profiler_legacy.profile` plus the events of remote functions.

    A remote function's events are centered in its call, because workers do not share a clock. The remote events of a
    call that is not answered by the end of the profile are missing.
    """

    def __init__(self, enabled: bool = True, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(enabled, **options)  # type: ignore[no-untyped-call]
        self._options = options
        self._gathered: list[RemoteEvent] = []
        self._own: list[Any] = []
        self._began = 0.0
        self._has_ended = False

    def __enter__(self) -> profile:
        super().__enter__()  # type: ignore[no-untyped-call]
        if self.enabled:
            self._began = time.perf_counter()
            _thread.profile = self
        return self

    def __exit__(self, *error: Any) -> Literal[False]:
        if not self.enabled:
            return False
        _thread.profile = None
        self._has_ended = True
        node_id = _node_id()
        self._own = _parse(_end())
        for event in self._own:
            event.node_id = node_id
        events = sorted([*self._own, *map(_make, self._gathered)], key=_order)
        make: Any = EventList
        self.function_events = make(events, profile_memory=self.profile_memory, with_flops=self.with_flops)
        self.function_events._build_tree()
        return False

    def wrap(self, name: str, work: tuple[Any, ...]) -> tuple[tuple[Any, ...], Callable[[Any], Any]]:
        sent_us = self._now_us()

        def read(answer: Any) -> Any:
            if not isinstance(answer, ProfiledResult):
                return answer
            begin_us = sent_us + max(0.0, self._now_us() - sent_us - answer.duration_us) / 2
            self._gathered += [_move(event, name, begin_us) for event in answer.events]
            if self._has_ended:  # answered after the end (an async function): the call's own event is missing
                self._gathered.append(RemoteEvent(_node_id(), sent_us, self._now_us(), True, {**_PLAIN, "name": name}))
            return answer.result

        return (run_profiled, (self._options, *work), {}), read

    def _now_us(self) -> float:
        return (time.perf_counter() - self._began) * 1e6

    def with_events(self, result: Any) -> ProfiledResult:
        own = [
            RemoteEvent(
                event.node_id,
                event.time_range.start,
                event.time_range.end,
                event.is_async,
                {name: getattr(event, name) for name in _FIELDS},
            )
            for event in self._own
        ]
        return ProfiledResult(result, self._now_us(), [*own, *self._gathered])


def _node_id() -> int:
    return current.agent().me.info.id if current.is_set() else -1


def current_profile() -> profile | None:
    """Return this thread's active profile, which collects the events of calls; None if there is none."""
    found: profile | None = getattr(_thread, "profile", None)
    return found


def run_profiled(options: Mapping[str, Any], function: Any, args: Any, kwargs: Any) -> Any:
    """Call the function on the callee, and return its result with the events of the call."""
    if _profiler_enabled():  # the user is already profiling on this worker
        return function(*args, **kwargs)
    with profile(**options) as recorded:
        result = function(*args, **kwargs)
    if isinstance(result, _Future):  # the result of a function with @async_execution
        return result.then(lambda done: recorded.with_events(done.value()))
    return recorded.with_events(result)


run_profiled._calls_function = True  # type: ignore[attr-defined]


def _move(event: RemoteEvent, name: str, begin_us: float) -> RemoteEvent:
    """Return an event of a callee, shifted to the caller's clock; the call `name` began there at `begin_us`."""
    fields = {**event.fields, "name": name + _REMOTE + event.fields["name"]}
    return RemoteEvent(event.node_id, event.start_us + begin_us, event.end_us + begin_us, event.is_async, fields)


def _make(event: RemoteEvent) -> FunctionEvent:
    fields = dict(event.fields)
    fields["thread"] += (1 + event.node_id) * _THREADS
    return FunctionEvent(  # type: ignore[no-untyped-call]
        **fields,
        trace_name=fields["name"],
        node_id=event.node_id,
        start_us=event.start_us,
        end_us=event.end_us,
        is_async=event.is_async,
        is_remote=True,
        is_legacy=True,
    )


def _order(event: FunctionEvent) -> tuple[float, float]:
    return event.time_range.start, -event.time_range.end
