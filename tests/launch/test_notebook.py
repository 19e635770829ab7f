"""`phalanx.launch` in a real Jupyter kernel: a process with threads, whose `__main__` has no file."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("ipykernel", reason="a notebook needs ipykernel")
nbformat = pytest.importorskip("nbformat", reason="a notebook needs nbformat")
pytest.importorskip("nbclient", reason="a notebook is driven by nbclient")

CELLS = [
    """
import os, threading, torch, phalanx
import torch.distributed as dist

class Point:
    def __init__(self, x):
        self.x = x
""",
    """
def train(start):
    with phalanx.init() as job:
        points = [None] * job.world_size
        dist.all_gather_object(points, Point(job.rank + start))
        print("hello from the rank")
        return Point(sum(point.x for point in points))

results = phalanx.launch(train, (1,), nproc_per_node=2)
print([(type(point) is Point, point.x) for point in results], threading.active_count() > 1)
""",
    """
def wrong():
    if os.environ["RANK"] == "1":
        raise RuntimeError("a line of this cell")
    threading.Event().wait()

phalanx.launch(wrong, nproc_per_node=2)
""",
    """
def hang(kernel):
    if os.environ["RANK"] == "0":
        os.kill(kernel, __import__("signal").SIGINT)  # the stop button
    threading.Event().wait()

phalanx.launch(hang, (os.getpid(),), nproc_per_node=2)
""",
    "print('still here', phalanx.launch(lambda: os.environ['RANK'], nproc_per_node=1))",
]


# In a process of its own: it leaves an event loop behind.
DRIVER = """
import nbclient, nbformat, sys
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", allow_errors=True).execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.mark.slow
def test_a_notebook_trains_on_ranks(tmp_path):
    path = tmp_path / "train.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS]), path)
    folders = {"JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "IPYTHONDIR": str(tmp_path / "ipython")}
    subprocess.run([sys.executable, "-c", DRIVER, path], cwd=tmp_path, env={**os.environ, **folders}, check=True)
    notebook = nbformat.read(path, as_version=4)
    told = [outputs(cell) for cell in notebook.cells]
    assert told[0] == ""
    assert "hello from the rank\n" in told[1]
    assert "[(True, 3), (True, 3)] True\n" in told[1]
    assert "RuntimeError: a line of this cell" in told[2]
    assert 'raise RuntimeError("a line of this cell")' in told[2], "the rank knows the lines of the cell"
    assert "First failure: rank 1 of 2" in told[2]
    assert "KeyboardInterrupt" in told[3]
    assert "still here ['0']" in told[4]


def outputs(cell):
    parts = []
    for output in cell.outputs:
        parts += [output.get("text", ""), "\n".join(output.get("traceback", ()))]
    return "".join(parts)
