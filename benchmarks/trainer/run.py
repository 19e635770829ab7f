"""How long is a step of phalanx.Trainer, against the bare loop, Lightning Fabric and Accelerate?"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import (  # noqa: E402 - the line above says where it is
    add_output_arguments,
    describe_machine,
    format_ratio,
    format_time,
    plan_rounds,
    print_table,
    summarise,
    write_results,
)

BARE = "bare loop"
TARGET = {"Trainer": 1.02}
WIDTH, SMALL = 768, 16
Pairs = dict[str, list[tuple[float, float]]]


class Team:
    """The ranks of one contestant, each a process of its own, which sleep between their turns."""

    def __init__(self, name: str, python: str, world_size: int, steps: int) -> None:
        port = free_port()
        self._ranks = []
        for rank in range(world_size):
            read, write = os.pipe()
            process = subprocess.Popen(
                [python, str(HERE / "contestant.py"), name, str(steps)],
                env=environment_of(rank, world_size, port, write),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[write],
                text=True,
            )
            os.close(write)
            self._ranks.append((process, os.fdopen(read)))
        self._steps = steps
        self.losses = self._read()

    def measure(self) -> float:
        """Seconds of a step, of the slowest rank."""
        for process, _ in self._ranks:
            assert process.stdin is not None
            print(file=process.stdin, flush=True)
        return max(self._read()) / self._steps

    def _read(self) -> list[float]:
        lines = [results.readline() for _, results in self._ranks]
        if not all(lines):
            raise RuntimeError("a rank has ended")
        return [float(line) for line in lines]

    def close(self) -> None:
        """The end of its standard input ends a rank."""
        for process, results in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            results.close()


def environment_of(rank: int, world_size: int, port: int, results: int) -> dict[str, str]:
    """As a launcher sets it."""
    return {
        **os.environ,
        **{"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"},
        **{"LOCAL_WORLD_SIZE": f"{world_size}", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "benchmark"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"},
        **{"PHALANX_RESULTS": f"{results}", "ACCELERATE_USE_CPU": "true"},
    }


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure_in_turns(loops: list[str], world_size: int, steps: int, rounds: int, seed: int, width: int) -> Pairs:
    """Seconds (wall, processor) of a step of each loop in each round, of the slowest rank; of fresh processes."""
    port, processes = free_port(), []
    for rank in range(world_size):
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, str(HERE / "paired.py"), ",".join(loops), *map(str, (steps, rounds, seed))],
            env={**environment_of(rank, world_size, port, write), "PHALANX_WIDTH": f"{width}"},
            stdout=subprocess.DEVNULL,
            pass_fds=[write],
        )
        os.close(write)
        processes.append((process, os.fdopen(read)))
    texts = [results.read() for _, results in processes]
    for process, results in processes:
        results.close()
        if process.wait():
            raise SystemExit(f"a rank has ended with {process.returncode}")
    told = [json.loads(text) for text in texts]
    return {
        name: [(max(ours[i][0] for ours in ranks), max(ours[i][1] for ours in ranks)) for i in range(rounds)]
        for name in told[0]
        for ranks in [[one[name] for one in told]]
    }


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Within which the median lies in 95 % of all cases, by the ranks of the values alone."""
    ordered, reach = sorted(values), 0.98 * len(values) ** 0.5
    middle = (len(values) - 1) / 2
    return ordered[max(0, round(middle - reach))], ordered[min(len(values) - 1, round(middle + reach))]


def compare_in_turns(loops: list[str], world_size: int, arguments: argparse.Namespace) -> Pairs:
    """Print how the loops compare on `world_size` ranks, and return what was measured."""
    every: Pairs = {}
    for seed in range(arguments.processes):
        found = measure_in_turns(loops, world_size, arguments.steps, arguments.rounds, seed, WIDTH)
        for name, pairs in found.items():
            every.setdefault(name, []).extend(pairs)
    rows = []
    for name, pairs in every.items():
        of_bare = [[mine[i] / bare[i] for mine, bare in zip(pairs, every[BARE], strict=True)] for i in (0, 1)]
        low, high = interval_of_median(of_bare[0])
        wall, processor = map(statistics.median, of_bare)
        within = "" if name not in TARGET else "yes" if wall <= TARGET[name] else "no"
        step = format_time(statistics.median(wall for wall, _ in pairs))
        rows.append([name, step, f"{wall:.3f}", f"{low:.3f} to {high:.3f}", f"{processor:.3f}", within])
    title = f"{world_size} rank" + "s" * (world_size > 1) + ", in turns in one process"
    print_table(["", "step", "of the bare loop", "95 %", "processor time", "within 2 %"], rows, title=title)
    return every


def compare_apart(pythons: dict[str, str], world_size: int, arguments: argparse.Namespace) -> Pairs:
    """The same of loops that need a process group each, in processes of their own that take turns."""
    teams: dict[str, Team] = {}
    for name, python in pythons.items():
        try:
            teams[name] = Team(name, python, world_size, arguments.steps)
        except RuntimeError as error:
            print(f"{name} on {world_size} ranks is left out: {error}")
    losses = {name: team.losses for name, team in teams.items()}
    if max(abs(one[0] - losses[BARE][0]) for one in losses.values()) > 1e-3:
        raise SystemExit(f"the contestants don't train alike: {losses}")
    samples: dict[str, list[float]] = {name: [] for name in teams}
    for order in plan_rounds(list(teams), arguments.rounds):
        for name in order:
            samples[name].append(teams[name].measure())
    for team in teams.values():
        team.close()
    rows = []
    for name, mine in samples.items():
        ratio = statistics.median(one / bare for one, bare in zip(mine, samples[BARE], strict=True))
        rows.append([name, format_time(summarise(mine).median), format_ratio(ratio)])
    print_table(["", "step", "of the bare loop"], rows, title=f"{world_size} ranks, each loop in processes of its own")
    return {name: [(one, 0.0) for one in mine] for name, mine in samples.items()}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15, help="in each process")
    parser.add_argument("--processes", type=int, default=3, help="fresh ones, one after another")
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--fabric", help="a python that has lightning-fabric, for several ranks; default this one")
    parser.add_argument("--accelerate", help="a python that has accelerate, for several ranks; default this one")
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    machine = describe_machine()
    others = {"Fabric": "lightning_fabric", "Accelerate": "accelerate"}
    here = [name for name, module in others.items() if importlib.util.find_spec(module)]
    given = {"Fabric": arguments.fabric, "Accelerate": arguments.accelerate}
    for name in others.keys() - here:
        print(f"{name} is not installed here: it is left out{', on one rank' * bool(given[name])}")
    seconds: dict[str, Pairs] = {}
    for world_size in arguments.ranks:
        alone = world_size == 1
        loops = [BARE, BARE + " again", *(here if alone else [])]
        seconds[f"{world_size} in turns"] = compare_in_turns(loops, world_size, arguments)
        if not alone and (
            apart := {name: python or sys.executable for name, python in given.items() if python or name in here}
        ):
            pythons = {BARE: sys.executable, **apart}
            seconds[f"{world_size} apart"] = compare_apart(pythons, world_size, arguments)
    small = measure_in_turns([BARE, BARE + " again", *here], 1, 200, arguments.rounds, 0, SMALL)
    rows = []
    for name, pairs in small.items():
        more = statistics.median(mine[1] - bare[1] for mine, bare in zip(pairs, small[BARE], strict=True))
        rows.append(
            [name, format_time(statistics.median(processor for _, processor in pairs)), f"{more * 1e6:+.0f} us"]
        )
    print_table(["", "processor time", "more than the bare loop"], rows, title=f"a step of a model of width {SMALL}")
    seconds["small"] = small
    write_results(arguments.output, {"seconds_per_step": seconds}, machine=machine)


if __name__ == "__main__":
    main()
