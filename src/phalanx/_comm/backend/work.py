"""`PhalanxWork` is the result of an asynchronous call; `SerialExecutor` is a thread that runs calls in order."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._base.threads import start_thread
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.diagnostics.failure_report import nested
from phalanx.errors import ClosedError, DeadlineError, PhalanxError

Result = TypeVar("Result")
_SMALL_BYTES = 64
_OVER = threading.Event()  # shared, because an event takes a kilobyte
_OVER.set()


class _Process:
    """A `_Process` counts the forks that led to this process, because a child cannot wait for its parent's work."""

    def __init__(self) -> None:
        self.number = 0

    def after_fork(self) -> None:
        self.number += 1


process = _Process()
os.register_at_fork(after_in_child=process.after_fork)


@untraced
class PhalanxWork(dist.Work):
    """A `PhalanxWork` is an operation that one of the group's executors runs or has run.

    `wait` raises the operation's own error. Futures from `get_future` carry the output tensors; their errors arrive
    as RuntimeError with the same text, which is all that torch's futures can carry.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        super().__init__()
        self._outputs: Sequence[Any] | None = outputs
        self._weak: list[Any] = []
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._completed = False
        self.source = -1  # the sender of a received message
        self._process = process.number
        self.executor: SerialExecutor | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the operation has completed; return True, or raise its error. A numeric timeout is in seconds.

        Raises:
            DeadlineError: the operation has not completed within `timeout`, if that is above zero; it continues.
        """
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        deadline = Deadline.after(timeout) if timeout is not None and timeout > timedelta(0) else None
        executor = self.executor
        if not self._done.is_set():
            self._check_can_wait()
            self.progress(deadline)
        wait = partial(self._done.wait, None if deadline is None else deadline.left_s)
        try:
            over = wait() if executor is None or self._done.is_set() else executor.run_here(wait)
        except BaseException as error:  # Ctrl-C, or a signal handler that raised
            if executor is not None and executor.interrupted is not None:
                executor.interrupted(error)
            raise
        if not over:
            assert deadline is not None
            raise DeadlineError(f"the operation had not completed after {deadline.timeout_s} s; it continues")
        if self._error is not None:
            raise self._error
        return True

    def progress(self, deadline: Deadline | None) -> None:
        """Make progress with the operation until it has completed or the deadline has passed; may return early.

        Without a deadline, run the operation in this thread if it is next in the queue. In a callback of an earlier
        operation, run the queue up to this operation.
        """
        if self.executor is not None and (deadline is None or self.executor.is_in_callback()):
            self.executor.help(self)

    def _check_can_wait(self) -> None:
        """Check that this process and this thread can wait for the operation.

        Raises:
            ClosedError: this process was forked after the operation was called.
            PhalanxError: this is a signal handler, and the operation that it interrupted must complete first.
        """
        if self._process != process.number:
            raise ClosedError(
                "wait: the operation was called before this process was forked, and runs in the parent process.\n"
                "Wait for it in the parent, or start processes that communicate with spawn."
            )
        executor = self.executor
        if executor is not None and executor.is_nested():
            raise nested("wait")

    def synchronize(self) -> None:
        """Block as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, successfully or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the operation's error, if any."""
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return list(self._values())

    def source_rank(self) -> int:
        """Return the sender of a received message."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of output tensors."""
        with self._lock:
            if self._completed:
                done = self.new_future()
                self.fulfil(done, list(self._values()) if self._error is None else [])
                return done.then(self._unwrap)
            if self._future is None:
                self._future = self.new_future()
            return self._future.then(self._unwrap)

    def new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def fulfil(self, future: torch.futures.Future[Any], outputs: list[Any]) -> None:
        future.set_result(outputs)

    def _unwrap(self, future: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return future.value()

    def _values(self) -> Sequence[Any]:
        if self._outputs is not None:
            return self._outputs
        values = [ref() for ref in self._weak]
        if any(value is None for value in values):
            raise PhalanxError("the operation's tensors were freed: the program kept no reference to its Work")
        return values

    def complete(self, error: BaseException | None) -> Callable[[], None] | None:
        """Record the outcome, before any waiter reads it. The thread that ran the operation calls this once.

        If a future was requested, return a function that notifies its callbacks; call it before `wake_waiters`.
        """
        outputs = self._outputs or ()
        with self._lock:
            self._error = error
            self._completed = True
            future, self._future = self._future, None
            self.executor = None
        if future is None:
            return None
        return lambda: self.fulfil(future, list(outputs))

    def release_outputs(self) -> bool:
        """Keep only weak references to the tensors; return False if the operation has not completed.

        Keep strong references to small tensors: DDP's count of the ranks that have not joined is stored nowhere else.
        """
        with self._lock:
            if not self._completed:
                return False
            outputs = self._outputs or ()
            if all(isinstance(o, Tensor) for o in outputs) and sum(_nbytes(o) for o in outputs) > _SMALL_BYTES:
                self._weak = [weakref.ref(o) for o in outputs]
                self._outputs = None
            return True

    def wake_waiters(self) -> None:
        """Wake all waiters. Completed works then share one event, because the group keeps the works for a long time."""
        self._done.set()
        self._done = _OVER


_MOST_RECENT, _EXAMINED = 4096, 8


class RecentWorks:
    """`RecentWorks` keeps the latest works of a group alive, but not their tensors.

    torch's C++ may keep its half of a Work for a long time, and would wait forever without the Python half. `append`
    releases the tensors of completed works that only this object references. There is no lock, because a signal handler
    may interrupt `append` and call it again.

    Cost: each `append` examines up to `_EXAMINED` works.
    """

    def __init__(self) -> None:
        self._works: deque[PhalanxWork | CompletedWork] = deque(maxlen=_MOST_RECENT)
        self._with_outputs: deque[tuple[int, PhalanxWork]] = deque()
        self._number = 0

    def __reversed__(self) -> Iterator[PhalanxWork | CompletedWork]:
        return reversed(self._works)

    def append(self, work: PhalanxWork | CompletedWork) -> None:
        """Add a work, and release the tensors of completed works that only this object references."""
        for _ in range(min(_EXAMINED, len(self._with_outputs))):
            try:
                number, one, count = _pop(self._with_outputs)
            except IndexError:  # another thread has taken the rest
                break
            # The tensors of a work that is about to leave `_works` are left to its other owners.
            is_recent = number > self._number - _MOST_RECENT + _EXAMINED
            if is_recent and (count > _REFERENCES_HERE or not one.release_outputs()):
                self._with_outputs.append((number, one))
        self._number += 1
        self._works.append(work)
        if isinstance(work, PhalanxWork):
            self._with_outputs.append((self._number, work))

    def clear(self) -> None:
        self._works.clear()
        self._with_outputs.clear()


def _pop(works: deque[tuple[int, Result]]) -> tuple[int, Result, int]:
    """Remove the first work; return its number, the work, and the number of references to it."""
    number, one = works.popleft()
    return number, one, sys.getrefcount(one)


def _measure_references() -> int:
    """Return `_pop`'s count for an object that only one other deque references; Python versions count differently."""
    probe = object()
    others, waiting = deque([probe]), deque([(0, probe)])
    del probe
    *_, count = _pop(waiting)
    others.clear()
    return count


_REFERENCES_HERE = _measure_references()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # sparse tensors do not have Tensor.nbytes


@untraced
class CompletedWork(dist.Work):
    """A `CompletedWork` is the result of a call that was complete when it returned."""

    def __init__(self, outputs: Sequence[Any] = (), *, source: int = -1) -> None:
        super().__init__()
        self._outputs = outputs
        self._source = source

    def source_rank(self) -> int:
        """Return the sender of a received message."""
        return self._source

    _source_rank = source_rank

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future


class Closable(Protocol):
    """A `Closable` must be closed before the process leaves the group: an executor, or the inbox."""

    def close(self, timeout_s: float) -> bool:
        """Complete the queued operations; return whether they ended within `timeout_s`."""


class QueueCounter(Protocol):
    """A `QueueCounter` counts queued operations for the core, whose gradient rounds bypass the queue."""

    def issue(self) -> None:
        """Record that an action is about to be queued."""

    def carried_out(self) -> None:
        """Record that an action and the callbacks of its future have completed."""


Action = Callable[[], None]


class SerialExecutor:
    """A `SerialExecutor` runs actions in order of submission, in one thread, which starts with the first action.

    A thread that waits for the next action in the queue runs it itself, so that a synchronous call, such as
    `dist.recv`, never changes threads. If `interrupted` is given, actions may block signals. The main thread must
    handle Ctrl-C, so it runs no such action; when an exception ends its wait, it calls `interrupted` with the
    exception, to end the action. With `linger_s`, the thread exits after being idle for that long.

    With `callbacks_first`, an operation that a future's callback calls runs within that call, before all queued
    operations. PowerSGD's callbacks wait for collectives that they call: if queued, these would deadlock; and their
    place in the order must not depend on the progress of each rank's main thread.
    """

    def __init__(
        self,
        name: str,
        *,
        callbacks_first: bool = False,
        interrupted: Callable[[BaseException], None] | None = None,
        linger_s: float | None = None,
        counter: QueueCounter | None = None,
    ) -> None:
        self.name = name
        self.callers: set[int] = set()
        """The threads that run an operation or wait for one; in these, only a signal handler can make another call."""
        self.interrupted = interrupted
        self._counter = counter
        self._linger_s = linger_s
        self._callbacks_first = callbacks_first
        self.is_bypassed = False  # a thread is in a `bypass` block
        self._in_callbacks = -1  # the thread that runs a future's callbacks, and owns the executor meanwhile
        self.items: deque[tuple[Action, PhalanxWork]] = deque()
        self.busy = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Return whether nothing is queued or running, so that a new call need not wait."""
        return not (self.busy or self.items or self.is_bypassed)

    @property
    def is_over(self) -> bool:
        """Return whether nothing is queued or running, and the thread has ended."""
        return self.idle and self._thread is None

    def put(self, action: Action, work: PhalanxWork) -> PhalanxWork:
        """Queue `action`, or run it in a callback if `callbacks_first`; `work` completes when the action has run."""
        if self._callbacks_first and self.is_in_callback():
            self.run_here(partial(self._carry_out, (action, work), nested=True))
            return work
        work.executor = self
        return self.run_here(partial(self._queue, action, work))

    def _queue(self, action: Action, work: PhalanxWork) -> PhalanxWork:
        with self._changed:
            if self._closing:  # another thread has closed the group
                work.complete(
                    ClosedError(f"{self.name}: the group was destroyed in this process before the operation began.")
                )
                work.wake_waiters()
                return work
            if self._thread is None:
                self._thread = start_thread(self._run, self.name)
            if self._counter is not None:
                self._counter.issue()
            self.items.append((action, work))
            self._changed.notify_all()
        return work

    def is_nested(self) -> bool:
        """Return whether the calling thread runs a signal handler that interrupted an operation."""
        return threading.get_ident() in self.callers

    def is_in_callback(self) -> bool:
        """Return whether the calling thread runs a callback of an operation's future: it owns the executor."""
        return self._in_callbacks == threading.get_ident()

    def run_here(self, operation: Callable[[], Result]) -> Result:
        """Run `operation` in the calling thread, which is one of the `callers` meanwhile.

        A signal handler may interrupt any line of `operation`, even while it holds a lock.
        """
        me = threading.get_ident()
        if me in self.callers:
            return operation()
        try:
            self.callers.add(me)
            return operation()
        finally:
            self.callers.discard(me)

    @contextlib.contextmanager
    def bypass(self) -> Iterator[None]:
        """Make other threads queue their calls while this thread is in an operation that bypasses the queue."""
        me = threading.get_ident()
        try:
            self.is_bypassed = True
            self.callers.add(me)
            yield
        finally:
            self.callers.discard(me)
            self.is_bypassed = False

    def help(self, work: PhalanxWork) -> None:
        """Run the action of `work` in this thread if it is next in the queue; in a callback, run the queue up to it."""
        if self.is_in_callback():
            self._carry_out_up_to(work)
            return
        if self.interrupted is not None and threading.current_thread() is threading.main_thread():
            return
        self.run_here(partial(self._carry_out_next, work))

    def _carry_out_up_to(self, work: PhalanxWork) -> None:
        """Run the queue in order until `work` has completed: during a callback, no other thread can run the queue."""
        while not work._done.is_set():
            with self._changed:
                if not self.items:
                    return
                item = self.items.popleft()
            self.run_here(partial(self._carry_out, item, nested=True))
            if self._counter is not None:
                self._counter.carried_out()

    def _carry_out_next(self, work: PhalanxWork) -> None:
        with self._changed:
            if self.busy or not self.items or self.items[0][1] is not work:
                return
            self.busy = True  # set before the item leaves the queue, because `idle` reads without the lock
            item = self.items.popleft()
        self._carry_out(item)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self.busy and (self.items or self._closing), self._linger_s)
                if not self.items and not self.busy:
                    if not self._closing:
                        self._thread = None  # the next action starts another thread
                    return
                if self.busy:
                    continue
                self.busy = True
                item = self.items.popleft()
            self.run_here(partial(self._carry_out, item))
            del item

    def _carry_out(self, item: tuple[Action, PhalanxWork], *, nested: bool = False) -> None:
        """Run an action and complete its work; the calling thread is one of the `callers`, except in callbacks."""
        action, work = item
        error: BaseException | None = None
        try:
            action()
        except BaseException as e:  # the waiting thread must receive any exception
            error = e
        notify = work.complete(error)
        if notify is not None:
            self._in_callbacks = me = threading.get_ident()
            self.callers.discard(me)  # a callback may call operations
            notify()  # torch stores a callback's error in the callback's own future
            self.callers.add(me)
        # Clear `busy` before waking the waiting thread, or its next call would be queued.
        if not nested:
            self._in_callbacks = -1
            if self._counter is not None:
                self._counter.carried_out()
            with self._changed:
                self.busy = False
                self._changed.notify_all()
        self.callers.discard(threading.get_ident())  # before the waiting thread makes its next call
        work.wake_waiters()

    def close(self, timeout_s: float) -> bool:
        """Stop the thread after the queued actions; return whether it ended within `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()
