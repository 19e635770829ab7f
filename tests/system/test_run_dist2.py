"""What PyTorch's new interfaces ask of a job: `_dist2.new_group`, and every method of c10d's store."""

from pathlib import Path

import pytest
from tests.system.phalanx_command import run, write_script


@pytest.mark.slow
def test_dist2_makes_groups_and_the_store_has_queues(tmp_path: Path) -> None:
    """`_dist2` keeps a table of backends of its own, in which we were not: "Backend phalanx not registered"."""
    pytest.importorskip("torch.distributed._dist2")
    script = write_script(
        tmp_path,
        """
import torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed import _dist2

for _ in range(2):
    group = _dist2.new_group("phalanx", timedelta(seconds=60), "cpu")
    total = torch.tensor([group.rank() + 1.0])
    with _dist2.process_group(group):
        group.allreduce([total]).wait()
    assert total.item() == 3, total
dist.init_process_group("phalanx")
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 0:
    store.queue_push("jobs", "first")
    store.queue_push("jobs", "second")
else:
    assert [store.queue_pop("jobs"), store.queue_pop("jobs")] == [b"first", b"second"]
    assert store.queue_len("jobs") == 0
store.append("log", str(dist.get_rank()))  # FileStore takes two equal ones for one
dist.barrier()
assert sorted(store.multi_get(["log"])[0]) == sorted(b"01")
print("done")
""",
    )
    finished = run("--nproc-per-node", "2", script)
    assert finished.code == 0, finished.err
    assert finished.out.count("done") >= 1
