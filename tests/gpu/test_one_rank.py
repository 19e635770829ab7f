"""One rank on one GPU, over NCCL: what only a GPU can show."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.system.phalanx_command import run

pytestmark = pytest.mark.gpu


def _over_nccl(rank, world_size, place):
    device = place.join(rank, world_size)
    group = dist.group.WORLD
    tensor = torch.zeros(1 << 20, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    place.slow_fill(tensor, 3.0, 2000)
    after = torch.cuda.Event()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    after.record()
    blocked = after.query()  # the kernel alone takes two seconds: whoever has waited for it has blocked the host
    value = tensor[0].item()
    return blocked, value, sorted(group._inside), group._staged


def test_a_wait_orders_streams_and_does_not_block_the_host(cuda):
    assert cuda.run(_over_nccl, 1) == [(False, 3.0, ["cuda"], set())]


def _against_gloo(rank, world_size, place):
    results = []
    for backend in ("phalanx", "gloo"):
        device = place.join(rank, world_size, backend=backend)
        tensor = torch.arange(1000.0, device=device) * (rank + 1)
        dist.all_reduce(tensor)
        dist.broadcast(first := torch.full((3,), float(rank), device=device), 0)
        results.append((tensor.tolist(), first.tolist()))
        dist.destroy_process_group()
        place = type(place)(place.kind, place.folder + "-2")
        os.makedirs(place.folder, exist_ok=True)
    return results


def test_two_ranks_on_one_gpu_get_what_gloo_gives_them(cuda):
    for ours, gloos in cuda.run(_against_gloo, 2):
        assert ours == gloos


SCRIPT = """
import phalanx, torch, torch.distributed as dist
with phalanx.init() as job:
    torch.cuda.set_device(job.device)
    dist.all_reduce(total := torch.ones(1, device=job.device))
    print("rank", job.rank, "of", job.world_size, "on", job.device, "sees", torch.cuda.device_count(), total.item())
"""


@pytest.mark.parametrize(
    ("words", "env", "ranks", "sees"),
    [
        (["--nproc-per-node", "auto"], {}, None, None),
        (["--nproc-per-node", "gpu"], {"CUDA_VISIBLE_DEVICES": "0"}, 1, 1),
        (["--nproc-per-node", "4", "--ranks-per-gpu", "4"], {"CUDA_VISIBLE_DEVICES": "0"}, 4, 1),
    ],
)
def test_the_launcher_gives_each_rank_its_gpu(cuda, tmp_path, words, env, ranks, sees):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    finished = run(*words, str(script), env=env)
    ranks, sees = ranks or torch.cuda.device_count(), sees or torch.cuda.device_count()
    assert finished.code == 0, finished.err
    for rank in range(ranks):
        device = rank // max(1, ranks // sees)
        assert f"rank {rank} of {ranks} on cuda:{device} sees {sees} {float(ranks)}" in finished.out
