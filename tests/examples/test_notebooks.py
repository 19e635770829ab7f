"""The notebooks run in a kernel of their own, from the first cell to the last, and find what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "TMPDIR")
# nbclient in a process of its own: its event loop and the sockets to the kernel end with it.
EXECUTE = """
import json, sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": sys.argv[2]}}).execute()
text_of = lambda output: output.get("text") or output.get("data", {}).get("text/plain", "")
print(json.dumps(["".join(map(text_of, c.outputs)) for c in notebook.cells if c.cell_type == "code"]))
"""


@pytest.fixture
def run(tmp_path):
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    for name in FOLDERS:
        kept[name] = str(tmp_path / name.lower())
        (tmp_path / name.lower()).mkdir()

    def carry_out(name):
        done = subprocess.run(
            [sys.executable, "-c", EXECUTE, str(ROOT / "examples" / name), str(tmp_path)],
            env={**kept, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [re.sub(r"\x1b\[\d*m", "", text) for text in json.loads(done.stdout)]  # ranks have colours

    return carry_out


@pytest.mark.slow
def test_the_first_steps_start_ranks_train_and_fail_as_the_notebook_says(run):
    hello, trained, failed = run("first_steps.ipynb")
    assert "[0] I am rank 0 of 2. The sum is 3." in hello
    assert "[3.0, 3.0]" in hello
    assert "% of the answers are right" in trained
    assert trained.rstrip().endswith("True"), "both ranks have the same weights"
    assert "raised here: the data of rank 1 are wrong" in failed


@pytest.mark.slow
def test_the_report_names_the_rank_that_waits_for_its_data(run):
    _, told, shares, compared, page = run("look_at_a_report.ipynb")
    assert "* Rank 1 " in told
    assert "data" in told[told.index("* Rank 1 ") :]
    assert "slow rank 1 {'data'" in shares
    assert "fast rank 0" in shares
    assert "samples a second" in compared
    assert "HTML object" in page
