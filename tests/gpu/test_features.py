"""What stands on the collectives, on ranks that share a device: pipelines, remote calls, recovery, a Trainer."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.small_models import mlp
from tests.system.phalanx_command import run
from torch import nn
from torch.nn import functional

import phalanx
from phalanx import rpc
from phalanx.errors import PeerLostError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*The operator aten"),  # the simulated device has few kernels of its own
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]


SIZES = (12, 40, 40, 3)


def _batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 12, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def _close(ones, others):
    here, there = ([one.detach().cpu() for one in each] for each in (ones, others))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


def _pipeline(rank, world_size, place):
    device = place.join(rank, world_size)
    plain = mlp(SIZES).to(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    pipe = phalanx.Pipeline(mlp(SIZES).to(device), micro_batches=4, loss_fn=functional.cross_entropy)
    own = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x, y = (one.to(device) for one in _batch(step))
        optimizer.zero_grad()
        loss = functional.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        own.zero_grad()
        losses.append((loss.item(), pipe.step(x, target=y).item()))
        own.step()
    names = dict(plain.named_parameters())
    mine = dict(pipe.named_parameters())
    _close([mine[name] for name in mine], [names[name] for name in mine])
    assert all(p.device == device for p in mine.values())
    return losses, len(mine)


def test_a_pipeline_of_ranks_on_one_device_trains_as_one_process(place):
    results = place.run(_pipeline, 2)
    assert sum(count for _, count in results) == 6
    for losses, _ in results:
        for one, other in losses:
            assert one == pytest.approx(other, rel=1e-4)


def _scaled(tensor, factor):
    return tensor * factor


def _call(rank, world_size, place):
    device = place.device()
    options = rpc.RpcBackendOptions(init_method=f"file://{place.folder}/rpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    found = None
    if rank == 0:
        small, large = torch.ones(3, device=device), torch.ones(100_000, device=device)
        sums = [rpc.rpc_sync("worker1", _scaled, (tensor, 3)) for tensor in (small, large)]
        remote = rpc.remote("worker1", nn.Linear, (4, 2)).rpc_sync()
        out = remote.to(device)(torch.ones(1, 4, device=device))
        found = [(one.device.type, one.sum().item()) for one in sums], out.device.type
    rpc.shutdown()
    return found


def test_remote_calls_carry_tensors_of_the_device(place):
    found, _ = place.run(_call, 2)
    kind = place.kind
    assert found == ([(kind, 9.0), (kind, 300_000.0)], kind)


def _saved(rank, world_size, place):
    device = place.join(rank, world_size)
    manager = phalanx.CheckpointManager(os.path.join(place.folder, "saved"))
    digests = []
    for seed in (rank, 7 + rank):
        torch.manual_seed(seed)
        model = phalanx.DistributedDataParallel(mlp(SIZES).to(device))
        optimizer = torch.optim.AdamW(model.parameters())
        parts = {"model": model, "optimizer": optimizer}
        if seed == rank:
            x, y = (one.to(device) for one in _batch())
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            manager.async_save(1, parts)
            manager.wait()
        else:
            assert manager.load(parts).step == 1
        state = optimizer.state_dict()["state"][0]["exp_avg"]
        digests.append(([p.detach().cpu() for p in model.parameters()], state.device.type, state.cpu()))
    first, second = digests
    same = all(map(torch.equal, first[0], second[0])) and torch.equal(first[2], second[2])
    dist.barrier()
    return same, first[1], second[1]


def test_a_background_checkpoint_of_the_device_is_loaded_onto_it(place):
    assert place.run(_saved, 2) == [(True, place.kind, place.kind)] * 2


def _averaged(rank, world_size, place):
    device = place.join(rank, world_size)
    model = mlp(SIZES).to(device)
    inner = torch.optim.AdamW(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with phalanx.DiLoCo(model, inner, outer, sync_every=2):
        for step in range(4):
            x, y = (one.to(device) for one in _batch(10 * rank + step))
            inner.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            inner.step()
    theirs = [None] * world_size
    mine = [p.detach().cpu() for p in model.parameters()]
    dist.all_gather_object(theirs, mine)
    return all(torch.equal(*pair) for pair in zip(theirs[0], theirs[1], strict=True))


def test_replicas_that_train_apart_meet_on_the_device(place):
    assert place.run(_averaged, 2) == [True, True]


def _after_a_loss(rank, world_size, place):
    """What the survivor has on the device is still there, and still computes."""
    device = place.join(rank, world_size)
    mine = torch.full((1 << 20,), 2.0, device=device)
    dist.all_reduce(mine)
    if rank == 1:
        dist.all_reduce(torch.zeros(1 << 20, device=device))
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.zeros(1 << 20, device=device))
    with pytest.raises(PeerLostError):
        dist.all_reduce(torch.zeros(1 << 20, device=device))
    dist.destroy_process_group()
    return (mine * 2).sum().item() / mine.numel()


def test_a_survivor_keeps_its_device(place):
    assert place.run(_after_a_loss, 2, lost=(1,)) == [8.0, None]


def _sharded(rank, world_size, place):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = place.join(rank, world_size)
    mesh = init_device_mesh("cuda", (world_size,))
    trained = []
    for shard in (True, False):
        model = mlp(SIZES).to(device)
        if shard:
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x, y = (one.to(device) for one in _batch(10 * rank + step))
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        trained.append([p.full_tensor() if shard else p for p in model.parameters()])
    _close(*trained)
    return True


@pytest.mark.gpu
def test_torchs_fully_sharded_model_trains_over_ranks_that_share_a_gpu(cuda):
    assert cuda.run(_sharded, 2) == [True, True]


def _mixed_precision(rank, world_size, place):
    device = place.join(rank, world_size)
    trained = []
    for wrap in (phalanx.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = wrap(mlp(SIZES).to(device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for step in range(4):
            x, y = (one.to(device) for one in _batch(step))
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        trained.append([p.detach().cpu() for p in model.parameters()])
    return all(map(torch.equal, *trained))


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2])
def test_mixed_precision_gives_the_weights_that_torchs_ddp_gives(cuda, world_size):
    assert cuda.run(_mixed_precision, world_size) == [True] * world_size


ELASTIC = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import phalanx

job = phalanx.init()
torch.cuda.set_device(job.device)
torch.manual_seed(0)
inputs = torch.randn(256, 20)
data = TensorDataset(inputs, (inputs.square().sum(1) > 20).long())
sampler = phalanx.DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
model = phalanx.DistributedDataParallel(model.to(job.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(job.rank)
state = phalanx.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
marker = sys.argv[1]

@phalanx.elastic.run(state)
def train(state):
    for epoch in state.epochs(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(job.device)), y.to(job.device))
            optimizer.zero_grad()
            loss.backward()
            if job.rank == 1 and state.step == 11 and marker and not os.path.exists(marker):
                open(marker, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.commit()

train(state)
total = torch.cat([p.detach().flatten() for p in model.state_dict().values() if p.is_floating_point()])
print("rank", job.rank, "on", job.device, "weights", total.double().cpu().sum().item().hex(), flush=True)
"""


@pytest.mark.gpu
def test_a_rank_lost_on_a_gpu_is_replaced_without_a_bit_lost(cuda, tmp_path):
    script, marker = tmp_path / "train.py", tmp_path / "lost"
    script.write_text(ELASTIC)
    ends = []
    for killed in ("", str(marker)):
        finished = run("--nproc-per-node", "2", "--ranks-per-gpu", "2", str(script), killed)
        assert finished.code == 0, finished.err
        ends.append(sorted(line.partition("rank ")[2] for line in finished.lines if "weights" in line))
    assert marker.exists()
    assert ends[0] == ends[1]
    assert [line.split()[2] for line in ends[0]] == ["cuda:0", "cuda:0"]


TRAINER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import phalanx

torch.manual_seed(0)
inputs = torch.randn(320, 8)
data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss = nn.functional.mse_loss
trainer = phalanx.Trainer(model, optimizer, loss, strategy="mirrored", max_epochs=3, precision="16-mixed")
trainer.fit(DataLoader(data, batch_size=16))
devices = {p.device for p in model.parameters()}
print("trained on", *devices, all(bool(p.isfinite().all()) for p in model.parameters()), flush=True)
"""


@pytest.mark.gpu
def test_a_trainer_trains_on_the_ranks_gpu(cuda, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    finished = run("--nproc-per-node", "2", "--ranks-per-gpu", "2", str(script))
    assert finished.code == 0, finished.err
    assert [text for _, text in finished.by_rank if "trained on" in text] == ["trained on cuda:0 True"] * 2


MEMORY = """
import os, torch, phalanx
with phalanx.init() as job:
    torch.cuda.set_device(job.device)
    if job.rank == 1:
        torch.empty(1 << 50, dtype=torch.uint8, device=job.device)
    torch.distributed.all_reduce(torch.ones(1, device=job.device))
"""


@pytest.mark.gpu
def test_the_launcher_tells_which_rank_ran_out_of_the_gpus_memory(cuda, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(MEMORY)
    finished = run("--nproc-per-node", "2", "--ranks-per-gpu", "2", str(script))
    assert finished.code == 1
    first = finished.err[finished.err.index("First failure") :] if "First failure" in finished.err else finished.err
    assert "rank 1" in first.lower()
    assert "out of memory" in first.lower()
