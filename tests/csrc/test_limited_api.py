"""The core is built once for all Pythons: it must not depend on the one whose headers it was built with."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "csrc"


def test_no_format_with_a_length_in_it():
    """Python 3.13's headers call another symbol for "s#" than 3.11's: a core from there ended in a SystemError here."""
    calls = re.compile(r'Py(?:Arg_Parse|_Build|Object_Call)\w*\([^;]*?"[^"]*#[^"]*"')
    found = {source.name: calls.findall(source.read_text()) for source in sorted(CORE.glob("*.c"))}
    assert found
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_a_free_threaded_python_is_refused_by_name(tmp_path):
    """The core is optional: where its build failed, the package would install without it and say nothing."""
    (tmp_path / "sitecustomize.py").write_text("import sysconfig\nsysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n")
    python = tmp_path / "python"  # make splits a path at its blanks
    python.symlink_to(sys.executable)
    stamp = [f"PYTHON={python}", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/python.stamp"]
    for command in ([sys.executable, "setup.py", "--version"], ["make", *stamp]):
        run = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
        )
        assert run.returncode != 0
        assert "free-threaded" in run.stderr
