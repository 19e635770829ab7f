import os
import subprocess
import sys

from phalanx._base.processes import find_descendants

# In a process of its own, because it becomes the parent of all orphans below it.
KILL = """
import os, subprocess, sys
from phalanx._base.processes import adopt_orphans, find_descendants, kill_descendants
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


# The child leads a process group, as the zygote does: nothing else is known of it while /proc cannot be read.
WITHOUT_DESCRIPTORS = """
import os, resource, subprocess
from phalanx._base.processes import adopt_orphans, kill_descendants
adopt_orphans()
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
reaped = kill_descendants([child.pid])
print(reaped == {child.pid: 9})
"""


def test_a_process_group_is_killed_while_no_descriptor_is_free() -> None:
    """Strangers held every descriptor of the agent, and a job that had ended well ended with a traceback."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_process_without_children_has_no_descendants() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert find_descendants(child.pid) == []
        assert child.pid in find_descendants(os.getpid())
    finally:
        child.kill()
        child.wait()


# In a process of its own, because it reaps all children.
REAP = """
import os, signal, subprocess, time
from phalanx._base.processes import reap_children, signal_children
ended = [subprocess.Popen(["sh", "-c", f"exit {code}"]) for code in (0, 7)]
stopped = subprocess.Popen(["sh", "-c", "kill -STOP $$; sleep 600"], start_new_session=True)
spared = subprocess.Popen(["sleep", "600"])
os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
signal_children([stopped.pid, 1 << 22], signal.SIGTERM, group=True)
awaited, found = {one.pid for one in (*ended, stopped)}, {}
while found.keys() != awaited:
    for pid, code in reap_children():
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None  # not reaped yet
        found[pid] = code
assert [found[one.pid] for one in (*ended, stopped)] == [0, 7, -signal.SIGTERM]
spared.kill()
os.waitid(os.P_PID, spared.pid, os.WEXITED | os.WNOWAIT)
assert list(reap_children(spared=spared.pid)) == []
assert list(reap_children()) == [(spared.pid, -signal.SIGKILL)]
assert list(reap_children()) == []
print("fine")
"""


def test_children_are_told_before_they_are_reaped_and_one_that_is_stopped_hears_of_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", REAP], capture_output=True, text=True, timeout=600)
    assert done.stdout == "fine\n", done.stderr
