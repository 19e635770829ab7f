"""How many tokens a second does a GPT of 30 million parameters learn from, by whatever people wrap it in?

Each contestant is a command that is started anew in each round: `phalanx run` or torchrun, with the same script.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
from harness.jobs import run_lines, type_lines  # noqa: E402

from phalanx.testing import Host, hosts, why_no_hosts  # noqa: E402

PEER = "PyTorch's DDP, Gloo"
# By name: what it is started with, and the package that it needs.
CONTESTANTS = {
    PEER: ("torchrun", "torch"),
    "Accelerate, Gloo": ("torchrun", "accelerate"),
    "Lightning Fabric, Gloo": ("torchrun", "lightning_fabric"),
    "DeepSpeed, Gloo": ("torchrun", "deepspeed"),
    "DeepSpeed ZeRO 2, Gloo": ("torchrun", "deepspeed"),
    "PyTorch's DDP, phalanx": ("phalanx run", "phalanx"),
    "our DDP, phalanx": ("phalanx run", "phalanx"),
    "our DDP and ZeRO": ("phalanx run", "phalanx"),
    "our DDP, bfloat16 between hosts": ("phalanx run", "phalanx"),
}
BETWEEN_HOSTS = "our DDP, bfloat16 between hosts"  # does the same as the one before on one host
UNCOUNTED = 2  # steps: buckets are laid out anew after the first


@dataclass(frozen=True)
class Training:
    """A training is what one run of a contestant has told."""

    tokens_per_s: float
    losses: list[float]
    peak_mb: float


def train(name: str, steps: int, ranks: int, machines: Sequence[Host]) -> Training:
    """Start the job, wait until it is done, and read what rank 0 has printed."""
    launcher, _ = CONTESTANTS[name]
    ended = run_lines(type_lines(launcher, ranks, [str(HERE / "train.py"), name, str(steps)], machines))
    found = re.search(r"result (\{.*\})", ended.output)
    # An agent of torchrun may end with an error when all has been done: the first host's, with the store, has ended.
    if found is None or (any(ended.codes) and launcher != "torchrun"):
        raise RuntimeError(f"{name} ended with {ended.codes}:\n{ended.output[-3000:]}")
    result = json.loads(found[1])
    step_s = statistics.median(result["seconds"][UNCOUNTED:])
    return Training(result["tokens_per_step"] / step_s, result["losses"], result["peak_mb"])


def rows_of(trainings: dict[str, list[Training]]) -> list[list[str]]:
    """Return a row for each contestant; ratios are those of the same round."""
    peer = trainings[PEER]
    rows = []
    for name, mine in trainings.items():
        speed = harness.summarise(one.tokens_per_s for one in mine)
        ratio = harness.summarise(a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, peer, strict=True))
        rows.append(
            [
                f"{name} ({CONTESTANTS[name][0]})",
                f"{speed.median:.0f}",
                harness.format_ratio(ratio.median),
                f"{harness.format_ratio(ratio.low)} to {harness.format_ratio(ratio.high)}",
                f"{mine[-1].losses[-1]:.4f}",
                f"{max(one.peak_mb for one in mine):.0f} MB",
            ]
        )
    return rows


def measure(names: list[str], rounds: int, run: Callable[[str], Training]) -> dict[str, list[Training]]:
    """Run all contestants in turns; leave out one that fails from then on, and print how it ended."""
    trainings: dict[str, list[Training]] = {name: [] for name in names}
    for order in harness.plan_rounds(names, rounds):
        for name in order:
            if name not in trainings:
                continue
            try:
                trainings[name].append(run(name))
            except RuntimeError as error:
                if name == PEER:
                    raise
                print(error, file=sys.stderr, flush=True)
                del trainings[name]
    return trainings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1, help="network namespaces, each with --ranks of its own")
    parser.add_argument("--ranks", type=int, help="default: 2; with --hosts 1 on each")
    parser.add_argument("--rate", default="1gbit", help="what each host may send, as tc says it")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, help="beside PyTorch's DDP; default: all")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if arguments.hosts > 1 and (reason := why_no_hosts()):
        raise SystemExit(f"benchmarks/gpt: {reason}")
    if arguments.steps <= UNCOUNTED:
        raise SystemExit(f"benchmarks/gpt: the first {UNCOUNTED} steps are not counted, so --steps must be more.")

    machine = harness.describe_machine()
    ranks = arguments.ranks or (2 if arguments.hosts == 1 else 1)
    names = [PEER]
    for name, (_, package) in CONTESTANTS.items():
        wanted = (
            name in arguments.contestants if arguments.contestants else name != BETWEEN_HOSTS or arguments.hosts > 1
        )
        if not wanted or name == PEER:
            continue
        if importlib.util.find_spec(package) is None:
            print(f"{name} is absent: there is no package {package} here.", flush=True)
        else:
            names.append(name)
    with contextlib.ExitStack() as stack:
        machines: Sequence[Host] = ()
        if arguments.hosts > 1:
            machines = stack.enter_context(hosts(arguments.hosts, rate=arguments.rate, one_clock=True))
        trainings = measure(names, arguments.rounds, lambda name: train(name, arguments.steps, ranks, machines))
    place = f"{arguments.hosts} hosts x {ranks} ranks, {arguments.rate}" if machines else f"{ranks} ranks on one host"
    header = ["contestant", "tokens a second", "of the peer's", "range", f"loss after {arguments.steps} steps", "peak"]
    harness.print_table(header, rows_of(trainings), title=f"{place}, median of {arguments.rounds} rounds")
    raw = {
        name: [{"tokens_per_s": one.tokens_per_s, "losses": one.losses, "peak_mb": one.peak_mb} for one in mine]
        for name, mine in trainings.items()
    }
    harness.write_results(arguments.output, {"place": place, "trainings": raw}, machine=machine)


if __name__ == "__main__":
    main()
