"""`RemoteModule`: a model whose embeddings are on a server and whose dense part is in DDP, as in PyTorch's tutorial."""

import inspect
import pickle
from typing import Any

import pytest
import torch
from tests.rpc.workers import run_workers, worker
from torch.distributed.nn import RemoteModule as Theirs

import phalanx
from phalanx import rpc
from phalanx.optim import DistributedOptimizer

STEPS, ROWS, WIDTH, CLASSES = 4, 12, 6, 5


class Hybrid(torch.nn.Module):
    def __init__(self, embedding: torch.nn.Module, dense: torch.nn.Module) -> None:
        super().__init__()
        self.embedding, self.dense = embedding, dense

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> Any:
        return self.dense(self.embedding(indices, offsets))


def make_embedding(sparse: bool = False) -> torch.nn.EmbeddingBag:
    torch.manual_seed(1)
    return torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)


def make_dense() -> torch.nn.Linear:
    torch.manual_seed(2)
    return torch.nn.Linear(WIDTH, CLASSES)


def batch(step: int, trainer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(10 * step + trainer)
    return (
        torch.randint(ROWS, (7,), generator=random),
        torch.tensor([0, 3, 5]),
        torch.randint(CLASSES, (3,), generator=random),
    )


def train_alone(num_trainers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The dense gradients of all trainers are averaged; those of the embeddings are applied one after the other."""
    model = Hybrid(make_embedding(), make_dense())
    loss_fn = torch.nn.functional.cross_entropy
    for step in range(STEPS):
        losses = [loss_fn(model(*batch(step, trainer)[:2]), batch(step, trainer)[2]) for trainer in range(num_trainers)]
        table = [torch.autograd.grad(loss, model.embedding.weight, retain_graph=True)[0] for loss in losses]
        (sum(losses) / num_trainers).backward()
        with torch.no_grad():
            for gradient in table:
                model.embedding.weight -= 0.3 * gradient
            for parameter in model.dense.parameters():
                parameter -= 0.3 * parameter.grad
        model.zero_grad()
    return model.embedding.weight.detach(), model.dense.weight.detach()


def _train(trainer: int, embedding: rpc.RemoteModule, num_trainers: int, store: str) -> torch.Tensor:
    """A trainer: it is called by the master, with the module that the master has made on the server."""
    torch.distributed.init_process_group(
        "phalanx", init_method=f"file://{store}", rank=trainer, world_size=num_trainers
    )
    model = Hybrid(embedding, phalanx.DistributedDataParallel(make_dense()))
    assert sorted(name for name, _ in model.named_parameters()) == ["dense.module.bias", "dense.module.weight"]
    references = embedding.remote_parameters() + [rpc.RRef(parameter) for parameter in model.dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.3)
    for step in range(STEPS):
        indices, offsets, classes = batch(step, trainer)
        with rpc.autograd.context() as context:
            loss = torch.nn.functional.cross_entropy(model(indices, offsets), classes)
            torch.distributed.barrier()  # every trainer has looked up its rows before one of them is updated
            rpc.autograd.backward(context, [loss])
            torch.distributed.barrier()
            optimizer.step(context)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return model.dense.module.weight.detach()


def _hybrid_job(rank: int, folder: str, sparse: bool, num_trainers: int) -> Any:
    """Workers 0 and 1 train, as PyTorch's tutorial has it; then come the server and the master."""
    with worker(rank, num_trainers + 2, folder):
        if rank <= num_trainers:
            return None
        embedding = rpc.RemoteModule(f"w{num_trainers}", make_embedding, kwargs={"sparse": sparse})
        calls = [
            rpc.rpc_async(f"w{trainer}", _train, (trainer, embedding, num_trainers, f"{folder}/trainers"))
            for trainer in range(num_trainers)
        ]
        dense = [call.wait() for call in calls]
        return embedding.get_module_rref().rpc_sync().state_dict()["weight"], dense


@pytest.mark.parametrize("sparse", [False, True])
def test_ddp_with_embeddings_on_a_server_trains_as_one_process_does(sparse: bool) -> None:
    """PyTorch's own example of DDP with RPC, which needs RemoteModule, could not be written."""
    *_, (table, dense) = run_workers(_hybrid_job, 4, sparse, 2)
    expected_table, expected_dense = train_alone(2)
    torch.testing.assert_close(table, expected_table)
    for weight in dense:
        torch.testing.assert_close(weight, expected_dense)
    assert (table - make_embedding().weight).abs().max() > 0.1


class Drops(torch.nn.Module):
    """Tells its mode, and takes what modules take."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> tuple[torch.Tensor, bool]:
        return self.scale * x + shift, self.training


def _use_it(rank: int, folder: str) -> Any:
    with worker(rank, 2, folder):
        if rank:
            return None
        for place in ("w1", "w1/cpu", "rank:1", "rank:1/cpu"):
            remote = rpc.RemoteModule(place, Drops, (3.0,))
            value, is_training = remote(torch.ones(2), shift=1.0)
            assert (value.tolist(), is_training) == ([4.0, 4.0], True)
        assert remote.forward_async(torch.ones(1)).wait()[0].tolist() == [3.0]
        assert remote.eval()(torch.ones(1))[1] is False
        assert torch.nn.Sequential(remote).train()[0](torch.ones(1))[1] is True
        assert [len(remote.remote_parameters(recurse)) for recurse in (True, False)] == [3, 1]
        again = rpc.RemoteModule.init_from_module_rref("w1", remote.get_module_rref())
        assert again(torch.ones(1))[0].tolist() == [3.0]
        assert rpc.rpc_sync("w1", _call_it, (again, torch.full((1,), 2.0))).tolist() == [6.0]
        here = rpc.RemoteModule("cpu", Drops, (5.0,))
        assert here(torch.ones(1))[0].tolist() == [5.0]
        assert repr(remote) == "RemoteModule(on=1, device='cpu')"
        for place in ("", "/cpu", "w1/nowhere", "rank:x/cpu", "a:1", "w1/cpu/0"):
            with pytest.raises(ValueError, match="Could not parse remote_device"):
                rpc.RemoteModule(place, Drops, (1.0,))
        for name in ("parameters", "state_dict", "to", "register_forward_hook", "zero_grad", "cuda"):
            with pytest.raises(ValueError, match=f"Method `{name}` not supported for RemoteModule"):
                getattr(remote, name)()
        with pytest.raises(ValueError, match="returns an instance of <class 'dict'>"):
            rpc.RemoteModule("w1", dict)(torch.ones(1))
        with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
            pickle.dumps(remote)
        return True


def _call_it(module: rpc.RemoteModule, x: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = module(x)[0]
    return value


def test_a_remote_module_is_used_as_pytorchs_is() -> None:
    assert run_workers(_use_it, 2)[0]


def test_its_methods_have_pytorchs_arguments() -> None:
    for name in ("__init__", "init_from_module_rref", "remote_parameters", "get_module_rref"):
        theirs = [each for each in inspect.signature(getattr(Theirs, name)).parameters if not each.startswith("_")]
        assert list(inspect.signature(getattr(rpc.RemoteModule, name)).parameters) == theirs
