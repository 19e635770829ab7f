"""Matrix factorisation with its embeddings on parameter servers: two trainers, two servers; and one process alone.

    python examples/factorisation.py

The 1,797 handwritten digits of scikit-learn are the users, their 64 pixels the items, and brightness (0 to 16) is the
rating: 115,008 ratings, of which a fifth is hidden from training. The model is biased matrix factorisation (Koren,
Bell, Volinsky, 2009): mean + bias of the user + bias of the item + product of their vectors.
"""

import argparse
import functools
import tempfile

import torch
import torch._dynamo  # the optimizers load it: once here, before there are four processes
from sklearn.datasets import load_digits

import phalanx
from phalanx import rpc
from phalanx.testing import run_ranks

DIM = 8
TRAINERS = ["trainer0", "trainer1"]
SERVERS = ["server0", "server1"]
ROWS = functools.partial(torch.optim.SparseAdam, lr=0.02)
DENSE = functools.partial(torch.optim.Adam, lr=0.02)


def ratings():
    """User, item and rating, for training and for the test."""
    pixels = torch.tensor(load_digits().data, dtype=torch.float32)
    users, items = (ids.flatten() for ids in torch.meshgrid(*map(torch.arange, pixels.shape), indexing="ij"))
    order = torch.randperm(pixels.numel(), generator=torch.Generator().manual_seed(0))
    columns = [one.flatten()[order] for one in (users, items, pixels)]
    hidden = pixels.numel() // 5
    return [one[:-hidden] for one in columns], [one[-hidden:] for one in columns]


def initial(num_users, num_items):
    """The tables (a vector and a bias in each row) and the mean."""
    generator = torch.Generator().manual_seed(1)
    tables = {"users": torch.randn(num_users, DIM + 1, generator=generator) * 0.1}
    tables["items"] = torch.randn(num_items, DIM + 1, generator=generator) * 0.1
    return tables, {"mean": torch.zeros(())}


def predict(user, item, mean):
    """The ratings that the model expects."""
    return mean + user[:, DIM] + item[:, DIM] + (user[:, :DIM] * item[:, :DIM]).sum(1)


def batches(train, epochs, batch_size):
    """The same in every process."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(epochs):
        for ids in torch.randperm(len(train[0]), generator=generator).split(batch_size):
            yield [column[ids] for column in train]


def error(tables, dense, test):
    """Root mean square error on the ratings that were hidden."""
    users, items, rating = test
    with torch.no_grad():
        return float(
            (predict(tables["users"][users], tables["items"][items], dense["mean"]) - rating).square().mean().sqrt()
        )


def train_alone(epochs, batch_size):
    """One process: PyTorch alone."""
    train, test = ratings()
    tables, dense = initial(int(train[0].max()) + 1, int(train[1].max()) + 1)
    embeddings = {
        name: torch.nn.Embedding.from_pretrained(one, freeze=False, sparse=True) for name, one in tables.items()
    }
    mean = torch.nn.Parameter(dense["mean"])
    optimizers = [ROWS([one.weight for one in embeddings.values()]), DENSE([mean])]
    for users, items, rating in batches(train, epochs, batch_size):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = predict(embeddings["users"](users), embeddings["items"](items), mean)
        torch.nn.functional.mse_loss(expected, rating).backward()
        for optimizer in optimizers:
            optimizer.step()
    return error({name: one.weight for name, one in embeddings.items()}, {"mean": mean}, test)


def work(rank, world_size, store, epochs, batch_size, max_staleness):
    """A server, which only serves, or a trainer, which takes every second rating of each batch."""
    name = (TRAINERS + SERVERS)[rank]
    options = rpc.RpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    found = train_on_servers(rank, epochs, batch_size, max_staleness) if name in TRAINERS else None
    rpc.shutdown()
    return found


def train_on_servers(rank, epochs, batch_size, max_staleness):
    """What a trainer does; gives back the error on the test."""
    train, test = ratings()
    tables, dense = initial(int(train[0].max()) + 1, int(train[1].max()) + 1)
    with phalanx.ParameterServer(
        SERVERS,
        TRAINERS,
        tables=tables,
        dense=dense,
        row_optimizer=ROWS,
        optimizer=DENSE,
        synchronous=max_staleness is None,
        max_staleness=max_staleness,
    ) as server:
        for batch in batches(train, epochs, batch_size):
            users, items, rating = (column[rank :: len(TRAINERS)] for column in batch)
            pulled = server.pull({"users": users, "items": items})
            expected = predict(pulled["users"], pulled["items"], pulled["mean"])
            torch.nn.functional.mse_loss(expected, rating).backward()
            server.push(pulled)
        state = server.state_dict()
    return error(state["tables"], state["dense"], test)


def main():
    """Train in both ways."""
    parser = argparse.ArgumentParser(description="Matrix factorisation on parameter servers.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--max-staleness", type=int, help="asynchronous, with this bound")
    args = parser.parse_args()
    torch.set_num_threads(1)
    alone = train_alone(args.epochs, args.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        found = run_ranks(work, 4, store, args.epochs, args.batch_size, args.max_staleness, init=False, timeout=600)
    print(f"one process: test RMSE {alone:.4f}")
    print(f"two trainers, two servers: test RMSE {found[0]:.4f}")


if __name__ == "__main__":
    main()
