"""Remote calls, references and a backward across two workers, by the names of torch.distributed.rpc."""

import os

import torch

from phalanx import rpc
from phalanx.rpc import autograd

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}")
peer = f"worker{(rank + 1) % size}"

assert rpc.rpc_sync(peer, torch.add, args=(torch.ones(3), 2)).tolist() == [3, 3, 3]
futures = [rpc.rpc_async(peer, torch.mul, args=(torch.full((100_000,), 2.0), i)) for i in range(8)]
assert [future.wait()[-1].item() for future in futures] == [2 * i for i in range(8)]
layer = rpc.remote(peer, torch.nn.Linear, args=(4, 2))
assert layer.rpc_sync().forward(torch.ones(5, 4)).shape == (5, 2)

torch.manual_seed(rank)
x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
with autograd.context() as context:
    loss = rpc.rpc_sync(peer, torch.mm, args=(x, w)).tanh().sum()
    autograd.backward(context, [loss])
    there = autograd.get_gradients(context)
torch.mm(x, w).tanh().sum().backward()
torch.testing.assert_close((there[x], there[w]), (x.grad, w.grad))
del layer
rpc.shutdown()
print("right")
