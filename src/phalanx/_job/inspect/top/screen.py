"""Redraw the terminal when a new view arrives, the terminal is resized, or a key is pressed.

                    ┌── SIGWINCH, SIGTERM, SIGINT, SIGTSTP (a byte each)
select ── wait for ─┼── keys
                    └── views, from the sampling thread: keys work even if the job does not answer
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live

from phalanx._base.descriptors import wait_readable
from phalanx._base.ipc.signals import caught_signals, read_signals
from phalanx._base.ipc.wakeup import Mailbox
from phalanx._job.inspect.top.table import page
from phalanx._job.inspect.top.view import JobView
from phalanx._job.inspect.top.watch import JobWatch
from phalanx.errors import LaunchError

_SHARE = 1 / 50  # sampling takes at most this share of a core: with many ranks, samples are less frequent
_SIGNALS = (signal.SIGWINCH, signal.SIGTERM, signal.SIGINT, signal.SIGTSTP)
_KEYS = {"\x1b[A": -1, "\x1b[B": 1, "k": -1, "j": 1, "\x1b[5~": -10, "\x1b[6~": 10, "\x1b[H": -(10**9), "g": -(10**9)}


class JobSampler:
    """A `JobSampler` samples the job in a thread. When `fileno` is readable, `take` returns views, or error texts."""

    def __init__(self, watch: JobWatch, interval_s: float) -> None:
        self._watch = watch
        self._interval_s = interval_s
        self._found: Mailbox[JobView | str | None] = Mailbox()
        self._end = threading.Event()
        # daemon: at exit the thread may still wait for an agent that does not answer
        self._thread = threading.Thread(target=self._run, name="phalanx-top", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has something to return."""
        return self._found.fileno()

    def take(self) -> list[JobView | str | None]:
        """Return all new items: views, texts on why there is no view now, and None when the job has ended."""
        return self._found.receive_all()

    def close(self) -> None:
        self._end.set()

    def _run(self) -> None:
        while not self._end.is_set():
            used_s = time.thread_time()
            try:
                self._found.put(self._watch.sample())
            except LaunchError as error:
                if self._watch.has_ended():
                    self._found.put(None)
                    return
                self._found.put(str(error))
            self._end.wait(max(self._interval_s, (time.thread_time() - used_s) / _SHARE))


class _Screen:
    """`_Screen` draws the latest view, in the order and from the row that the user has chosen."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.job: JobView | None = None
        self.problem = ""
        self.offset = 0
        self.slowest_first = False
        self.live = self._new_live()

    def _new_live(self) -> Live:
        return Live(console=self.console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def draw(self) -> None:
        """Draw everything, at the terminal's current size."""
        if self.job is None:
            self.live.update(self.problem or "looking for the ranks ...", refresh=True)
            return
        width, height = self.console.size
        lines, self.offset = page(self.job, width, height, offset=self.offset, slowest_first=self.slowest_first)
        if self.problem:
            lines[0].plain = self.problem[:width]
        self.live.update(Group(*lines), refresh=True)

    def press(self, keys: str) -> bool:
        """Execute the commands of `keys`, which arrived together; return False to quit, as at the end of the input."""
        for key in re.findall(r"\x1b\[[0-9;]*[A-Za-z~]|.", keys, re.DOTALL):
            if key in ("q", "Q", "\x03"):
                return False
            if key == "s":
                self.slowest_first, self.offset = not self.slowest_first, 0
            self.offset = max(0, self.offset + _KEYS.get(key, 0))
        return keys != ""


def show(watch: JobWatch, interval_s: float) -> JobView | None:
    """Show the job until it ends or the user quits; return the last view if the job has ended.

    Raises:
        SystemExit: SIGTERM has arrived.
    """
    screen = _Screen(Console(file=sys.stdout, highlight=False))
    looker = JobSampler(watch, interval_s)
    stdin = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    try:
        with caught_signals(_SIGNALS) as signals, _keys(stdin):
            screen.live.start()
            try:
                return _loop(screen, looker, signals, stdin)
            finally:
                screen.live.stop()
    finally:
        looker.close()


def _loop(screen: _Screen, looker: JobSampler, signals: int, stdin: int | None) -> JobView | None:
    screen.draw()
    waited_for = [looker.fileno(), signals, *([stdin] if stdin is not None else [])]
    while True:
        ready = wait_readable(waited_for)
        for number in read_signals(signals):
            if number == signal.SIGTERM:
                sys.exit(128 + signal.SIGTERM)
            if number == signal.SIGINT:
                return None
            if number == signal.SIGTSTP:
                _suspend(screen, stdin)
        for found in looker.take():
            if found is None:
                return screen.job
            screen.problem = found if isinstance(found, str) else ""
            screen.job = found if isinstance(found, JobView) else screen.job
        if stdin in ready and not screen.press(os.read(stdin, 64).decode(errors="replace")):
            return None
        screen.draw()


@contextlib.contextmanager
def _keys(stdin: int | None) -> Iterator[None]:
    """Make the terminal deliver keys one by one, without echo, while the context is open."""
    if stdin is None:
        yield
        return
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal has been closed
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _suspend(screen: _Screen, stdin: int | None) -> None:
    """Suspend on Ctrl-Z: restore the terminal, stop, and set the terminal up again after `fg`."""
    screen.live.stop()
    mode = termios.tcgetattr(stdin) if stdin is not None else None
    if stdin is not None and mode is not None:
        usual = list(mode)
        usual[3] |= termios.ECHO | termios.ICANON
        termios.tcsetattr(stdin, termios.TCSADRAIN, usual)
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)  # this process stops here until `fg`
    signal.signal(signal.SIGTSTP, handler)
    if stdin is not None and mode is not None:
        termios.tcsetattr(stdin, termios.TCSADRAIN, mode)
    screen.live = screen._new_live()
    screen.live.start()
