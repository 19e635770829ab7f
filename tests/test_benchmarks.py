"""A benchmark that somebody runs for himself changes no file of the repository.

Every run wrote into the tracked `results/`, some over the very file that the README quotes.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = sorted(path.parent.name for path in ROOT.glob("benchmarks/*/run.py"))


@pytest.fixture
def add_output_arguments(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness import add_output_arguments

    yield add_output_arguments
    for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_results_go_where_git_does_not_look_unless_they_are_to_be_recorded(name, add_output_arguments):
    folder = ROOT / "benchmarks" / name
    parser = argparse.ArgumentParser()
    add_output_arguments(parser, folder)
    unasked = parser.parse_args([]).output
    assert unasked.parent == folder / ".results"
    assert parser.parse_args(["--record", "2-ranks"]).output == folder / "results" / "2-ranks.json"
    assert parser.parse_args(["--output", "x.json"]).output == Path("x.json")
    source = (folder / "run.py").read_text()
    assert source.count("add_output_arguments(") == 1
    assert "/results" not in source
    assert '"results"' not in source
    if (ROOT / ".git").exists():
        subprocess.run(["git", "check-ignore", "-q", str(unasked)], cwd=ROOT, check=True)
