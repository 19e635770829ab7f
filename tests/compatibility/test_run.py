"""The command that runs the matrix reads pytest's output, and reads the page that it has written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.compatibility import run
from tests.compatibility.run import Row

ROOT = Path(__file__).parents[2]
OUTPUT = """\
........F...s                                                     [100%]
=========================== short test summary info ============================
FAILED tests/a/test_b.py::test_c[x - y] - AssertionError: 1 passed, 2 failed
FAILED tests/a/test_b.py::test_d
ERROR tests/a/test_e.py::test_f - OSError: full
2 failed, 5047 passed, 52 skipped, 1 error in 591.03s (0:09:51)
make: *** [Makefile:60: test] Error 1
"""


def test_the_closing_line_of_pytest_gives_the_counts():
    assert run.counts(OUTPUT) == {"passed": 5047, "failed": 2, "skipped": 52, "error": 1}
    assert run.counts("make: *** no rule\n") == {"passed": 0, "failed": 0, "skipped": 0, "error": 0}


def test_failed_tests_are_named():
    names = ("tests/a/test_b.py::test_c[x - y]", "tests/a/test_b.py::test_d", "tests/a/test_e.py::test_f")
    assert run.failures(OUTPUT) == names


def test_a_page_that_was_written_is_read_again_and_keeps_the_rows_of_other_pairs():
    old = Row(
        "3.9.1", "2.13.0", "Debian", "root", "7 of 7", "10", "1", "0", "9", "abc", "2026-01-01", ("tests/x.py::t[a b]",)
    )
    other = Row("3.13.0", "2.15.0", "Debian", "user", "7 of 7", "11", "0", "0", "9", "abc", "2026-01-01")
    newer = Row("3.10.2", "2.13.0", "Debian", "root", "7 of 7", "11", "0", "0", "9", "abd", "2026-01-02")
    page = run.render(run.merge([old], other))
    assert run.read(page) == [old, other]
    assert [row.failures for row in run.read(page)] == [old.failures, ()]
    assert run.read(run.render(run.merge(run.read(page), newer))) == [old, newer, other]


def test_a_pair_whose_python_is_not_there_is_named_and_ends_with_an_error():
    command = [sys.executable, "-m", "tests.compatibility.run", "no-such-python=2.13.0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "there is no no-such-python here" in ended.stderr


@pytest.mark.parametrize("pair", run.PAIRS)
def test_each_pair_that_the_command_tries_by_default_names_a_release(pair):
    assert re.fullmatch(r"[\w./]+=\d+\.\d+\.\d+", pair)


def _versions(column):
    return {row.pair[column] for row in run.read(run.PAGE.read_text())}


def test_the_page_has_a_row_for_each_python_that_the_package_supports():
    low, high = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    minors = {int(version.split(".")[1]) for version in _versions(0)}
    assert minors == set(range(int(low), int(high)))


def test_the_oldest_pytorch_of_the_page_is_the_floor_of_the_package():
    floor = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    oldest = min(_versions(1), key=lambda version: [int(part) for part in version.split(".")])
    assert oldest == floor or oldest.startswith(floor + ".")
