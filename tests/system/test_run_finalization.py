"""A rank ends as any Python program does, for everybody who looks on, without taking the interpreter apart.

The interpreter's end visited every object of every module that the zygote had imported, and each visit copied a page
that all ranks shared: 8 ranks of 49 MB held 940 MB when they ended, and 32 that only import torch took 20 s for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.phalanx_command import run, write_script

# What others can see of a program's end: the files that it leaves, in which order it did what, and its exit code.
ENDING = """
import atexit, ctypes, io, multiprocessing, os, sys, threading, time, weakref

folder = sys.argv[1]
log = os.open(f"{folder}/events", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
def tell(text):
    os.write(log, (text + "\\n").encode())

class Thing:
    def __init__(self, name):
        self.name = name
    def __del__(self, tell=tell):
        tell(f"__del__ of {self.name}")

thing = Thing("thing")
ring = Thing("ring"); ring.itself = ring
unclosed = open(f"{folder}/unclosed", "w"); unclosed.write("written at the end")
atexit.register(tell, "first registered")
atexit.register(tell, "second registered")
atexit.register(lambda: 1 / 0)
finalizer = weakref.finalize(thing, tell, "finalizer of thing")
sys.path.insert(0, folder)
import mine

def work():
    main.join()
    tell("thread goes on after the main one")
main = threading.main_thread()
threading.Thread(target=work).start()
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

def child():
    print("the child's own end", flush=True)
process = multiprocessing.get_context("fork").Process(target=child); process.start()
forever = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True); forever.start()
if os.fork() == 0:
    os._exit(0)
os.wait()
print("no newline at the end of the output", end="")
ctypes.CDLL(None).printf(b" and C's own")

def fail():
    held = open(f"{folder}/held", "w"); held.write("held by the frame that failed")
    raise LookupError("on purpose")

how = sys.argv[2]
if how == "raise":
    fail()
elif how != "end":
    sys.exit(eval(how))
"""

MODULE = """
from __main__ import Thing
other = Thing("a module's thing")
"""


def _look(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}


def _in_promised_order(events: str) -> list[str]:
    """Sort the objects of modules that are let go together: a collection finalizes them in an order of its own."""
    lines = events.splitlines()
    num_before = next((i for i, line in enumerate(lines) if line.startswith("__del__")), len(lines))
    return lines[:num_before] + sorted(lines[num_before:])


@pytest.mark.slow(but=("raise",))
@pytest.mark.parametrize("how", ["end", "raise", "0", "3", "'words'", "None", "256 + 7"])
def test_a_rank_leaves_what_a_plain_python_program_leaves(tmp_path: Path, how: str) -> None:
    script = write_script(tmp_path, ENDING)
    plain, ranks = tmp_path / "plain", tmp_path / "ranks"
    for folder in (plain, ranks):
        folder.mkdir()
        (folder / "mine.py").write_text(MODULE)
    alone = subprocess.run([sys.executable, script, str(plain), how], capture_output=True, text=True, timeout=600)
    finished = run("--no-preload", "--nproc-per-node", "1", script, str(ranks), how)
    assert finished.code == alone.returncode
    expected, seen = _look(plain), _look(ranks)
    assert _in_promised_order(seen.pop("events")) == _in_promised_order(expected.pop("events"))
    assert seen == expected
    for words in ("no newline at the end of the output", "and C's own", "the child's own end"):
        assert words in alone.stdout
        assert words in finished.out
    for words in ("ZeroDivisionError", "LookupError: on purpose", "words"):
        assert (words in alone.stderr) == (words in finished.err)


def test_output_that_cannot_be_written_is_still_told_by_the_exit_code(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import sys\nsys.stdout = open('/dev/full', 'w')\nprint('x')\n")
    alone = subprocess.run([sys.executable, script], capture_output=True, timeout=600)
    assert run("--no-preload", "--nproc-per-node", "1", script).code == alone.returncode == 120


@pytest.mark.slow
def test_the_end_of_a_rank_leaves_the_pages_of_the_zygote_alone(tmp_path: Path) -> None:
    """Measured by the rank itself, as late as there is Python: in the `__del__` of what its script still holds."""
    script = write_script(
        tmp_path,
        """
import os, sys

def private():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Private_Dirty:"))

class Last:
    def __init__(self):
        self.parent, self.private, self.write = os.getppid(), private, os.write
        self.before = private()
    def __del__(self):
        self.write(1, f"grew by {self.private() - self.before} kB\\n".encode())

sys.modules["torch"].last = Last()  # the zygote's module, which the interpreter would have taken apart
print("over")
""",
    )
    finished = run("--nproc-per-node", "1", script)
    assert finished.code == 0
    assert "over" in finished.out
    assert "grew" not in finished.out
