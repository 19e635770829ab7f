import subprocess
import sys

import pytest
from tests.containers import contained, hide_proc, why_no_containers
from tests.seccomp import UNIX_SOCKETS, forbid, why_no_seccomp

from phalanx._tools.doctor.host import examine_kernel
from phalanx.testing import run_ranks


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has them")
def test_what_works_here_is_tried_and_found():
    kernel = examine_kernel()
    probes = (kernel.core, kernel.proc, kernel.futex, kernel.memfd, kernel.pidfd, kernel.unix_sockets)
    assert [probe.works for probe in probes] == [True] * 6


def test_a_core_that_cannot_be_imported_is_a_finding_and_no_crash():
    code = """
import sys
sys.modules["phalanx._core"] = None
from phalanx._tools.doctor.host import examine_kernel
print(examine_kernel().core)
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert "works=False" in run.stdout
    assert "phalanx._core" in run.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits descriptors")
def test_a_memfd_that_is_refused_is_a_finding_and_no_crash():
    code = """
import resource
from phalanx._tools.doctor.host import examine_kernel
examine_kernel()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))     # 0, 1 and 2 are taken
kernel = examine_kernel()
print(kernel.memfd, kernel.pidfd)
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.count("works=False") == 2
    assert "Too many open files" in run.stdout


def _contained(rank, world_size):
    def look():
        forbid("memfd_create", "pidfd_open", UNIX_SOCKETS)
        return examine_kernel()

    return contained(look, namespaces=("pid",))


@pytest.mark.skipif(bool(why_no_containers() or why_no_seccomp()), reason=why_no_containers() or why_no_seccomp())
def test_what_a_container_and_its_filter_take_away_is_found():
    (kernel,) = run_ranks(_contained, 1, init=False)
    assert kernel.namespaces[:1] == ("pid",)
    for probe in (kernel.memfd, kernel.pidfd, kernel.unix_sockets):
        assert not probe.works
        assert "Operation not permitted" in probe.detail


def _without_proc(rank, world_size):
    hide_proc()
    return examine_kernel()


@pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers())
def test_a_missing_proc_is_found() -> None:
    (kernel,) = run_ranks(_without_proc, 1, init=False)
    assert not kernel.proc.works
