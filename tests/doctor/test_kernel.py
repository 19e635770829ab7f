import subprocess
import sys

import pytest

from phalanx.doctor.kernel import examine_kernel


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has them")
def test_what_works_here_is_tried_and_found():
    kernel = examine_kernel()
    assert (kernel.core.works, kernel.futex.works, kernel.memfd.works, kernel.pidfd.works) == (True,) * 4


def test_a_core_that_cannot_be_imported_is_a_finding_and_no_crash():
    code = """
import sys
sys.modules["phalanx._core"] = None
from phalanx.doctor.kernel import examine_kernel
print(examine_kernel().core)
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert "works=False" in run.stdout
    assert "phalanx._core" in run.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits descriptors")
def test_a_memfd_that_is_refused_is_a_finding_and_no_crash():
    code = """
import resource
from phalanx.doctor.kernel import examine_kernel
examine_kernel()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))     # 0, 1 and 2 are taken
kernel = examine_kernel()
print(kernel.memfd, kernel.pidfd)
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.count("works=False") == 2
    assert "Too many open files" in run.stdout
