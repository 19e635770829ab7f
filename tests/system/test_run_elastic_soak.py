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
import signal
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.system.elastic_soak_job import BATCH, RANKS, SAMPLES, STEPS_OF_EPOCH
from tests.system.phalanx_command import Finished, Running, start

SCRIPT = str(Path(__file__).with_name("elastic_soak_job.py"))
ROOT = str(Path(__file__).parents[2])
WINDOW = 10  # steps in which it strikes at least once
SPARED_WINDOWS = 50
MANY = 20  # strikes from which on all kinds are run, and a rank that is stopped is killed sooner
MOST_DELAY_S = 0.4  # a recovery takes about as long

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
        return "the zygote" in self.title or "phalanx.launch.zygote" in self.title or "phalanx.cli" in self.title


def find_processes() -> list[Process]:
    """All that there are."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            title = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state not in "ZX":
            found.append(Process(int(entry), int(parent), title))
    return found


@dataclass
class Striker:
    """Strikes at random, until there were enough strikes; lets the job go from one window of steps to the next."""

    running: Running
    board: memoryview
    strikes: int
    draw: random.Random
    evict_after_s: float
    folder: Path
    done: Counter[str] = field(default_factory=Counter)
    spared: int = 0
    agent: list[tuple[int, int]] = field(default_factory=list)  # descriptors and resident bytes, window by window

    def run(self, num_steps: int) -> None:
        """Return when the job may go on to its end."""
        self._wait_step(1)
        window = 0
        while sum(self.done.values()) < self.strikes:
            start = window * WINDOW
            assert start + WINDOW < num_steps, "the job is too short for so many strikes"
            self.board[0] = start + WINDOW
            self._wait_step(start + self.draw.randint(1, WINDOW))
            ranks = self._find_holders()
            if self.spared not in ranks or window // SPARED_WINDOWS % 2:
                self.spared = self.draw.choice(sorted(ranks))
            for _ in range(self.draw.choice((1, 1, 1, 2, 2, 3))):
                time.sleep(MOST_DELAY_S * self.draw.random() ** 3)  # the moment is at random: that is the test
                self._strike()
            self._wait_step(start + WINDOW)
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
            ranks = {pid for pid in self._ranks() if (self.folder / f"held-{pid}").exists()}
            if ranks:  # else a zygote is dying: its ranks are below it still, and it has no title any more
                return ranks
            self._wait_step(1)

    def _ranks(self) -> set[int]:
        agent = self.running.process.pid
        found = find_processes()
        parents = {agent} | {p.pid for p in found if p.parent == agent and p.is_zygote}
        return {p.pid for p in found if p.parent in parents and not (p.is_zygote and p.parent == agent)}

    def _strike(self) -> None:
        kind = self.draw.choices(("SIGKILL", "SIGSTOP", "pause", "zygote", "child"), (12, 3, 2, 1, 1))[0]
        agent = self.running.process.pid
        found = find_processes()
        if kind == "zygote":
            victims = [p.pid for p in found if p.parent == agent and p.is_zygote]
        elif kind == "child":
            victims = [p.pid for p in found if p.parent in self._ranks() - {self.spared}]
        else:
            victims = sorted(self._ranks() - {self.spared})
        if not victims:
            return
        victim = self.draw.choice(sorted(victims))
        try:
            if kind == "pause":
                os.kill(victim, signal.SIGSTOP)
                time.sleep(0.5 * self.evict_after_s * self.draw.random())
                os.kill(victim, signal.SIGCONT)
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


def soak(folder: Path, options: dict[str, object], epochs: int, strikes: int, seed: int) -> tuple[Finished, Striker]:
    """Run the job to its end; `strikes` may be 0."""
    folder.mkdir()
    with tempfile.TemporaryDirectory() as short:  # pytest's folders are too long for the path of a worker's socket
        return _soak(folder, Path(short), options, epochs, strikes, seed)


def _soak(
    folder: Path, tmpdir: Path, options: dict[str, object], epochs: int, strikes: int, seed: int
) -> tuple[Finished, Striker]:
    env = {"PYTHONPATH": ROOT, "TMPDIR": str(tmpdir), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    evict_after_s = 0.5 if strikes >= MANY else 2.0
    words = ["run", "--nproc-per-node", str(RANKS), "--evict-after", str(evict_after_s)]
    script = [SCRIPT, str(folder), str(epochs), json.dumps(options)]
    with board_of(folder, WINDOW if strikes else 1 << 40) as board, start(*words, *script, env=env) as running:
        said: list[str] = []
        assert running.process.stderr is not None
        reading = threading.Thread(target=lambda: said.extend(running.process.stderr), daemon=True)  # type: ignore[arg-type]
        reading.start()
        striker = Striker(running, board, strikes, random.Random(seed), evict_after_s, folder)
        try:
            striker.run(epochs * STEPS_OF_EPOCH)
            running.process.wait()
        except BaseException:
            print(f"seed {seed}, {striker.done}, steps {board.tolist()}")
            print("".join(said[-100:]))
            raise
        finally:
            if running.process.poll() is None:
                running.process.kill()
            reading.join()
            (folder / "said").write_text("".join(said))
        out = running.process.stdout.read() if running.process.stdout else ""
        finished = Finished(running.process.returncode, out, "".join(said))
        assert finished.code == 0, f"seed {seed}: {striker.done}\n{finished.err[-8000:]}\n{finished.out[-8000:]}"
        assert running.survivors() == []
    assert list(tmpdir.iterdir()) == []
    return finished, striker


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
        assert held[-1][1] <= fds + 2, f"descriptors of {path}: {held}"
        assert held[-1][2] <= threads + 1, f"threads of {path}: {held}"
        assert held[-1][3] <= resident + (16 << 20) + generations * (64 << 10), f"memory of {path}: {held}"


@pytest.fixture
def strikes(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("strikes"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("strikes_seed"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        is_long = metafunc.config.getoption("strikes") >= MANY
        metafunc.parametrize("kind", list(KINDS) if is_long else list(KINDS)[:2])


def test_kills_and_stops_at_random_moments_cost_no_bit_and_no_sample(
    kind: str, strikes: int, seed: int, tmp_path: Path
) -> None:
    epochs = strikes * WINDOW // STEPS_OF_EPOCH + 2
    soak(tmp_path / "undisturbed", KINDS[kind], epochs, 0, seed)
    _, striker = soak(tmp_path / "struck", KINDS[kind], epochs, strikes, seed)
    for rank in range(RANKS):
        expected, result = [
            json.loads((tmp_path / run / f"result-{rank}").read_text()) for run in ("undisturbed", "struck")
        ]
        different = [key for key in expected["weights"] if expected["weights"][key] != result["weights"][key]]
        assert not different, f"rank {rank}, seed {seed}: {striker.done}"
        assert expected == result, "random states differ"
    for used in samples_of_epochs(tmp_path / "struck", epochs):
        assert sorted(used) == list(range(SAMPLES))
    assert SAMPLES == STEPS_OF_EPOCH * BATCH * RANKS
    check_growth(tmp_path / "struck", striker)
