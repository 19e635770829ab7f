import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.leaks import Snapshot, mark_descendants

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def before():
    return Snapshot.take()


def test_nothing_is_found_where_nothing_is_left(before):
    assert before.leaks() == []


def _wait_for_exec(pid, command):
    """Wait until the process shows this command line.

    The parent of a fork goes on before the child's exec, and the parent of a vfork before exec has noted the new
    command line, which reads as empty until then.
    """
    while Path(f"/proc/{pid}/cmdline").read_bytes() != command:
        time.sleep(0.001)


def test_a_child_process_is_found_by_its_command(before):
    with subprocess.Popen(["sleep", "1000"]) as child:
        _wait_for_exec(child.pid, b"sleep\0001000\0")
        found = before.leaks(patience_s=0)
        child.kill()
    assert any(f"process {child.pid}: sleep 1000" in leak for leak in found)
    assert before.leaks() == []


def test_a_zombie_is_found(before):
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert any("state Z" in leak for leak in before.leaks(patience_s=0))
    child.wait()


def test_an_orphan_is_found_by_the_mark_that_it_inherits(before):
    mark_descendants()
    shell = subprocess.run(["sh", "-c", "sleep 1000 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, check=True)
    orphan = int(shell.stdout)
    _wait_for_exec(orphan, b"sleep\0001000\0")
    found = before.leaks(patience_s=0)
    os.kill(orphan, signal.SIGKILL)
    assert any(f"process {orphan}: sleep 1000" in leak for leak in found)


def test_a_thread_is_found_by_its_name(before):
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    thread.start()
    found = before.leaks(patience_s=0)
    done.set()
    thread.join()
    assert "thread 'forgotten'" in found


def test_a_descriptor_is_found_by_what_it_refers_to(before, tmp_path):
    with (tmp_path / "left open").open("w") as file:
        assert [leak for leak in before.leaks(patience_s=0) if "left open" in leak] == [
            f"descriptor {file.fileno()}: {tmp_path}/left open"
        ]


def test_a_listening_port_is_found_by_its_number(before):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert any(f"listening on tcp port {port}" in leak for leak in before.leaks(patience_s=0))


def test_a_variable_is_found_by_its_value_and_undone(before):
    os.environ["PHALANX_FORGOTTEN"] = "1"
    assert before.leaks(patience_s=0) == ["variable PHALANX_FORGOTTEN: None became '1'"]
    before.restore()
    assert "PHALANX_FORGOTTEN" not in os.environ


def test_a_cycle_that_holds_a_descriptor_is_not_a_leak(before, tmp_path):
    class Holder:
        def __init__(self):
            self.me = self
            self.fd = os.open(tmp_path, os.O_RDONLY)

        def __del__(self):
            os.close(self.fd)

    Holder()
    assert before.leaks() == []


def test_the_programs_that_multiprocessing_keeps_are_no_leak():
    """The first test whose DataLoader had workers was blamed for the pipe of the forkserver, 3.14's default."""
    code = (
        "import multiprocessing\n"
        "from tests.leaks import Snapshot\n"
        "before = Snapshot.take()\n"
        "process = multiprocessing.get_context('forkserver').Process(target=int)\n"
        "process.start()\n"
        "process.join()\n"
        "process.close()\n"
        "print(before.leaks())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.slow
def test_the_police_fails_a_test_that_leaks(tmp_path):
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import os, subprocess\n"
        "def test_leaky():\n"
        "    os.environ['LEFT'] = 'here'\n"
        "    subprocess.Popen(['sleep', '1000'])\n"
        "def test_clean():\n"
        "    assert 'LEFT' not in os.environ\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 1
    assert "the test left behind:" in run.stdout
    assert "sleep 1000" in run.stdout
    assert "variable LEFT: None became 'here'" in run.stdout
    assert "2 passed, 1 error" in run.stdout
