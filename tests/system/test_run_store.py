"""The default store of a job has the methods of c10d's TCPStore."""

from pathlib import Path

import pytest
from tests.system.phalanx_command import run, write_script


@pytest.mark.slow
def test_the_store_of_a_job_has_queues_and_appends(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
import torch.distributed as dist

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
