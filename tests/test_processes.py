import os
import subprocess
import sys

from phalanx.processes import find_descendants

# In a process of its own, because it becomes the parent of all orphans below it.
KILL = """
import os, subprocess, sys
from phalanx.processes import adopt_orphans, find_descendants, kill_descendants
adopt_orphans()
shell = subprocess.Popen(["sh", "-c", "setsid sleep 600 & setsid sleep 600 & echo up; wait"], stdout=subprocess.PIPE)
shell.stdout.readline()
assert shell.pid in find_descendants(os.getpid())
reaped = kill_descendants()
assert os.waitstatus_to_exitcode(reaped[shell.pid]) == -9
assert len(reaped) == 3, reaped
assert find_descendants(os.getpid()) == []
assert kill_descendants() == {}
print("fine")
"""


def test_descendants_are_killed_with_the_daemons_among_them() -> None:
    done = subprocess.run([sys.executable, "-c", KILL], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def test_a_process_without_children_has_no_descendants() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert find_descendants(child.pid) == []
        assert child.pid in find_descendants(os.getpid())
    finally:
        child.kill()
        child.wait()
