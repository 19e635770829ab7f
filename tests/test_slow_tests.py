"""Which tests run: the slow ones where they are named or asked for, also with pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.mark.parametrize(
    ("words", "num_run"), [((), 2), (("--slow",), 3), (("test_some.py",), 3), (("-k", "slow"), 2), (("-m", "slow"), 2)]
)
def test_slow_tests_run_where_they_are_named(words: tuple[str, ...], num_run: int, tmp_path: Path) -> None:
    """Named with `make test ARGS=FILE` they did not: the workers of pytest-xdist knew nothing of the names."""
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers =\n    slow(but=()): takes long\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_quick(): pass\n"
        "@pytest.mark.slow\n"
        "def test_slow(): pass\n"
        "@pytest.mark.slow(but=('always',))\n"
        "@pytest.mark.parametrize('which', ['always'])\n"
        "def test_slow_but_one(which): pass\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{num_run} passed" in done.stdout, done.stdout
