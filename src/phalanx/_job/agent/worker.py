"""Turn a fork of the zygote into a rank: the user's `python script.py`, `python -m module` or program.

The script is the process's real `__main__`, run at the bottom of the stack. Afterwards the rank exits like any Python
program: it joins threads, runs atexit hooks, flushes output and sets the exit code. `end_quickly` does so without
finalising the interpreter. The agent receives an uncaught exception and its time before the traceback is printed.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import functools
import gc
import io
import marshal
import os
import resource
import runpy
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from string import Template
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

import phalanx
from phalanx._base.processes import STACKS_SIGNAL, die_with_parent
from phalanx._job.agent.folder import use_in_rank
from phalanx._job.agent.reporter import Reporter
from phalanx._job.agent.target import BYTECODE_HEADER, JobTarget, RankSetup, find_form
from phalanx._job.agent.title import set_command

_OUR_FDS = 8  # number of a rank's highest descriptors that are reserved for us
_CALLS = tuple(
    os.path.join(os.path.dirname(phalanx.__file__), "_job", "launch", "calls", name)
    for name in ("__main__.py", "rank.py")
)
_LAUNCHER_FILES = (__file__, *_CALLS, "<string>", runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")


@dataclass(frozen=True)
class Assignment:
    """An `Assignment` is the input of a new rank; the first five fields are descriptors, which the rank owns."""

    stdout: int
    stderr: int
    reports: int
    dump: int
    stacks: int
    parent: int
    setup: RankSetup
    target: JobTarget
    folder: str  # the job's temporary folder


def fill_in_local_rank(target: JobTarget, local_rank: str, flag: str) -> JobTarget:
    """Return the target with one rank's arguments. Unless `flag` is empty, the first argument is `FLAG=LOCAL_RANK`.

    As in torchrun, `${local_rank}` in the arguments becomes the local rank, and `$$` a dollar sign.
    """
    first = [f"{flag}={local_rank}"] if flag else []
    arguments = (Template(argument).safe_substitute(local_rank=local_rank) for argument in target.arguments)
    return JobTarget(target.kind, target.name, (*first, *arguments))


def run_worker(assignment: Assignment) -> None:
    """Run the assigned rank in this process, and exit.

    If the interpreter must be finalised, return instead, or raise the exception of the user's code.
    """
    shared = frozenset(sys.modules)
    _become_own_process(assignment)
    report = Reporter(assignment.setup.rank, _move_up(assignment.reports))
    if assignment.target.kind == "program":
        _execute(assignment, report)
    _reseed()
    use_in_rank(assignment.folder)
    if not faulthandler.is_enabled():  # otherwise the user wants dumps on stderr
        faulthandler.enable(file=_move_up(assignment.dump))
    if hasattr(faulthandler, "register"):
        # the handler is in C, so it also works in a hang
        faulthandler.register(STACKS_SIGNAL, file=_move_up(assignment.stacks), all_threads=True)
    _record_steps()
    code = _prepare_main(assignment, report)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # otherwise SIGINT was ignored when the command started
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        code()
    except BaseException as error:
        failed_at = time.monotonic()
        error.__traceback__ = _without_launcher(error.__traceback__)
        if os.getpid() != report.pid:
            raise  # a child that the script has forked: the script handles its exit
        if isinstance(error, SystemExit):
            if compute_exit_status(error.code) == os.EX_TEMPFAIL and type(error) is SystemExit:
                pass  # not a failure: the script asks to be restarted later
            elif compute_exit_status(error.code) != 0:
                report.send(error, failed_at)
            elif error.code:
                print(
                    f"phalanx run: sys.exit({error.code!r}) counts as success: the system keeps only the low eight "
                    "bits, here 0",
                    file=sys.stderr,
                )
            if not can_end_quickly():
                raise
            status = compute_exit_status(error.code)
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr or sys.__stderr__)
            error.__traceback__ = None  # its frames reference objects to be freed
            error.code = None
        else:
            _report_error(error, failed_at, report)
            if isinstance(error, KeyboardInterrupt) or not can_end_quickly():
                raise
            status = 1
            error.__traceback__ = error.__cause__ = error.__context__ = None
    if os.getpid() == report.pid and can_end_quickly():
        del code
        end_quickly(status, shared)
        sys.exit(status)


def _report_error(error: BaseException, failed_at: float, report: Reporter) -> None:
    """Report an error to the agent, and print it as the interpreter would, but without Phalanx's frames."""
    report.send(error, failed_at)
    sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook = lambda *_: None  # the interpreter must not print it again


def compute_exit_status(code: object) -> int:
    """Return the exit code that the interpreter sets after `sys.exit(code)`."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF  # the system keeps eight bits of a C long
    return 1  # the interpreter prints `code`


def _move_up(fd: int) -> int:
    """Move `fd` to a high number, close-on-exec; return the number.

    A script that closes inherited descriptors (`os.closerange(3, 64)`, as daemons do) rarely closes this one. If it
    does, the files that the script opens later get low numbers, so we never write to one of them.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    floor = (1024 if soft == resource.RLIM_INFINITY else min(soft, 1024)) - _OUR_FDS
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(floor, 3))
    except OSError:  # no high number is free
        return fd
    os.close(fd)
    return high


def _become_own_process(assignment: Assignment) -> None:
    die_with_parent(assignment.parent)
    os.setpgid(0, 0)  # the terminal's signals reach only the agent, which relays them once
    os.dup2(assignment.stdout, 1)
    os.dup2(assignment.stderr, 2)
    os.close(assignment.stdout)
    os.close(assignment.stderr)
    os.environ.update(assignment.setup.environment)
    if assignment.setup.cpus:
        _pin(frozenset(assignment.setup.cpus))
    for stream in (sys.stdout, sys.stderr):
        # Output goes to a pipe, but must appear at once, as on a terminal.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _pin(cpus: frozenset[int]) -> None:
    """Pin this process to `cpus`. Its children (DataLoader workers, programs) may use all cores of the job."""
    everywhere = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return  # the system has withdrawn these cores; running unpinned is only slower
    if cpus == everywhere:
        return

    def release() -> bool:
        chosen = os.sched_getaffinity(0) != cpus  # the script has pinned itself
        if not chosen:
            os.sched_setaffinity(0, everywhere)
        return not chosen

    os.register_at_fork(after_in_child=release)
    _release_while_starting_programs(release, lambda: os.sched_setaffinity(0, cpus))
    # DataLoader compares the number of its workers with the rank's cores, and would warn of too many workers
    counts = "|".join(str(count) for count in range(1, len(everywhere) + 1))
    warnings.filterwarnings("ignore", f"This DataLoader will create ({counts}) worker", UserWarning)


def _release_while_starting_programs(release: Callable[[], bool], pin: Callable[[], None]) -> None:
    """Unpin the calling thread while it starts a program, which inherits the thread's cores and runs no fork hook.

    `subprocess` and multiprocessing's "spawn" and "forkserver" start programs through these functions.
    """
    import _posixsubprocess

    def released(start: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(start)
        def start_released(*arguments: Any, **options: Any) -> int:
            if not release():
                return start(*arguments, **options)
            try:
                return start(*arguments, **options)
            finally:
                pin()

        return start_released

    for module in (_posixsubprocess, sys.modules.get("subprocess"), os):
        for name in ("fork_exec", "_fork_exec", "posix_spawn", "posix_spawnp"):
            if hasattr(module, name):
                setattr(module, name, released(getattr(module, name)))


def _execute(assignment: Assignment, report: Reporter) -> NoReturn:
    """Replace this process with the target's program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores SIGPIPE, and the program would inherit that
    try:
        os.execvpe(assignment.target.name, list(assignment.target.command), os.environ)
    except OSError as error:
        report.send(error, time.monotonic())
        print(f"cannot run {assignment.target.name}: {error.strerror}", file=sys.stderr)
        os._exit(126)


def _reseed() -> None:
    """Seed the random generators from the operating system, as in a fresh interpreter."""
    # Python's `random` reseeds itself after a fork.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # not torch.seed(), which also queues a seed for CUDA


def _record_steps() -> None:
    """Record this process's steps for the run's report, if one was requested; its children record nothing."""
    folder = os.environ.pop("PHALANX_REPORT", "")
    if folder:
        from phalanx._job.report.recording import begin_in_rank

        try:
            begin_in_rank(folder)
        except (OSError, ImportError) as error:  # recording needs the C core
            print(f"phalanx run: --report: this rank's steps cannot be recorded: {error}", file=sys.stderr)


def _prepare_main(assignment: Assignment, report: Reporter) -> Callable[[], object]:
    """Set up `__main__`, `sys.argv` and `sys.path` as the interpreter does; return the function that runs the code."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):  # later versions compute a module's annotations on demand
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    command, arguments = assignment.target.command, assignment.target.arguments
    sys.orig_argv = list(command)
    set_command(command)
    safe_path = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    if assignment.target.kind == "module":
        sys.argv = ["-m", *arguments]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        # private, but `python -m` itself calls it, and it is unchanged since Python 3.3
        run_module: Callable[[str], object] = runpy._run_module_as_main  # type: ignore[attr-defined]
        return lambda: run_module(assignment.target.name)
    sys.argv = [assignment.target.name, *arguments]
    path = os.path.abspath(assignment.target.name)
    form = find_form(path)
    if form in ("folder", "archive"):
        sys.path.insert(0, path)  # as Python does, even with -P
        run_main: Callable[[str, bool], object] = runpy._run_module_as_main  # type: ignore[attr-defined]
        return lambda: run_main("__main__", False)
    if not safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(assignment.target.name)))
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    loader = SourcelessFileLoader if form == "bytecode" else SourceFileLoader
    main.__dict__.update(__file__=path, __loader__=loader("__main__", path))
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None

    def run_script() -> None:
        with io.open_code(path) as file:
            content = file.read()
        if form == "bytecode":
            report.script = marshal.loads(memoryview(content)[BYTECODE_HEADER:])
        else:
            report.script = compile(content, path, "exec", dont_inherit=True)
        exec(report.script, main.__dict__)

    return run_script


def _without_launcher(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _is_launcher(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_launcher(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _LAUNCHER_FILES


# Exit a rank like any Python program, but without tearing down the interpreter.
#
# The ranks share the pages of the zygote's imports. At exit, the interpreter visits every object of every module to
# free it, and a visit copies the object's page: 8 ranks of 49 MB grew to 940 MB together, and 32 idle ranks took 20 s
# to exit. So the rank itself takes those steps of the interpreter's exit that concern the program, in the same order,
# and leaves the rest to the kernel, which frees pages without reading them.
#
# threads joined > atexit > the script's own modules cleared (files closed, __del__) > streams flushed > _exit


def can_end_quickly() -> bool:
    """Return whether the finalisation of the interpreter and of C libraries can be skipped."""
    if sys.flags.inspect or "LD_PRELOAD" in os.environ:  # a profiler may write its results at the very end
        return False
    if "mpi4py.MPI" in sys.modules:  # mpi4py finalizes MPI in a C-level exit hook
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def end_quickly(status: int, shared: Collection[str]) -> None:
    """Exit the process with `status`; from outside this looks like the interpreter's own exit.

    `shared` are the modules loaded before the script, which stay untouched. Return only if the streams cannot be
    flushed: the interpreter then reports that, with its own exit code.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as at the interpreter's exit; joins non-daemon threads
    except BaseException:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    gc.collect()
    # The interpreter stops daemon threads before it clears modules. Here they still run whenever this thread blocks,
    # and their errors are not printed.
    sys.setswitchinterval(1e6)
    threading.excepthook = lambda _: None
    _free_modules(shared)
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        return
    ctypes.CDLL(None).fflush(None)  # flush the output of C libraries
    os._exit(status)


def _free_modules(shared: Collection[str]) -> None:
    """Free the objects of the script's modules, the latest first: open files are flushed, `__del__` runs."""
    names = [name for name in sys.modules if name not in shared or name == "__main__"]
    left: list[weakref.ref[ModuleType]] = []
    for name in reversed(names):
        module = sys.modules.pop(name)
        if isinstance(module, ModuleType):
            left.append(weakref.ref(module))
        del module
    gc.collect()
    for reference in left:
        alive = reference()
        if alive is not None:
            _clear(vars(alive))
            del alive
    gc.collect()


def _clear(names: dict[str, Any]) -> None:
    """Clear a module that is still referenced, as the interpreter does: private names first, builtins never."""
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name.startswith("_") and not name.startswith("__")) == private:
                names[name] = None
