"""Implement `phalanx.launch` in the caller: start the agent, show the ranks' output, return their results."""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from phalanx._base.processes import name_signal
from phalanx._job.agent.folder import JobFolder
from phalanx._job.agent.job_result import JobResult
from phalanx._job.agent.settings import Settings
from phalanx._job.agent.target import JobTarget
from phalanx._job.launch.calls import outcome, payload
from phalanx._job.launch.calls.rank import PAYLOAD, RESULT, SETTINGS, SURROUNDINGS, outcome_path
from phalanx._job.launch.command_line import read_settings
from phalanx._job.launch.options import OPTIONS
from phalanx.errors import LaunchError

_READ_BYTES = 1 << 16
_POLL_S = 0.5
_TERM_S = 0.5
_MAX_TERMS = 40  # in total longer than the agent waits for processes stuck in the kernel


class RankTraceback(Exception):
    """A `RankTraceback` is the cause of a rank's exception, with the rank's traceback as text."""

    def __str__(self) -> str:
        return "\n" + "\n".join(str(arg) for arg in self.args)


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc_per_node: int | str = "auto",
    **options: object,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in every rank of a new job, and return the results by rank.

    For notebooks, scripts and tests. Ranks run as under `phalanx run`: `phalanx.init()`, or
    `init_process_group("phalanx")`, finds the other ranks. Functions, closures and classes of `__main__` and of a
    notebook are sent by value; those of modules by name. This process is not forked: it may have threads and CUDA. The
    ranks' output is shown live, with the rank before each line.

    Cost: one start of Python and one import of torch for each call (not for each rank), and a copy of the arguments and
    of the results for each rank, through a temporary folder (TMPDIR).

    Arguments:
        nproc_per_node: a number, "cpu", "gpu" or "auto", as on the command line (default: GPUs, else cores).
        options: any other option of `phalanx run`, with underscores: `max_restarts=2`, `log_dir="logs"`,
            `shutdown_timeout=30`, `no_affinity=True`.

    Raises:
        Exception: the exception of the rank that failed first, with its traceback as the cause; all ranks have ended.
        LaunchError: a rank died, or exited before the function returned; its result or exception cannot be pickled; or
            the job could not be started.
        TypeError: `fn` or an argument cannot be sent to another process; the message names it.
        ValueError: an option is unknown to `phalanx run`, or its value is invalid.
        KeyboardInterrupt: Ctrl-C, or the notebook's stop button: every rank has exited.
    """
    if not callable(fn):
        raise TypeError(f"phalanx.launch: needs a function, got a {type(fn).__name__}")
    settings = _read_options({"nproc_per_node": nproc_per_node, **options})
    try:
        data = payload.encode(fn, args, kwargs or {})
    except TypeError as error:
        raise TypeError(f"phalanx.launch: {error}") from error
    with _opened_folder() as folder:
        settings = replace(settings, target=JobTarget("module", _MODULE, (folder,)))
        Path(folder, SETTINGS).write_bytes(pickle.dumps(settings))
        Path(folder, PAYLOAD).write_bytes(data)
        Path(folder, SURROUNDINGS).write_bytes(payload.encode_surroundings())
        code = _run_agent(folder)
        name = f"phalanx.launch of {getattr(fn, '__qualname__', fn)!s}"
        return _collect(name, folder, JobResult.read(os.path.join(folder, RESULT)), code)


@contextlib.contextmanager
def _opened_folder() -> Iterator[str]:
    """Create a folder for a call; remove it afterwards. If this process is killed, this user's next job removes it.

    Raises:
        LaunchError: the folder cannot be created.
    """
    folder = JobFolder(os.environ)
    if not folder.path:
        raise LaunchError(
            "phalanx.launch: cannot create a folder in TMPDIR, /tmp or /var/tmp. Set TMPDIR to a folder of yours."
        )
    try:
        yield folder.path
    finally:
        folder.close()


_MODULE = "phalanx._job.launch.calls"  # the program of the ranks
_VALUES = {option.name: option.value for option in OPTIONS if option.value}  # the options that take a value
_OF_A_SCRIPT = ("module", "no_python", "run_path", "use_env", "help")
_OF_SEVERAL_HOSTS = (
    "nnodes",
    "hosts",
    "hostfile",
    "node_rank",
    "master_addr",
    "master_port",
    "rdzv_endpoint",
    "key_file",
    "witness",
)


def _read_variables(value: object, refused: list[str]) -> list[str]:
    """Return the words for `env`: a dict, a NAME=VALUE or a list of these; append a problem to `refused`."""
    if isinstance(value, Mapping):
        value = [name if text is None else f"{name}={text}" for name, text in value.items()]
    elif isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        refused.append(f"env=: must be a dict of variables, NAME=VALUE, or a list of those, got {value!r}")
        return []
    return [f"--env={one}" for one in value]


def _read_options(options: Mapping[str, object]) -> Settings:
    """Return the settings of a job on this host with these options of `phalanx run`.

    Raises:
        ValueError: lists all problems, with the names of Python arguments.
    """
    refused = [
        f"{name}=: only for scripts; phalanx.launch calls a function" for name in options if name in _OF_A_SCRIPT
    ]
    refused += [
        f"{name}=: phalanx.launch starts ranks only on this host. Call the function in a script, and start the script "
        "on each host with `phalanx run --nnodes`"
        for name in options
        if name in _OF_SEVERAL_HOSTS
    ]
    words = ["--standalone"]
    for name, value in options.items():
        if name in (*_OF_A_SCRIPT, *_OF_SEVERAL_HOSTS):
            continue
        flag = "--" + name.replace("_", "-")
        if name == "env" and value is not None:
            words += _read_variables(value, refused)
        elif value is True and (value_name := _VALUES.get(flag[2:])):
            refused.append(f"{name}=: must be a value ({value_name}), got True")
        elif value is True:
            words.append(flag)
        elif value is not False and value is not None:
            words.append(f"{flag}={value}")
    problems: list[str] = []
    settings = read_settings([*words, "-m", _MODULE], {}, problems)
    for problem in problems:
        flag, colon, rest = problem.partition(":")
        name = flag.removeprefix("--").replace("-", "_")
        refused.append(f"{name}={colon}{rest}" if name in options else problem)
    if refused:
        raise ValueError("\n".join(f"phalanx.launch: {problem}" for problem in refused))
    assert settings is not None
    return settings


# In the module path, the working directory would let the user's `random.py` shadow the agent's imports. Until signals
# are handled, Ctrl-C kills the agent without a traceback of ours.
_BOOT = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); '' in sys.path and sys.path.remove(''); "
    "from phalanx._job.launch.calls.agent import main; sys.exit(main())"
)


def _run_agent(folder: str) -> int:
    """Run the agent of the call in `folder` and show its output; return its exit code, or minus the signal."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(_shown_on(sys.stdout, sys.__stdout__, 1))
        err = stack.enter_context(_shown_on(sys.stderr, sys.__stderr__, 2))
        agent = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOT, str(os.getpid()), folder],
            stdin=subprocess.DEVNULL,
            stdout=out.agent_end,
            stderr=err.agent_end,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process, which relays it
        )
        try:
            return _wait(agent, [pipe for pipe in (out, err) if pipe.own_end is not None])
        finally:
            _end(agent)


def _wait(agent: subprocess.Popen[bytes], pipes: Sequence[_Pipe]) -> int:
    interrupted = False
    for pipe in pipes:
        pipe.close_agent_end()
    while True:
        try:
            _show(agent, pipes)
            code = agent.wait()
            break
        except KeyboardInterrupt:
            interrupted = True
            agent.send_signal(signal.SIGINT)  # after the second SIGINT the agent kills the ranks
    if interrupted:
        raise KeyboardInterrupt
    return code


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Stop the agent, and with it the whole job: after the second SIGTERM the agent kills the ranks."""
    for _ in range(_MAX_TERMS):
        if agent.poll() is not None:
            return
        agent.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(_TERM_S)
    agent.kill()
    agent.wait()


@dataclass
class _Pipe:
    """A `_Pipe` carries the agent's output to `stream`. If `own_end` is None, the agent writes to the stream itself."""

    stream: TextIO | None
    agent_end: int
    own_end: int | None = None

    def close_agent_end(self) -> None:
        """Close this process's copy of the agent's end."""
        if self.own_end is not None and self.agent_end != -1:
            os.close(self.agent_end)
            self.agent_end = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_agent_end()
        if self.own_end is not None:
            os.close(self.own_end)
            self.own_end = None


@contextlib.contextmanager
def _shown_on(stream: TextIO | None, original: TextIO | None, fd: int) -> Iterator[_Pipe]:
    """Yield the `_Pipe` for the agent's output to `stream`.

    The agent writes to `fd` itself, unless a notebook or an output capture has replaced `original` or `fd`.
    """
    if stream is None:
        yield _Pipe(None, subprocess.DEVNULL)
        return
    if stream is original and _is(stream, fd):
        stream.flush()  # earlier output comes first
        yield _Pipe(stream, fd)
        return
    own_end, agent_end = os.pipe()
    pipe = _Pipe(stream, agent_end, own_end)
    try:
        yield pipe
    finally:
        pipe.close()


def _is(stream: TextIO, fd: int) -> bool:
    try:
        return stream.fileno() == fd
    except (OSError, ValueError):
        return False


def _show(agent: subprocess.Popen[bytes], pipes: Sequence[_Pipe]) -> None:
    """Copy the agent's output to the streams until the pipes end."""
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            if pipe.own_end is not None:
                decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                selector.register(pipe.own_end, selectors.EVENT_READ, (pipe, decoder))
        while selector.get_map():
            ready = selector.select(_POLL_S)
            for key, _ in ready:
                pipe, decoder = key.data
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    selector.unregister(key.fd)
                if text := decoder.decode(data, final=not data):
                    pipe.stream.write(text)
                    pipe.stream.flush()
            if not ready and agent.poll() is not None:  # another process still has the agent's end open
                return


def _collect(call: str, folder: str, result: JobResult | None, code: int) -> list[Any]:
    """Return the ranks' results, or raise the first failure; `code` is the agent's exit code."""
    if result is None or not result.world_size:
        how = result.text if result else f"its agent exited before the job began: {_describe_exit(code)}"
        raise LaunchError(how.replace("phalanx run:", f"{call}:") if result else f"{call}: {how}", exit_code=code)
    if result.failed_rank >= 0 or code:
        raise _failure(call, folder, result, code)
    results = []
    for rank in range(result.world_size):
        ended = outcome.read(outcome_path(folder, rank), rank)
        if ended is None:
            raise LaunchError(
                f"{call}: rank {rank} of {result.world_size} exited with code 0 before its function returned "
                "(sys.exit, os._exit)."
            )
        if ended.failed:
            raise LaunchError(f"{call}: rank {rank} of {result.world_size} {ended.text.rstrip()}")
        results.append(ended.result)
    return results


def _failure(call: str, folder: str, result: JobResult, code: int) -> BaseException:
    rank = result.failed_rank
    ended = outcome.read(outcome_path(folder, rank), rank) if rank >= 0 else None
    text = result.text or f"the job ended before the function had returned in every rank: {_describe_exit(code)}"
    if ended is not None and isinstance(ended.error, Exception):
        error = ended.error
        error.__cause__ = RankTraceback(f"{call}: {text}")
        return error
    return LaunchError(f"{call}: {text}", exit_code=code)


def _describe_exit(code: int) -> str:
    return name_signal(-code) if code < 0 else f"exit code {code}"
