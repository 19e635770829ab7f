"""How long until a job that has lost a rank completes a step again? `phalanx run`, torchrun and torchft, in turns."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is

SCRIPT = str(HERE / "train.py")
PHALANX = [sys.executable, "-m", "phalanx.cli", "run", "--nproc-per-node", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PATIENCE_S = 60.0  # for a job to begin
HANGING_S = 20.0  # for it to go on
MORE = 10  # restarts that the peers get for each kill: what is started again may fail by itself
STEADY_STEPS = 30  # before a kill

ELASTIC = "phalanx run, elastic"
RESTART = "phalanx run, restart of all"
TORCH = "torchrun, restart of all"
TORCHFT = "torchft"
TARGETS = {(ELASTIC, TORCH): 1 / 10, (ELASTIC, TORCHFT): 1 / 10, (RESTART, TORCH): 1 / 5}
TARGET_S, TARGET_COMMIT_S, TARGET_STEP, TARGET_HAND_OVER = 0.5, 20e-6, 1.02, 0.5


@dataclass(frozen=True)
class Stamp:
    """A step that a rank has completed, with so many ranks."""

    rank: int
    pid: int
    step: int
    num_ranks: int
    at: float


@dataclass(frozen=True)
class Recovery:
    """From the kill to the next step that all ranks have completed; `lost`: steps that were done and are done again."""

    seconds: float
    lost: int


class Job:
    """The commands of one contestant while they run, and the steps of its ranks."""

    def __init__(self, folder: Path, started: Sequence[subprocess.Popen[bytes]]) -> None:
        self._path = folder / "steps"
        self._started = started

    def stamps(self) -> list[Stamp]:
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines()
        words = [line.split() for line in lines]
        return [Stamp(int(r), int(p), int(s), int(n), float(at)) for r, p, s, n, at in words]

    def wait(self, condition: Callable[[list[Stamp]], Any], patience_s: float) -> Any:
        """Until the condition gives something for the steps so far; looks rarely, the times are in the stamps.

        Raises:
            TimeoutError: it gives nothing for so long.
            RuntimeError: a command has ended.
        """
        deadline = time.monotonic() + patience_s
        while not (found := condition(self.stamps())):
            if any(p.poll() is not None for p in self._started):
                raise RuntimeError(f"a command has ended: {[p.poll() for p in self._started]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step of all ranks within {patience_s:.0f} s")
            time.sleep(0.1)
        return found

    def kill_one(self, *, replaces_all: bool) -> Recovery:
        """SIGKILL rank 1 in the middle of its training."""
        begun = len(self.stamps())
        self.wait(lambda stamps: self._are_steady(stamps[begun:]), PATIENCE_S)
        before = self.stamps()
        victims = {stamp.rank: stamp.pid for stamp in before}
        killed_at = time.monotonic()
        os.kill(victims[1], signal.SIGKILL)
        gone = set(victims.values()) if replaces_all else {victims[1]}

        def find(stamps: list[Stamp]) -> list[Stamp]:
            """The first step of the one that is new, and the same step of the other."""
            after = [s for s in stamps if s.at > killed_at and s.pid not in gone and s.num_ranks == 2]
            steps = [{s.step: s for s in reversed(after) if s.rank == rank} for rank in range(2)]
            common = sorted(steps[0].keys() & steps[1].keys())
            return [steps[rank][common[0]] for rank in range(2)] if common else []

        first = self.wait(find, HANGING_S)
        done = max(s.step for s in self.stamps() if s.at <= killed_at)
        return Recovery(max(s.at for s in first) - killed_at, max(0, done + 1 - first[0].step))

    @staticmethod
    def _are_steady(stamps: list[Stamp]) -> bool:
        return all(sum(s.rank == rank and s.num_ranks == 2 for s in stamps) >= STEADY_STEPS for rank in range(2))


@contextlib.contextmanager
def running(commands: Sequence[tuple[list[str], dict[str, str]]], folder: Path) -> Iterator[Job]:
    """The commands, each in a session of its own, which is killed at the end."""
    started = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun's default
    with open(folder / "said", "wb") as said:
        try:
            for command, more in commands:
                started.append(
                    subprocess.Popen(
                        command, env={**environment, **more}, stdout=said, stderr=said, start_new_session=True
                    )
                )
            yield Job(folder, started)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{(folder / 'said').read_text()[-3000:]}") from None
        finally:
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            _kill_left({stamp.pid for stamp in Job(folder, []).stamps()}, folder)


def _kill_left(pids: set[int], folder: Path) -> None:
    """A rank whose launcher was killed may live on."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def elastic(folder: Path, kills: int) -> Iterator[Job]:
    with running([([*PHALANX, SCRIPT, "elastic", str(folder)], {})], folder) as job:
        yield job


@contextlib.contextmanager
def restart(folder: Path, kills: int) -> Iterator[Job]:
    with running([([*PHALANX, "--max-restarts", str(kills), SCRIPT, "phalanx", str(folder)], {})], folder) as job:
        yield job


@contextlib.contextmanager
def torchrun(folder: Path, kills: int) -> Iterator[Job]:
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(MORE * kills), SCRIPT, "gloo", str(folder)]
    with running([([*TORCHRUN, *words], {})], folder) as job:
        yield job


@contextlib.contextmanager
def torchft(folder: Path, kills: int, *, python: str) -> Iterator[Job]:
    """A lighthouse, and a torchrun for each of the two replica groups of one process, as its documentation has it."""
    port = free_port()
    here = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "NUM_REPLICA_GROUPS": "2"}
    # Phalanx, which the venv of torchft may see next to torch, is not to be loaded there.
    here |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    options = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    commands = [([str(Path(python).with_name("torchft_lighthouse")), *options, "--bind", f"127.0.0.1:{port}"], here)]
    for group in range(2):
        words = ["--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", str(MORE * kills)]
        words += ["--master-port", str(free_port()), SCRIPT, "torchft", str(folder)]
        told = {**here, "REPLICA_GROUP_ID": str(group)}
        commands.append(([python, "-m", "torch.distributed.run", *words], told))
    with running(commands, folder) as job:
        yield job


def measure_costs() -> dict[str, Any]:
    """The costs of being elastic while nothing happens, and the speed of the hand-over."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for part in ("hand-over", "small", "larger"):
            path = Path(folder, f"{part}.json")
            words = [*PHALANX, str(HERE / "costs.py"), part, str(path)]
            subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
            found[part] = json.loads(path.read_text())
        return found


def say_target(what: str, value: str, reached: bool) -> None:
    print(f"{what}: {value}; {'reached' if reached else 'missed'}.")


def print_costs(costs: dict[str, Any]) -> None:
    rows = []
    for name in ("small", "larger"):
        one = costs[name]
        step, plain, commit = median(one["elastic"]), median(one["plain"]), one["commit"][0]
        ratio = median(a / b for a, b in zip(one["elastic"], one["plain"], strict=True))
        rows.append(
            [
                f"{name} step",
                harness.format_time(plain),
                harness.format_time(step),
                harness.format_ratio(ratio),
                harness.format_time(commit),
            ]
        )
    harness.print_table(["", "without", "with State", "ratio", "commit"], rows, title="undisturbed")
    told = costs["hand-over"]
    rows = []
    for kind in ("new", "used"):
        copied, handed = median(told[f"memcpy, {kind}"]), median(told[f"hand-over, {kind}"])
        speeds = [f"{speed / 1e9:.2f} GB/s" for speed in (copied, handed)]
        rows.append([f"into {kind} memory", *speeds, harness.format_ratio(handed / copied)])
    title = f"{told['nbytes'] >> 20} MiB of state to a replacement on the same host"
    harness.print_table(["", "memcpy", "hand-over", "ratio"], rows, title=title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2, help="in each job")
    parser.add_argument("--torchft", metavar="PYTHON", help="the interpreter of a venv with torchft (see the README)")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()

    machine = harness.describe_machine()
    contestants: dict[str, Callable[..., Any]] = {ELASTIC: elastic, RESTART: restart, TORCH: torchrun}
    if arguments.torchft:
        python = arguments.torchft
        contestants[TORCHFT] = lambda folder, kills: torchft(folder, kills, python=python)
    else:
        print("torchft: absent; --torchft names the interpreter of a venv that has it.", file=sys.stderr)
    samples: dict[str, list[Recovery]] = {name: [] for name in contestants}
    failures: dict[str, list[str]] = {name: [] for name in contestants}
    for order in harness.plan_rounds(list(contestants), arguments.rounds):
        for name in order:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    with contestants[name](Path(folder), arguments.kills) as job:
                        for _ in range(arguments.kills):
                            samples[name].append(job.kill_one(replaces_all=name in (RESTART, TORCH)))
                except (TimeoutError, RuntimeError) as error:  # a peer's failure is counted
                    if name in (ELASTIC, RESTART):
                        raise
                    failures[name].append(str(error))
                    print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    costs = measure_costs()

    medians = {name: median(r.seconds for r in found) for name, found in samples.items() if found}
    peer = medians.get(TORCH)
    rows = []
    for name in medians:
        one = harness.summarise(r.seconds for r in samples[name])
        ratio = harness.format_ratio(one.median / peer) if peer else "-"
        span = f"{harness.format_time(one.low)} to {harness.format_time(one.high)}"
        lost = str(max(r.lost for r in samples[name]))
        rows.append([name, harness.format_time(one.median), span, ratio, lost, str(len(failures[name]))])
    title = f"from SIGKILL of one of two ranks to the next step of both, {arguments.rounds} x {arguments.kills} kills"
    harness.print_table(
        ["", "next step of all", "range", "of torchrun", "most steps lost", "failures"], rows, title=title
    )
    print_costs(costs)
    print()
    for (mine, theirs), target in TARGETS.items():
        if theirs in medians:
            ratio = medians[mine] / medians[theirs]
            what = f"Target for {mine}, at most {harness.format_ratio(target)} of {theirs}"
            say_target(what, harness.format_ratio(ratio), ratio <= target)
    say_target(
        f"Target for {ELASTIC}, at most {harness.format_time(TARGET_S)}",
        harness.format_time(medians[ELASTIC]),
        medians[ELASTIC] <= TARGET_S,
    )
    commit, step = costs["small"]["commit"][0], costs["larger"]
    ratio = median(a / b for a, b in zip(step["elastic"], step["plain"], strict=True))
    say_target(
        f"Target for a commit, {harness.format_time(TARGET_COMMIT_S)}",
        harness.format_time(commit),
        commit <= TARGET_COMMIT_S,
    )
    say_target(
        f"Target for a step, {harness.format_ratio(TARGET_STEP)} of one without",
        harness.format_ratio(ratio),
        ratio <= TARGET_STEP,
    )
    told = costs["hand-over"]
    share = median(told["hand-over, new"]) / median(told["memcpy, new"])
    say_target(
        f"Target for the hand-over, {harness.format_ratio(TARGET_HAND_OVER)} of memcpy",
        harness.format_ratio(share),
        share >= TARGET_HAND_OVER,
    )
    results = {
        "seconds": {name: [r.seconds for r in found] for name, found in samples.items()},
        "steps_lost": {name: [r.lost for r in found] for name, found in samples.items()},
        "failures": {name: [text.splitlines()[0] for text in texts] for name, texts in failures.items()},
        "costs": costs,
    }
    harness.write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
