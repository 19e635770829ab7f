"""How soon do the other ranks know that one has died, or called something else? Random faults at random points."""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402 - the line above says where it is
from plan import DEATHS, FAULTS, MISMATCHES, Trial, plan_trial  # noqa: E402
from rank import Clock, Report, work  # noqa: E402

HANGING_S = 20.0  # whoever says nothing for so long hangs
TARGETS_S = {"a rank ends": 1.0, "a rank calls something else": 0.1}


@dataclass(frozen=True)
class Outcome:
    """How a trial went: seconds until the last witness knew, or what was wrong with what it was told."""

    trial: Trial
    seconds: float
    relayed: int  # witnesses that were told by another's end: they waited for somebody who had raised before them
    wrong: str = ""


def run(trial: Trial) -> Outcome:
    """Fork the ranks, collect their reports, judge them. Nothing is left running."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    clock = Clock(memoryview(memory))
    pids, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(trial.world_size):
                pipe, pid = _fork(trial, rank, f"{folder}/store", clock)
                pids.append(pid)
                pipes.append(pipe)
            reports = _collect(trial, pipes)
        finally:
            for pid, pipe in zip(pids, pipes, strict=True):
                os.kill(pid, signal.SIGKILL)  # still a process of ours, if only a zombie: we have not waited for it
                os.waitpid(pid, 0)
                os.close(pipe)
    return judge(trial, reports, clock.fault_at(trial))


def _fork(trial: Trial, rank: int, store: str, clock: Clock) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.write(writer, pickle.dumps(work(trial, rank, store, clock)))
        except BaseException as error:
            os.write(writer, pickle.dumps(Report(rank, type(error).__name__, (), 0.0, "outside of a step", str(error))))
        finally:
            os._exit(0)
    os.close(writer)
    return reader, pid


def _collect(trial: Trial, pipes: list[int]) -> dict[int, Report]:
    """What the witnesses say until all have spoken, or nobody has for long."""
    reports: dict[int, Report] = {}
    waiting = {pipes[rank]: rank for rank in trial.witnesses}
    deadline = time.monotonic() + HANGING_S
    while waiting and time.monotonic() < deadline:
        readable, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        for pipe in readable:
            rank = waiting.pop(pipe)
            data = os.read(pipe, 1 << 16)
            if data:
                reports[rank] = pickle.loads(data)
    return reports


def judge(trial: Trial, reports: dict[int, Report], fault_at: float) -> Outcome:
    """Whether every witness was told the right thing, and when the last one was."""
    wanted = "MismatchError" if trial.is_mismatch else "PeerLostError"
    relayed = 0
    for rank in trial.witnesses:
        report = reports.get(rank)
        if report is None:
            return Outcome(trial, HANGING_S, relayed, f"rank {rank} was told nothing within {HANGING_S:.0f} s")
        if report.error != wanted:
            return Outcome(trial, 0.0, relayed, f"rank {rank}: {report.error} in {report.step}: {report.message}")
        if wanted == "MismatchError" or report.ranks == (trial.victim,):
            continue
        named = [reports[r] for r in report.ranks if r in reports]
        if not named or any(other.raised_at > report.raised_at for other in named):
            return Outcome(trial, 0.0, relayed, f"rank {rank} blames {report.ranks} in {report.step}: {report.message}")
        relayed += 1
    return Outcome(trial, max(r.raised_at for r in reports.values()) - fault_at, relayed)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share * 100) // 100) - 1)]


def row(name: str, outcomes: list[Outcome]) -> list[str]:
    """A line of the table."""
    told = [o.seconds for o in outcomes if not o.wrong]
    times = [harness.format_time(percentile(told, share)) for share in (0.5, 0.95, 1.0)] if told else ["-"] * 3
    return [name, str(len(outcomes)), str(len(outcomes) - len(told)), *times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=243)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this trial alone and print it")
    parser.add_argument("--rounds", type=int, default=1, help="go through that many times the trials, each drawn anew")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(run(plan_trial(arguments.only, arguments.seed)))
        return

    machine = harness.describe_machine()
    gc.freeze()  # what is here before the ranks are forked need not be looked through by each of them
    outcomes = []
    for number in range(arguments.trials * arguments.rounds):
        outcome = run(plan_trial(number, arguments.seed))
        outcomes.append(outcome)
        if outcome.wrong:
            trial = outcome.trial
            print(f"trial {number} ({trial.fault}, {trial.world_size} ranks): {outcome.wrong}", file=sys.stderr)
    kinds = {"a rank ends": DEATHS, "a rank calls something else": MISMATCHES}
    rows = [row(fault, [o for o in outcomes if o.trial.fault == fault]) for fault in FAULTS]
    for kind, faults in kinds.items():
        rows.append(row(kind, [o for o in outcomes if o.trial.fault in faults]))
    header = ["fault", "trials", "missed", "median", "95%", "worst"]
    harness.print_table(header, rows, title=f"until the last rank that must know was told, {len(outcomes)} trials")
    relayed = sum(o.relayed for o in outcomes)
    print(f"\nTold of another survivor's end, in a group to which the lost rank does not belong: {relayed} ranks.")
    for kind, faults in kinds.items():
        mine = [o for o in outcomes if o.trial.fault in faults]
        worst = max((o.seconds for o in mine if not o.wrong), default=0.0)
        reached = not any(o.wrong for o in mine) and worst <= TARGETS_S[kind]
        target = harness.format_time(TARGETS_S[kind])
        print(f"Target when {kind}, {target} and none missed: {'reached' if reached else 'missed'}.")
    results = {
        "seed": arguments.seed,
        "targets_s": TARGETS_S,
        "trials": [
            {key: value for key, value in asdict(o.trial).items() if key != "steps"}
            | {"step": asdict(o.trial.steps[o.trial.at]), "seconds": o.seconds, "relayed": o.relayed, "wrong": o.wrong}
            for o in outcomes
        ],
    }
    harness.write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
