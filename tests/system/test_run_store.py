"""The default store of a job appends as TCPStore does."""

from pathlib import Path

import pytest
from tests.system.phalanx_command import run, write_script


@pytest.mark.slow
def test_the_store_of_a_job_loses_no_append(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
import torch.distributed as dist

dist.init_process_group("phalanx")
store = dist.distributed_c10d._get_default_store()
store.append("log", "x")  # torch's FileStore takes two equal ones for one
dist.barrier()
assert store.multi_get(["log"]) == [b"xx"]
print("done")
""",
    )
    finished = run("--nproc-per-node", "2", script)
    assert finished.code == 0, finished.err
    assert finished.out.count("done") >= 1
