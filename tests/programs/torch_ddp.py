"""PyTorch's own DistributedDataParallel over the backend, a second group, objects and a checkpoint of rank 0."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("phalanx")
rank, size = dist.get_rank(), dist.get_world_size()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)).double()


torch.manual_seed(1)
inputs, targets = torch.randn(4, 12, 10, dtype=torch.float64), torch.randn(4, 12, 3, dtype=torch.float64)
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[rank::size]), y[rank::size]).backward()
    optimizer.step()

alone = make_model()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    nn.functional.mse_loss(alone(x), y).backward()
    optimizer.step()
torch.testing.assert_close(dict(model.module.named_parameters()), dict(alone.named_parameters()))

second = dist.new_group(list(range(size)))
total = torch.full((1000,), float(rank + 1))
work = dist.all_reduce(total, group=second, async_op=True)
work.wait()
assert total.unique().tolist() == [size * (size + 1) / 2]
said = [None] * size
dist.all_gather_object(said, {"rank": rank, "pid": os.getpid()}, group=second)
assert [one["rank"] for one in said] == list(range(size))

folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
path = os.path.join(folder[0], "model.pt")
if rank == 0:
    torch.save(model.module.state_dict(), path)
dist.barrier()
restored = make_model()
restored.load_state_dict(torch.load(path, weights_only=True))
torch.testing.assert_close(restored.state_dict(), model.module.state_dict(), rtol=0, atol=0)
dist.barrier()
if rank == 0:
    os.remove(path)
    os.rmdir(folder[0])
dist.destroy_process_group()
print("right")
