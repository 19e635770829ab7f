"""How long does a collective take between processes of one host, against Gloo and the best peer?

python benchmarks/collectives/run.py                    # everything that is installed; about a quarter of an hour
python benchmarks/collectives/run.py --quick            # two minutes, noisier
python benchmarks/collectives/run.py --peers gloo,phalanx --ops all_reduce --sizes 4,16K,1M --world-size 2
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
from cases import COPY, OPS, SIZES, UPDATE, Case  # noqa: E402
from contestants.contract import NotOfferedError  # noqa: E402
from fleet import Fleet, FleetError  # noqa: E402
from measurements import Measurements  # noqa: E402
from peers import MEMORY, PEERS, PHALANX, Peer  # noqa: E402

from report import print_report  # noqa: E402

# Seconds per measurement of one case by one contestant in one round.
BUDGET_S = 0.1
QUICK_BUDGET_S = 0.02
QUICK_ROUNDS = 3
# Copied and updated whatever sizes are asked for: far beyond the caches, so its speed is the memory's.
BANDWIDTH_BYTES = 64 << 20


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; 1 when a contestant failed (an absent one is no failure)."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _leave_in_order)
    machine = harness.describe_machine()
    measurements = Measurements(rounds=options.rounds)
    peers = []
    for peer in options.peers:
        reason = _why_absent(peer)
        if reason:
            measurements.absent[peer.name] = reason
        else:
            peers.append(peer)
    for world_size in options.world_size:
        _measure(peers, world_size, options, measurements)
    print_report(measurements)
    print(f"\nWritten: {harness.write_results(options.output, measurements.as_json(), machine=machine)}")
    return 1 if measurements.failed else 0


def _leave_in_order(number: int, _frame: object) -> None:
    """Leave by an exception, so that the fleets are closed, and only once: `timeout` sends its signal twice."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _measure(peers: list[Peer], world_size: int, options: argparse.Namespace, measurements: Measurements) -> None:
    """Run all the rounds of one world size; what goes wrong with a contestant ends it, not the others."""
    sizes = options.sizes
    cases = [Case(op, num_bytes, world_size) for op in options.ops for num_bytes in sizes]
    floors = list(dict.fromkeys(case.floor for case in cases))
    floors += [case for op in (COPY, UPDATE) if (case := Case(op, BANDWIDTH_BYTES, world_size)) not in floors]
    with ExitStack() as stack:
        fleets: list[Fleet] = []
        for peer in [*peers, MEMORY]:
            _say(f"{world_size} ranks: starting {peer.name}")
            try:
                fleets.append(stack.enter_context(Fleet(peer, world_size, max(*sizes, BANDWIDTH_BYTES))))
            except FleetError as error:
                measurements.fail(peer.name, world_size, error)
        runnable: dict[str, list[Case]] = {}
        for fleet in list(fleets):
            _say(f"{world_size} ranks: checking {fleet.peer.name}")
            wanted = floors if fleet.peer is MEMORY else cases
            try:
                runnable[fleet.peer.name] = [case for case in wanted if _is_offered(fleet, case, measurements)]
            except FleetError as error:
                _end(fleet, fleets, world_size, error, measurements)
        for turn, order in enumerate(harness.plan_rounds(fleets, options.rounds)):
            for case in [*cases, *floors]:
                _say(f"{world_size} ranks: round {turn + 1} of {options.rounds}, {case.op} {case.num_bytes} B")
                for fleet in order:
                    if fleet not in fleets or case not in runnable[fleet.peer.name]:
                        continue
                    try:
                        measurements.add(fleet.peer.name, case, fleet.measure(case, options.budget))
                    except FleetError as error:
                        _end(fleet, fleets, world_size, error, measurements)
    _say("")


def _is_offered(fleet: Fleet, case: Case, measurements: Measurements) -> bool:
    try:
        fleet.check(case)
    except NotOfferedError as reason:
        measurements.not_offered.setdefault(fleet.peer.name, {})[case.op] = str(reason)
        return False
    return True


def _end(fleet: Fleet, fleets: list[Fleet], world_size: int, error: FleetError, measurements: Measurements) -> None:
    measurements.fail(fleet.peer.name, world_size, error)
    fleets.remove(fleet)
    fleet.close()


def _why_absent(peer: Peer) -> str:
    if peer.name.startswith(PHALANX) and find_spec(PHALANX) is None:
        return "not installed in this environment: run `pip install -e .`"
    return peer.why_absent()


def _say(message: str) -> None:
    """Keep one line of progress on a terminal; a file gets none of it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="collectives between processes of one host, side by side")
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--sizes", type=_sizes, default=list(SIZES), metavar="4,16K,1M", help="bytes, K and M allowed")
    parser.add_argument("--ops", type=_ops, default=list(OPS), metavar="OP,OP", help=", ".join(OPS))
    parser.add_argument("--peers", type=_peers, default=list(PEERS), metavar="NAME,NAME", help=", ".join(_names()))
    parser.add_argument("--rounds", type=int, help=f"default 5, or {QUICK_ROUNDS} with --quick")
    parser.add_argument("--quick", action="store_true", help="shorter measurements, fewer rounds")
    harness.add_output_arguments(parser, HERE)
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else 5)
    options.budget = QUICK_BUDGET_S if options.quick else BUDGET_S
    if min(options.world_size) < 2 or options.rounds < 1:
        parser.error("a collective needs at least 2 ranks, a median at least 1 round")
    return options


def _sizes(text: str) -> list[int]:
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = []
    for word in text.upper().split(","):
        number, unit = (word[:-1], units[word[-1]]) if word[-1:] in units else (word, 1)
        if not number.isdigit() or int(number) * unit < 4 or int(number) * unit % 4:
            raise argparse.ArgumentTypeError(f"{word!r} is not a size in whole float32 elements, such as 4, 16K or 64M")
        sizes.append(int(number) * unit)
    return sizes


def _ops(text: str) -> list[str]:
    return _chosen(text, OPS, "operation")


def _peers(text: str) -> list[Peer]:
    by_name = {peer.name: peer for peer in PEERS}
    return [by_name[name] for name in _chosen(text, by_name, "peer")]


def _names() -> list[str]:
    return [peer.name for peer in PEERS]


def _chosen(text: str, known: Iterable[str], what: str) -> list[str]:
    words = text.split(",")
    unknown = [word for word in words if word not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {what} named {', '.join(unknown)}; there are {', '.join(known)}")
    return words


if __name__ == "__main__":
    sys.exit(main())
