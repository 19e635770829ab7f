"""How much memory does training take on four ranks? PyTorch's DDP and ZeRO, and ours."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
from contestants import CONTESTANTS, WIDTHS  # noqa: E402 - the line above says where they are
from fleet import KINDS, MOMENTS, measure  # noqa: E402

PEER = "pytorch"
SHARDED_PEER = "pytorch-zero"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", nargs="+", choices=WIDTHS, default=list(WIDTHS), help="of parameters")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="buckets are rebuilt after the first backward")
    parser.add_argument("--rounds", type=int, default=1, help="whole jobs of each; the figure is the median")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()

    machine = harness.describe_machine()
    names = [name for name in CONTESTANTS if name in {PEER, SHARDED_PEER, *arguments.contestants}]
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for millions in arguments.millions:
        with tempfile.TemporaryDirectory() as folder:
            jobs = [
                {name: _job(name, millions, arguments, Path(folder) / str(job)) for name in names}
                for job in range(arguments.rounds)
            ]
            by_kind = {
                name: {
                    moment: {kind: median(job[name][moment][kind] for job in jobs) for kind in KINDS}
                    for moment in MOMENTS
                }
                for name in names
            }
        results[millions] = by_kind
        found = {name: {moment: sum(by_kind[name][moment].values()) for moment in MOMENTS} for name in names}
        highest = {name: max(found[name].values()) for name in names}
        rows = [
            [
                name,
                *(f"{found[name][moment]:,.0f} MB" for moment in MOMENTS),
                harness.format_ratio(highest[name] / highest[PEER]),
                harness.format_ratio(highest[name] / highest[SHARDED_PEER]),
            ]
            for name in names
        ]
        header = ["", *MOMENTS, f"highest, of {PEER}", f"of {SHARDED_PEER}"]
        harness.print_table(header, rows, title=f"{millions} million parameters, {arguments.ranks} ranks")
        rows = [[name, *(f"{by_kind[name]['after step'][kind]:,.0f} MB" for kind in KINDS)] for name in names]
        harness.print_table(["", *KINDS], rows, title="where it is, after step")
    harness.write_results(arguments.output, {"ranks": arguments.ranks, "megabytes": results}, machine=machine)


def _job(name: str, millions: str, arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    folder.mkdir(exist_ok=True)
    return measure(name, WIDTHS[millions], arguments.ranks, arguments.steps, folder)


if __name__ == "__main__":
    main()
