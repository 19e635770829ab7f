import os
import sys

import pytest

from phalanx._tools.doctor.host import examine_host

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


@pytest.fixture
def root(tmp_path):
    """An empty file system; `write` fills it."""

    class Root:
        path = tmp_path

        def write(self, place, text):
            file = tmp_path / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")

    return Root()


def test_this_host_is_described():
    host = examine_host()
    assert host.cores == os.cpu_count()
    assert host.usable_cores == len(os.sched_getaffinity(0))
    assert host.available_bytes > 0
    assert host.name


def test_a_host_that_tells_nothing_is_described_too(root):
    host = examine_host(root.path)
    assert (host.cpu_quota, host.available_bytes, host.shm_bytes, host.clock_source) == (None, None, None, None)


def test_memory_is_what_the_tighter_of_machine_and_group_leaves(root):
    root.write("proc/meminfo", "MemTotal: 16000 kB\nMemAvailable: 8000 kB\nHugePages_Total: 0")
    root.write("proc/self/cgroup", "0::/")
    assert (examine_host(root.path).available_bytes, examine_host(root.path).memory_limited) == (8000 * 1024, False)
    root.write("sys/fs/cgroup/memory.max", "3000000")
    root.write("sys/fs/cgroup/memory.current", "1000000")
    assert (examine_host(root.path).available_bytes, examine_host(root.path).memory_limited) == (2000000, True)
    root.write("sys/fs/cgroup/memory.stat", "anon 100\ninactive_file 500000\nactive_file 7")  # freed when it is needed
    assert examine_host(root.path).available_bytes == 2500000


def test_promises_are_counted_only_where_the_kernel_keeps_them(root):
    root.write("proc/meminfo", "CommitLimit: 5000 kB\nCommitted_AS: 2000 kB")
    root.write("proc/sys/vm/overcommit_memory", "0")
    assert examine_host(root.path).commit_headroom_bytes is None
    root.write("proc/sys/vm/overcommit_memory", "2")
    assert examine_host(root.path).commit_headroom_bytes == 3000 * 1024


def test_the_limit_on_processes_is_that_of_the_group(root):
    root.write("proc/self/cgroup", "0::/")
    root.write("sys/fs/cgroup/pids.max", "100")
    root.write("sys/fs/cgroup/pids.current", "40")
    host = examine_host(root.path)
    assert (host.processes, host.processes_running) == (100, 40)


def test_variables_that_make_a_shell_look_like_a_rank_are_seen(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert examine_host().variables["RANK"] == "3"


def test_the_scheduler_that_started_the_command_is_seen(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    found = examine_host().scheduler
    assert (found.works, found.detail.startswith("MPICH: node 1 of 4 of job mpiexec-")) == (True, True)
    monkeypatch.setenv("PMI_RANK", "4")
    found = examine_host().scheduler
    assert (found.works, found.detail.startswith("PMI_RANK=4, PMI_SIZE=4 in the environment: MPICH says")) == (
        False,
        True,
    )
