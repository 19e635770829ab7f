"""Test distributed code: ranks as real processes, faults at a chosen step, several hosts on one machine, a clock.

from phalanx.testing import run_ranks

def test_the_sum_arrives_everywhere():
    def total(rank, world_size):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(total, 3) == [3.0, 3.0, 3.0]
"""

from phalanx.testing.clock import ManualClock
from phalanx.testing.faults import Fault
from phalanx.testing.namespaces import Host, hosts, why_no_hosts
from phalanx.testing.ranks import RankFailed, run_ranks

__all__ = [
    "Fault",
    "Host",
    "ManualClock",
    "RankFailed",
    "hosts",
    "run_ranks",
    "why_no_hosts",
]
