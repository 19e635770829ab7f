"""Slow tests run where they are named or asked for, also with pytest-xdist. A run says what did not run, and why."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint  # of our own tools, and no promise of the product
CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.mark.parametrize(
    ("words", "num_run"), [((), 2), (("--slow",), 3), (("test_some.py",), 3), (("-k", "slow"), 2), (("-m", "slow"), 2)]
)
def test_slow_tests_run_where_they_are_named(words: tuple[str, ...], num_run: int, tmp_path: Path) -> None:
    """Named with `make test ARGS=FILE` they did not: the workers of pytest-xdist knew nothing of the names."""
    out = _run(
        tmp_path,
        "import pytest\n"
        "def test_quick(): pass\n"
        "@pytest.mark.slow\n"
        "def test_slow(): pass\n"
        "@pytest.mark.slow(but=('always',))\n"
        "@pytest.mark.parametrize('which', ['always'])\n"
        "def test_slow_but_one(which): pass\n",
        *words,
    )
    assert f"{num_run} passed" in out
    assert ("1  marked as slow: `make test-all` runs them" in out) == (not words)


def test_the_end_of_a_run_says_why_tests_did_not_run(tmp_path: Path) -> None:
    out = _run(
        tmp_path,
        "import pytest\n"
        "@pytest.mark.skip(reason='needs a moon')\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "def test_tide(n): pass\n"
        "@pytest.mark.slow\n"
        "@pytest.mark.parametrize('n', range(2))\n"
        "def test_slow(n): pass\n"
        "def test_sun(): pytest.skip('needs\\na sun')\n"
        "def test_quick(): pass\n",
    )
    lines = out.partition("not run, and why")[2].splitlines()[1:4]
    assert lines == ["     3  needs a moon", "     2  marked as slow: `make test-all` runs them", "     1  needs a sun"]


def _run(folder: Path, tests: str, *words: str) -> str:
    """Return what pytest says of a file of these tests, with the conftest of ours."""
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    root = shlex.quote(str(CONFTEST.parent.parent))
    settings = f"testpaths = .\npythonpath = {root}\nmarkers =\n    slow(but=()): takes long\n"
    (folder / "pytest.ini").write_text(f"[pytest]\n{settings}")
    (folder / "test_some.py").write_text(tests)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
