"""Report an uncaught exception in a rank, with the user's own lines, and with advice if the cause is known."""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from types import CodeType

import phalanx
from phalanx._job.agent.failure import ExceptionReport

_NO_TERMINAL = (
    "A debugger was started, but ranks have no terminal. To step through the script, run it as the only rank, without "
    "`phalanx run`:\n"
    "  RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python SCRIPT\n"
    "`phalanx stacks` shows the stacks of a running job."
)
_NO_GUARD = (
    "The script starts processes by 'spawn' or 'forkserver' (the default from Python 3.14 on). Each process "
    "imports the script, and would start more processes. Put the script's statements below this line:\n"
    '  if __name__ == "__main__":'
)
_LIBRARY_FRAMES_HEAD = "Traceback (most recent call last; --traceback shows the lines of libraries):\n"
# PyTorch's C++ appends Python frames to the message of an exception that it rethrows.
_FRAMES_IN_MESSAGE = re.compile(r"\n\nAt:\n(  .+\(\d+\): .+\n)+\n*")
_CAUSE = "\nThe exception above caused this one:\n\n"


class Reporter:
    """A `Reporter` reports this rank's failure to the agent over the descriptor `reports`."""

    def __init__(self, rank: int, reports: int) -> None:
        self.pid = os.getpid()
        self.script: CodeType | None = None  # the script's code, once it is compiled
        self._rank = rank
        self._reports = reports
        self._identity = _identify(reports)

    def send(self, error: BaseException, at: float) -> None:
        """Send `error`, raised at `at` on the monotonic clock; never raise."""
        try:
            report = self._describe(error, at)
            if _identify(self._reports) == self._identity:  # otherwise the descriptor is now a file of the script
                os.write(self._reports, report.to_bytes())
        except Exception:
            pass  # the exception's __str__ failed, or the agent has exited: the exit code still reports the failure

    def _describe(self, error: BaseException, at: float) -> ExceptionReport:
        names = tuple(cls.__name__ for cls in type(error).__mro__)
        if isinstance(error, SystemExit):
            # a deliberate exit: its place is enough
            text, own_lines, summary = "", "", f"sys.exit({error.code!r})"
        else:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            own_lines = format_own_lines(error)
            # of a SyntaxError, the first lines are its place, indented; use the first line of the message
            said = traceback.format_exception_only(type(error), error)
            summary = next(part for part in said if not part.startswith(" ")).splitlines()[0]
        advice = self._advise(error)
        return ExceptionReport(self._rank, self.pid, at, names, summary, find_place(error), text, "", own_lines, advice)

    def _advise(self, error: BaseException) -> str:
        frames = [frame for one in _chain(error) for frame in traceback.extract_tb(one.__traceback__)]
        if any(os.path.basename(frame.filename) in ("bdb.py", "pdb.py") for frame in frames):
            return _NO_TERMINAL
        starts_anew = {"multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver"} & sys.modules.keys()
        if (
            starts_anew
            and self.script is not None
            and "__name__" not in self.script.co_names
            and any(frame.name == "<module>" and frame.filename == self.script.co_filename for frame in frames)
            and any(_starts_processes(frame.filename) for frame in frames)
        ):
            return _NO_GUARD
        if isinstance(error, ModuleNotFoundError) and str(error) == f"No module named {error.name!r}":
            return (
                f"{error.name!r} is neither in the script's folder nor installed for {sys.executable}, which runs the "
                "ranks.\n"
                f"Install it there ({shlex.quote(sys.executable)} -m pip install ...), or use the `phalanx` command of "
                "the environment that has it."
            )
        return ""


def format_own_lines(error: BaseException) -> str:
    """Return the traceback without the lines of libraries, except the innermost if another library raised.

    Earlier exceptions of the chain are left out if none of their lines is the user's. If none of the lines of `error`
    is, and for exception groups, return the whole traceback.
    """
    whole = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    folders = _library_folders()
    if hasattr(error, "exceptions"):
        return whole
    parts, is_short = [], False
    for one in _chain(error):
        frames = traceback.extract_tb(one.__traceback__)
        own = [frame for frame in frames if not _is_library(frame.filename, folders)]
        if not own and one is not error:
            continue
        if frames and own and frames[-1] is not own[-1] and not _is_ours(frames[-1].filename):
            own.append(frames[-1])
        # without columns, which would add a line of ^^^^
        lines = [traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line=frame.line) for frame in own]
        said = "".join(traceback.format_exception_only(type(one), one))
        said = _FRAMES_IN_MESSAGE.sub("\n", said)
        parts.append("".join([_LIBRARY_FRAMES_HEAD, *traceback.StackSummary.from_list(lines).format(), said]))
        is_short = bool(own)
    return _CAUSE.join(parts) if is_short else whole


def find_place(error: BaseException) -> str:
    """Return the innermost line of the traceback that is the user's own, as `train.py:88`; "" without a traceback.

    For an exception raised in a library, this is the user's call. If no line is the user's, return the innermost one.
    """
    if isinstance(error, SyntaxError) and error.filename and os.path.exists(error.filename):
        return f"{os.path.basename(error.filename)}:{error.lineno}"  # the traceback ends at the file's import
    frames = traceback.extract_tb(error.__traceback__)
    folders = _library_folders()
    users = [frame for frame in frames if not _is_library(frame.filename, folders)] or frames
    return f"{os.path.basename(users[-1].filename)}:{users[-1].lineno}" if users else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that led to `error`, the oldest first, then `error`."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and not any(one is known for known in seen):
        seen.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return reversed(seen)


def _is_ours(filename: str) -> bool:
    return filename.startswith(os.path.dirname(phalanx.__file__) + os.sep)


def _starts_processes(filename: str) -> bool:
    folder, name = os.path.split(filename)
    return os.path.basename(folder) == "multiprocessing" or name == "dataloader.py"


def _is_library(filename: str, folders: tuple[str, ...]) -> bool:
    parts = filename.split(os.sep)  # a virtual environment may use packages of another one
    return filename.startswith(folders) or "site-packages" in parts or "dist-packages" in parts


def _library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library, of installed packages and of Phalanx."""
    import site
    import sysconfig

    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(phalanx.__file__)}
    torch = sys.modules.get("torch")  # it may be in another folder
    if torch is not None and torch.__file__ is not None:
        folders.add(os.path.dirname(torch.__file__))
    return ("<frozen ", *(os.path.abspath(folder) + os.sep for folder in folders))


def _identify(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
