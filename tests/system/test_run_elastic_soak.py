"""Ranks are killed and stopped at random moments of a training run, which ends as if nothing had happened.

By hand, for longer:  pytest tests/system/test_run_elastic_soak.py --strikes 1000 --strikes-seed 1 --timeout 0

A rank must hold the state: in each window of steps one process is spared, everybody else may be struck, also while the
others recover. For fifty windows that is the same process, so that what a generation leaves behind in it adds up.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import signal
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.elastic.small_agent import SmallAgent
from tests.system.elastic_soak_job import BATCH, RANKS, SAMPLES, STEPS_OF_EPOCH, train_job
from tests.system.phalanx_command import Running, start

SCRIPT = str(Path(__file__).with_name("elastic_soak_job.py"))
ROOT = str(Path(__file__).parents[2])
WINDOW = 10  # steps in which it strikes at least once
SPARED_WINDOWS = 50
MANY = 100  # strikes from which on all kinds are run, and ranks that are stopped are left to `phalanx run`
MOST_DELAY_S = 0.4  # a recovery takes about as long
TIMEOUT_S = 600  # on a busy machine

# All have dropout and batch norm. The first two are those of CI.
KINDS: dict[str, dict[str, object]] = {
    "workers that read ahead": {"workers": 2, "persistent": True},
    "an optimizer in shards": {"optimizer": "zero"},
    "adam": {},
    "PyTorch's wrapper": {"wrapper": "torch", "optimizer": "momentum"},
}


@dataclass(frozen=True)
class Process:
    """A process of the job, as /proc shows it."""

    pid: int
    parent: int
    title: str

    @property
    def is_zygote(self) -> bool:
        return self.is_spare or any(
            name in self.title for name in ("the zygote", "phalanx.agent.zygote", "phalanx.cli")
        )

    @property
    def is_spare(self) -> bool:
        """Of the zygote, whose place it takes when that is killed: it is a child of the agent from then on."""
        return "the spare zygote" in self.title


def find_processes(agent: int) -> list[Process]:
    """All below a process: its zygotes, the ranks, what those have started."""
    parents: dict[int, int] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(entry)] = int(parent)
    below, level = [], {agent}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        for pid in sorted(level):
            with suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                below.append(Process(pid, parents[pid], title))
    return below


def find_ranks(found: list[Process], agent: int) -> set[int]:
    """The children of zygotes, and of the agent, which has adopted some."""
    parents = {agent} | {p.pid for p in found if p.parent == agent and p.is_zygote}
    return {p.pid for p in found if p.parent in parents and not (p.is_spare or (p.is_zygote and p.parent == agent))}


@dataclass(frozen=True)
class Pace:
    """How it strikes.

    In CI a stopped rank is killed by us, or goes on: an eviction costs seconds, and on a busy machine one that is slow
    could be taken for one that is stopped, the spared one, too. Another zygote costs an import of torch.
    """

    window: int
    in_window: tuple[int, ...]  # strikes, of which one number is drawn
    most_delay_s: float
    most_zygotes: int
    evict_after_s: float | None

    @classmethod
    def of(cls, strikes: int) -> Pace:
        if strikes >= MANY:
            return cls(WINDOW, (1, 1, 1, 2, 2, 3), MOST_DELAY_S, strikes, 0.5)
        return cls(4, (2, 3, 3, 4), MOST_DELAY_S / 2, 1, None)


@dataclass
class Striker:
    """Strikes at random, until there were enough strikes; lets the job go from one window of steps to the next."""

    running: Running
    board: memoryview
    strikes: int
    draw: random.Random
    pace: Pace
    folder: Path
    done: Counter[str] = field(default_factory=Counter)
    spared: int = 0
    agent: list[tuple[int, int]] = field(default_factory=list)  # descriptors and resident bytes, window by window
    _has_struck_child: bool = False

    def run(self, num_steps: int) -> None:
        """Return when the job may go on to its end."""
        self._wait_step(1)
        window, length = 0, self.pace.window
        while sum(self.done.values()) < self.strikes:
            start = window * length
            assert start + length < num_steps, "the job is too short for so many strikes"
            self.board[0] = start + length
            self._wait_step(start + self.draw.randint(1, length))
            ranks = self._find_holders()
            if self.spared not in ranks or window // SPARED_WINDOWS % 2:
                self.spared = self.draw.choice(sorted(ranks))
            self._has_struck_child = False
            for _ in range(self.draw.choice(self.pace.in_window)):
                time.sleep(self.pace.most_delay_s * self.draw.random() ** 3)  # the moment is random: that is the test
                self._strike()
            self._wait_step(start + length)
            self._look_at_agent()
            window += 1
        self.board[0] = 1 << 40

    def _wait_step(self, step: int) -> None:
        while max(self.board[1:]) < step:
            if self.running.process.poll() is not None:
                raise RuntimeError(f"the job ended with {self.running.process.returncode} after {self.done}")
            time.sleep(0.001)

    def _find_holders(self) -> set[int]:
        """The ranks that train: all of them hold the state, as steps have been completed since the last strike."""
        while True:
            agent = self.running.process.pid
            ranks = {pid for pid in find_ranks(find_processes(agent), agent) if (self.folder / f"held-{pid}").exists()}
            if ranks:  # else a zygote is dying: its ranks are below it still, and it has no title any more
                return ranks
            self._wait_step(1)

    def _strike(self) -> None:
        kind = self.draw.choices(("SIGKILL", "SIGSTOP", "pause", "zygote", "child"), (12, 3, 2, 1, 1))[0]
        # A rank that loses a worker raises that: twice at one step is the user's error, and nobody is replaced.
        if (kind == "zygote" and self.done[kind] == self.pace.most_zygotes) or (
            kind == "child" and self._has_struck_child
        ):
            kind = "SIGKILL"
        agent = self.running.process.pid
        found = find_processes(agent)
        ranks = find_ranks(found, agent) - {self.spared}
        if kind == "zygote":
            victims = [p.pid for p in found if p.parent == agent and p.is_zygote]
        elif kind == "child":
            victims = [p.pid for p in found if p.parent in ranks]
            self._has_struck_child = True
        else:
            victims = sorted(ranks)
        if not victims:
            return
        victim = self.draw.choice(sorted(victims))
        evict_after_s = self.pace.evict_after_s
        try:
            if kind == "pause" or (kind == "SIGSTOP" and evict_after_s is None):
                os.kill(victim, signal.SIGSTOP)
                time.sleep(0.5 * (evict_after_s or self.pace.most_delay_s) * self.draw.random())
                os.kill(victim, signal.SIGCONT if kind == "pause" else signal.SIGKILL)
            else:
                os.kill(victim, signal.SIGSTOP if kind == "SIGSTOP" else signal.SIGKILL)
            self.done[kind] += 1
        except ProcessLookupError:
            pass

    def _look_at_agent(self) -> None:
        pid = self.running.process.pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        self.agent.append((len(os.listdir(f"/proc/{pid}/fd")), pages * mmap.PAGESIZE))


@contextmanager
def board_of(folder: Path, allowed: int) -> Iterator[memoryview]:
    """The numbers that the ranks share with us."""
    numbers = [allowed, *[0] * RANKS]
    (folder / "board").write_bytes(struct.pack(f"{len(numbers)}q", *numbers))
    with open(folder / "board", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        board = memoryview(memory).cast("q")
        try:
            yield board
        finally:
            board.release()


@dataclass
class Soaked:
    """A job that runs, and is struck."""

    running: Running
    striker: Striker
    num_steps: int
    seed: int

    def finish(self) -> None:
        """See it to its end, which is a good one."""
        said: list[str] = []
        stderr = self.running.process.stderr
        assert stderr is not None
        reading = threading.Thread(target=lambda: said.extend(stderr), daemon=True)
        reading.start()
        try:
            self.striker.run(self.num_steps)
            self.running.process.wait()
        except BaseException:
            print(f"seed {self.seed}, {self.striker.done}, steps {self.striker.board.tolist()}")
            print("".join(said[-100:]))
            raise
        finally:
            if self.running.process.poll() is None:
                self.running.process.kill()
            reading.join()
            (self.striker.folder / "said").write_text("".join(said))
        out = self.running.process.stdout.read() if self.running.process.stdout else ""
        told = f"seed {self.seed}: {self.striker.done}\n{''.join(said)[-8000:]}\n{out[-8000:]}"
        assert self.running.process.returncode == 0, told
        assert self.running.survivors() == []


def is_probe_of_loader(path: Path) -> bool:
    """Whether torch's DataLoader made this file, to see whether a worker died for want of descriptors.

    A rank that is killed at that moment leaves it, or that of four bytes by which Python's tempfile tries a folder.
    """
    return re.fullmatch(r"(tmp)?\w{8}", path.name) is not None and path.is_file() and path.stat().st_size in (0, 4)


@contextmanager
def soak(
    folder: Path, options: dict[str, object], epochs: int, strikes: int, seed: int, pace: Pace
) -> Iterator[Soaked]:
    """A running job; `strikes` may be 0."""
    folder.mkdir()
    evict = [] if pace.evict_after_s is None else ["--evict-after", str(pace.evict_after_s)]
    words = ["run", "--nproc-per-node", str(RANKS), *evict, SCRIPT, str(folder), str(epochs), json.dumps(options)]
    with tempfile.TemporaryDirectory() as short:  # pytest's folders are too long for the path of a worker's socket
        env = {"PYTHONPATH": ROOT, "TMPDIR": short, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
        with board_of(folder, pace.window) as board, start(*words, env=env) as running:
            striker = Striker(running, board, strikes, random.Random(seed), pace, folder)
            yield Soaked(running, striker, epochs * STEPS_OF_EPOCH, seed)
        assert [path.name for path in Path(short).iterdir() if not is_probe_of_loader(path)] == []


def run_undisturbed(folder: Path, options: dict[str, object], epochs: int) -> None:
    """The same job, forked from here: nobody is lost, and nothing is imported."""
    folder.mkdir()
    with board_of(folder, 1 << 40):
        SmallAgent(train_job, RANKS, folder, epochs, options, folder=folder, timeout_s=3600.0).run()


def samples_of_epochs(folder: Path, epochs: int) -> list[list[int]]:
    """What the steps used that counted: a step that was done again counts as the last time."""
    latest: dict[int, int] = {}
    lines = []
    for path in folder.glob("samples-*"):
        for line in path.read_text().splitlines():
            generation, step, epoch, samples = line.split()
            lines.append((int(generation), int(step), int(epoch), [int(i) for i in samples.split(",")]))
            latest[int(step)] = max(latest.get(int(step), 0), int(generation))
    used: list[list[int]] = [[] for _ in range(epochs)]
    for number, step, of, ids in lines:
        if number == latest[step]:
            used[of] += ids
    return used


def check_growth(folder: Path, striker: Striker) -> None:
    """What lives through many generations holds as much after them as after its first ones."""
    assert len({fds for fds, _ in striker.agent[-3:]} - {fds for fds, _ in striker.agent[:-3]}) <= 3, striker.agent
    for path in folder.glob("held-*"):
        held = [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
        if len(held) < 10:
            continue
        generations = held[-1][0] - held[3][0]
        _, fds, threads, resident = held[3]
        _, last_fds, last_threads, last_resident = map(min, zip(*held[-3:], strict=True))  # what stays is growth
        assert last_fds <= fds + 2, f"descriptors of {path}: {held}"
        assert last_threads <= threads + 1, f"threads of {path}: {held}"
        assert last_resident <= resident + (16 << 20) + generations * (64 << 10), f"memory of {path}: {held}"


@pytest.fixture
def strikes(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("strikes"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("strikes_seed"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        is_long = metafunc.config.getoption("strikes") >= MANY
        limit = pytest.mark.timeout(0 if is_long else TIMEOUT_S)
        kinds = list(KINDS) if is_long else list(KINDS)[:2]
        metafunc.parametrize("kind", [pytest.param(kind, marks=limit) for kind in kinds])


@pytest.mark.slow
def test_kills_and_stops_at_random_moments_cost_no_bit_and_no_sample(
    kind: str, strikes: int, seed: int, tmp_path: Path
) -> None:
    pace = Pace.of(strikes)
    epochs = strikes * pace.window // STEPS_OF_EPOCH + 2
    with soak(tmp_path / "struck", KINDS[kind], epochs, strikes, seed, pace) as struck:
        run_undisturbed(tmp_path / "undisturbed", KINDS[kind], epochs)
        struck.finish()
    for rank in range(RANKS):
        expected, result = [
            json.loads((tmp_path / run / f"result-{rank}").read_text()) for run in ("undisturbed", "struck")
        ]
        different = [key for key in expected["weights"] if expected["weights"][key] != result["weights"][key]]
        assert not different, f"rank {rank}, seed {seed}: {struck.striker.done}"
        assert expected == result, "random states differ"
    for used in samples_of_epochs(tmp_path / "struck", epochs):
        assert sorted(used) == list(range(SAMPLES))
    assert SAMPLES == STEPS_OF_EPOCH * BATCH * RANKS
    check_growth(tmp_path / "struck", struck.striker)
