"""PyTorch's FSDP2 over the backend on a device mesh, and its gathered state: the weights of one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("phalanx")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).double()


def train(model, part):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(12, 10, dtype=torch.float64)[part], torch.randn(12, 3, dtype=torch.float64)[part]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


model = make_model()
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
train(model, slice(rank, None, size))
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
alone = make_model()
train(alone, slice(None))
if rank == 0:
    torch.testing.assert_close(whole, alone.state_dict())
dist.destroy_process_group()
print("right")
