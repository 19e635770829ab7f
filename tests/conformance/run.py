"""All of PyTorch's suite that Gloo passes, over Phalanx: `python -m tests.conformance.run [TEST ...]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tests.conformance.torch_suite import Result, TorchSuite

HERE = Path(__file__).parent
WORLD_SIZES = (2, 3, 4)

# By world size, the tests that Gloo passes on a machine without a GPU.
GLOO_PASSES = HERE / "gloo_passes.json"
# Tests that Gloo passes and Phalanx does not, and why that is right.
DIFFERENCES = HERE / "differences.json"


def gloo_passes(world_size: int) -> list[str]:
    """What Phalanx is held to."""
    passes: list[str] = json.loads(GLOO_PASSES.read_text())[str(world_size)]
    return passes


def differences() -> dict[str, str]:
    """The reason for each test that Phalanx need not pass."""
    reasons: dict[str, str] = json.loads(DIFFERENCES.read_text())
    return reasons


def run(suite: TorchSuite, tests: list[str]) -> list[Result]:
    """Run the tests one after another, and say how each went."""
    results = []
    for test in tests:
        result = suite.run(test)
        print(f"{result.outcome:8}{suite.world_size} ranks  {test}", flush=True)
        results.append(result)
    return results


def record(world_sizes: list[int]) -> None:
    """Run everything over Gloo and write down what passes."""
    passes = json.loads(GLOO_PASSES.read_text()) if GLOO_PASSES.exists() else {}
    for world_size in world_sizes:
        suite = TorchSuite("gloo", world_size)
        passes[str(world_size)] = [r.test for r in run(suite, suite.tests()) if r.outcome == "passed"]
    GLOO_PASSES.write_text(json.dumps(dict(sorted(passes.items())), indent=1) + "\n")


def compare(world_sizes: list[int], only: list[str]) -> int:
    """Run over Phalanx what Gloo passes; the number of surprises, each told."""
    passed, surprises, differ = 0, 0, set()
    for world_size in world_sizes:
        tests = [test for test in gloo_passes(world_size) if not only or test in only]
        for result in run(TorchSuite("phalanx", world_size), tests):
            if result.outcome == "passed":
                passed += 1
            elif result.test in differences():
                differ.add(result.test)
            else:
                surprises += 1
                print(f"\n{result.test} on {world_size} ranks: {result.outcome}\n{result.text}\n")
    if not only and set(world_sizes) == set(WORLD_SIZES):
        for test in sorted(set(differences()) - differ):
            surprises += 1
            print(f"{test}: listed in {DIFFERENCES.name}, and passes everywhere: take it off the list")
    print(f"\n{passed} passed, {len(differ)} known differences, {surprises} surprises.")
    return surprises


def main() -> int:
    """Zero if Phalanx passes what Gloo passes, the known differences aside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", help="only these")
    parser.add_argument("--world-size", type=int, nargs="+", default=list(WORLD_SIZES))
    parser.add_argument("--record", action="store_true", help="run over Gloo, and write down what it passes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # what is forked from here must start without a pool
    if arguments.record:
        record(arguments.world_size)
        return 0
    return min(compare(arguments.world_size, arguments.tests), 1)


if __name__ == "__main__":
    sys.exit(main())
