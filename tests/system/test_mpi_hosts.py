"""mpiexec over several hosts, which are network namespaces: no address is given, and MPI carries the bytes."""

import pytest
from tests.mpi_jobs import mpi_job
from tests.system.mpi_checks import different, everything

from phalanx.testing import hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


@pytest.mark.slow
def test_every_collective_over_mpi_gives_the_values_of_one_host():
    with hosts(2) as machines:
        results = mpi_job(everything, 4, hosts=machines).results()
        sent = machines[0].bytes_sent()
    sums = [(float(across), 6.0) for across in (0, 3, 3, 3)]
    assert results == [{"engines": ["mpi", "mpi"], "store": False, "sums": each} for each in sums]
    assert sent > 1_000_000  # it is not memory that carried them


@pytest.mark.slow
def test_ranks_that_disagree_or_fail_are_named_on_other_hosts():
    with hosts(2) as machines:
        outcome = mpi_job(different, 4, hosts=machines)
    assert outcome.exit_code != 0
    for rank in range(4):
        text = outcome.output.partition(f"rank {rank} heard: ")[2]
        assert "the ranks were given different options.\n  rank 0: algorithm=None" in text
        assert f"on rank {rank}: the ranks' calls do not match; no tensor was changed." in text
        assert "rank 3: barrier at tests/system/mpi_checks.py" in text
    assert 'KeyError: "the loader\'s index"' in outcome.output
    # That MPI_Abort ended it MPICH says itself, unless its launcher has ended before it read that line.
