"""PyTorch's suite for rpc over phalanx.rpc, all that TensorPipe passes: `python -m tests.conformance.rpc_run`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch
from tests.conformance.rpc_suite import RpcSuite
from tests.conformance.torch_suite import Result

HERE = Path(__file__).parent
# What TensorPipe passes on a machine without a GPU, and of that what phalanx.rpc does not, and why that is right.
TENSORPIPE_PASSES = HERE / "tensorpipe_passes.json"
DIFFERENCES = HERE / "rpc_differences.json"


def tensorpipe_passes() -> list[str]:
    """What phalanx.rpc is held to."""
    passes: list[str] = json.loads(TENSORPIPE_PASSES.read_text())
    return passes


def differences() -> dict[str, str]:
    """The reason for each test that phalanx.rpc need not pass."""
    reasons: dict[str, str] = json.loads(DIFFERENCES.read_text())
    return reasons


def run(suite: RpcSuite, tests: list[str]) -> list[Result]:
    """Run the tests one after another, and say how each went."""
    results = []
    for test in tests:
        result = suite.run(test)
        print(f"{result.outcome:8}{test}{_last_line(result)}", flush=True)
        results.append(result)
    return results


def _last_line(result: Result) -> str:
    """Why it failed, in a line."""
    lines = [line for line in result.text.splitlines() if re.match(r"\w[\w.]*(Error|Exception|Failed)\b", line)]
    lines = [line for line in lines if "PeerLost" not in line] or lines
    return f": {lines[0][:150]}" if lines and result.outcome == "failed" else ""


def record() -> None:
    """Run everything over TensorPipe and write down what passes."""
    suite = RpcSuite("torch")
    passes = [result.test for result in run(suite, suite.tests()) if result.outcome == "passed"]
    TENSORPIPE_PASSES.write_text(json.dumps(passes, indent=1) + "\n")


def compare(only: list[str], verbose: bool) -> int:
    """Run over phalanx.rpc what TensorPipe passes; the number of surprises, each told."""
    tests = only or tensorpipe_passes()
    reasons = differences()
    results = run(RpcSuite("phalanx"), tests)
    surprises = 0
    for result in results:
        if (result.outcome == "passed") == (result.test in reasons) or verbose:
            surprises += result.outcome != "passed" or result.test in reasons
            print(f"\n{result.test}: {result.outcome} {'(listed as a difference)' * (result.test in reasons)}")
            print(result.text)
    passed = sum(result.outcome == "passed" for result in results)
    print(f"\n{passed} passed, {len(results) - passed} not, {surprises} surprises.")
    return surprises


def main() -> int:
    """Zero if phalanx.rpc passes what TensorPipe passes, the known differences aside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", help="only these")
    parser.add_argument("--record", action="store_true", help="run over TensorPipe, and write down what it passes")
    parser.add_argument("--verbose", action="store_true", help="say of each why it failed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # what is forked from here must start without a pool
    if arguments.record:
        record()
        return 0
    return min(compare(arguments.tests, arguments.verbose), 1)


if __name__ == "__main__":
    sys.exit(main())
