"""Turn a fork of the zygote into a rank: the user's `python script.py`, `python -m module` or program.

The script is the process's real `__main__`, run at the bottom of the stack; when it ends, the interpreter's own
finalisation follows (threads joined, atexit run, output flushed) and its own exit code. We only listen: an exception
that nobody caught is reported to the agent with its time before the interpreter prints it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import io
import os
import resource
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from string import Template
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import NoReturn

from phalanx.agent.ending import can_end_quickly, end_quickly
from phalanx.agent.failure import Report
from phalanx.agent.folder import use_in_rank
from phalanx.agent.target import Kind, Target
from phalanx.agent.title import set_command
from phalanx.processes import STACKS_SIGNAL, die_with_parent

_OUR_FDS = 8  # we take so many numbers from the upper end of those that a rank's descriptors may have
_CALLS = tuple(
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "launch", "calls", name)
    for name in ("__main__.py", "rank.py")
)
_LAUNCHER_FILES = (__file__, *_CALLS, "<string>", runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")


@dataclass(frozen=True)
class Assignment:
    """An `Assignment` is all that a rank needs; the first five fields are descriptors, which the rank owns."""

    stdout: int
    stderr: int
    reports: int
    dump: int
    stacks: int
    parent: int
    rank: int
    environment: dict[str, str]
    cpus: list[int]
    kind: Kind
    name: str
    arguments: list[str]
    folder: str
    local_rank_flag: str = ""

    @property
    def target(self) -> Target:
        """Return the script, module or program of the rank, with the argument for its local rank if it takes one.

        As torchrun does, it replaces `${local_rank}` in the arguments by the local rank, and `$$` by a dollar sign.
        """
        local_rank = self.environment["LOCAL_RANK"]
        told = [f"{self.local_rank_flag}={local_rank}"] if self.local_rank_flag else []
        given = [Template(argument).safe_substitute(local_rank=local_rank) for argument in self.arguments]
        return Target(self.kind, self.name, (*told, *given))


def run_worker(assignment: Assignment) -> None:
    """Become the assigned rank; end the process when its code has ended.

    If the interpreter must end it, this returns, or raises what the user's code raised.
    """
    shared = frozenset(sys.modules)
    _become_own_process(assignment)
    report = _Reporter(assignment.rank, _move_up(assignment.reports))
    if assignment.kind == "program":
        _execute(assignment, report)
    _reseed()
    use_in_rank(assignment.folder)
    if not faulthandler.is_enabled():  # else the user asked for dumps on stderr
        faulthandler.enable(file=_move_up(assignment.dump))
    if hasattr(faulthandler, "register"):
        faulthandler.register(
            STACKS_SIGNAL, file=_move_up(assignment.stacks), all_threads=True
        )  # the handler is written in C, so that it also works in a hang
    _record_steps()
    code = _prepare_main(assignment)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # else whoever started us has chosen to ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        code()
    except BaseException as error:
        failed_at = time.monotonic()
        error.__traceback__ = _without_launcher(error.__traceback__)
        if os.getpid() != report.pid:
            raise  # a child that the script forked by hand: its end is the script's affair
        if isinstance(error, SystemExit):
            if compute_exit_status(error.code) != 0:
                report.send(error, failed_at)
            elif error.code:
                print(
                    f"phalanx run: sys.exit({error.code!r}) is success: of an exit code the system keeps eight bits, 0",
                    file=sys.stderr,
                )
            if not can_end_quickly():
                raise
            status = compute_exit_status(error.code)
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
            error.__traceback__ = None  # the frames hold what is to be freed
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


def _report_error(error: BaseException, failed_at: float, report: _Reporter) -> None:
    """Report an error to the agent, and print it as the interpreter does, but without our frames."""
    report.send(error, failed_at)
    sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook = lambda *_: None  # the interpreter's end shall not print it again


def compute_exit_status(code: object) -> int:
    """Return the exit code of a process whose script calls `sys.exit(code)`, as the interpreter finds it."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF  # a C long, of which the system keeps eight bits
    return 1  # it was printed


def _move_up(fd: int) -> int:
    """Move `fd` to a high number, closed in programs that the rank starts; return the number.

    A script that closes descriptors which it has not opened (`os.closerange(3, 64)`, as daemons do) misses it. If the
    script closes it all the same, a file that it opens later gets a low number: what we write never goes into a file of
    the user's.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    floor = (1024 if soft == resource.RLIM_INFINITY else min(soft, 1024)) - _OUR_FDS
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(floor, 3))
    except OSError:  # all numbers up there are taken
        return fd
    os.close(fd)
    return high


def _become_own_process(assignment: Assignment) -> None:
    die_with_parent(assignment.parent)
    os.setpgid(0, 0)  # the terminal's signals reach the agent only; it passes them on, once
    os.dup2(assignment.stdout, 1)
    os.dup2(assignment.stderr, 2)
    os.close(assignment.stdout)
    os.close(assignment.stderr)
    os.environ.update(assignment.environment)
    if assignment.cpus:
        _pin(frozenset(assignment.cpus))
    for stream in (sys.stdout, sys.stderr):
        # Output goes to a pipe but is meant to be seen live, as on a terminal.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _pin(cpus: frozenset[int]) -> None:
    """Pin this process to `cpus`. What it forks (DataLoader workers) may use all cores of the job, as without us."""
    everywhere = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return  # the cores were taken from us since the agent looked; running unpinned is right, only slower
    if cpus == everywhere:
        return

    def release() -> None:
        if os.sched_getaffinity(0) == cpus:  # else the script has chosen
            os.sched_setaffinity(0, everywhere)

    os.register_at_fork(after_in_child=release)
    # DataLoader compares its workers with the cores that the rank is pinned to, and would warn of too many
    counts = "|".join(str(count) for count in range(1, len(everywhere) + 1))
    warnings.filterwarnings("ignore", f"This DataLoader will create ({counts}) worker", UserWarning)


def _execute(assignment: Assignment, report: _Reporter) -> NoReturn:
    """Replace this process by the target's program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and an ignored signal would stay ignored
    try:
        os.execvpe(assignment.name, list(assignment.target.command), os.environ)
    except OSError as error:
        report.send(error, time.monotonic())
        print(f"cannot run {assignment.name}: {error.strerror}", file=sys.stderr)
        os._exit(126)


def _reseed() -> None:
    """Give each rank the random state that a fresh interpreter would have: its own, from the operating system."""
    # Python's `random` reseeds itself after a fork.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # not torch.seed(): that would queue a seed for CUDA too


def _record_steps() -> None:
    """Record this process's steps for the run's report, if one is asked for; processes that it starts record
    nothing.
    """
    folder = os.environ.pop("PHALANX_REPORT", "")
    if folder:
        from phalanx.report.recording import begin_in_rank

        try:
            begin_in_rank(folder)
        except (OSError, ImportError) as error:  # without the C core nothing can be recorded
            print(f"phalanx run: --report: this rank's steps cannot be recorded: {error}", file=sys.stderr)


def _prepare_main(assignment: Assignment) -> Callable[[], object]:
    """Set up `__main__`, `sys.argv` and `sys.path` as the interpreter does; return the function that runs the code."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    command, arguments = assignment.target.command, assignment.target.arguments
    sys.orig_argv = list(command)
    set_command(command)
    safe_path = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    if assignment.kind == "module":
        sys.argv = ["-m", *arguments]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        # private, but it is what `python -m` itself calls, and unchanged since Python 3.3
        run_module: Callable[[str], object] = runpy._run_module_as_main  # type: ignore[attr-defined]
        return lambda: run_module(assignment.name)
    sys.argv = [assignment.name, *arguments]
    path = os.path.abspath(assignment.name)
    if not safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(assignment.name)))
    from importlib.machinery import SourceFileLoader

    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))

    def run_script() -> None:
        with io.open_code(path) as file:
            source = file.read()
        code: CodeType = compile(source, path, "exec", dont_inherit=True)
        exec(code, main.__dict__)

    return run_script


class _Reporter:
    """A `_Reporter` reports this rank's failure to the agent over `reports`."""

    def __init__(self, rank: int, reports: int) -> None:
        self.pid = os.getpid()
        self._rank = rank
        self._reports = reports
        self._identity = _identify(reports)

    def send(self, error: BaseException, at: float) -> None:
        """Send `error`, raised at `at` on the monotonic clock; never raises."""
        try:
            place = _find_place(error)
            names = tuple(cls.__name__ for cls in type(error).__mro__)
            if isinstance(error, SystemExit):
                text, summary = "", f"sys.exit({error.code!r})"  # a decision of the script: the place says enough
            else:
                text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
                # a SyntaxError names the place first, indented; of a message with several lines the first one counts
                said = traceback.format_exception_only(type(error), error)
                summary = next(part for part in said if not part.startswith(" ")).splitlines()[0]
            report = Report(self._rank, self.pid, at, names, summary, place, text)
            if (
                _identify(self._reports) == self._identity
            ):  # else the script has closed it, and opened a file of its own
                os.write(self._reports, report.to_bytes())
        except Exception:
            pass  # the exception's own __str__ failed, or the agent has gone: the exit code still tells


def _identify(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _without_launcher(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _is_launcher(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_launcher(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _LAUNCHER_FILES


def _find_place(error: BaseException) -> str:
    """Return the place of the innermost line of the traceback that is the user's own, such as `train.py:88`; empty if
    there is none.

    What was raised inside of a library is placed where the user called it: that is the line to look at first, and the
    traceback shows the rest.
    """
    if isinstance(error, SyntaxError) and error.filename and os.path.exists(error.filename):
        return f"{os.path.basename(error.filename)}:{error.lineno}"  # the traceback ends at the import of that file
    frames = traceback.extract_tb(error.__traceback__)
    folders = _library_folders()
    users = [frame for frame in frames if not _is_library(frame.filename, folders)] or frames
    return f"{os.path.basename(users[-1].filename)}:{users[-1].lineno}" if users else ""


def _is_library(filename: str, folders: tuple[str, ...]) -> bool:
    parts = filename.split(os.sep)  # one environment may take packages from another
    return filename.startswith(folders) or "site-packages" in parts or "dist-packages" in parts


def _library_folders() -> tuple[str, ...]:
    """Return the folders of Python's own files, of installed packages and of this package."""
    import site
    import sysconfig

    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.path.dirname(__file__))}
    torch = sys.modules.get("torch")  # it may lie elsewhere
    if torch is not None and torch.__file__ is not None:
        folders.add(os.path.dirname(torch.__file__))
    return ("<frozen ", *(os.path.abspath(folder) + os.sep for folder in folders))
