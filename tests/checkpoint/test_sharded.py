"""Checkpoints of several ranks: written by all or by one, over any backend, and read by any number."""

import os

import pytest
import torch
import torch._dynamo  # every optimizer loads it, and it leaves a variable behind
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.comparisons import assert_equal
from tests.training import copy_parameters
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import phalanx
from phalanx.checkpoint import CheckpointManager, RandomState
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.sharded_read import PieceReader
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

# torch's planner and its state_dict of optimizers still call parts of torch that it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
BACKENDS = pytest.mark.parametrize("backend", ["phalanx", "gloo"])


def step(model, optimizer, rank=0):
    model(torch.ones(3, 70) * (rank + 1)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def network(seed):
    torch.manual_seed(seed)
    # Of more than 256 KiB and of less: ZeroRedundancyOptimizer cuts the one kind each, the other kind all together.
    return nn.Sequential(nn.Linear(70, 1000), nn.ReLU(), nn.Linear(1000, 9, bias=False), nn.BatchNorm1d(9))


# --- replicas --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_replicas_save_in_either_form_and_any_number_of_ranks_goes_on(tmp_path):
    def save(rank, world_size):
        model = phalanx.DistributedDataParallel(network(rank))
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, rank)
        parts = {"model": model, "optimizer": optimizer, "random": RandomState(), "note": "replicas"}
        torch.manual_seed(100 + rank)
        for name, sharded in (("whole", False), ("sharded", True)):
            manager = CheckpointManager(tmp_path / name, sharded=sharded)
            manager.async_save(1, parts)
            manager.async_save(2, parts)
            assert manager.wait() == tmp_path / name / "00000002-step-2"
        draws = torch.rand(4)
        expected, mean = copy_parameters(model), model.module[3].running_mean.clone()
        step(model, optimizer, rank)
        return draws, expected, copy_parameters(model), mean

    def load(rank, world_size):
        found = []
        for name in ("whole", "sharded"):
            model = phalanx.DistributedDataParallel(network(7))
            optimizer = torch.optim.AdamW(model.parameters())
            parts = {"model": model, "optimizer": optimizer, "random": RandomState()}
            restored = CheckpointManager(tmp_path / name).load(parts)
            assert restored.state["note"] == "replicas"
            draws, loaded = torch.rand(4), copy_parameters(model)
            mean = model.module[3].running_mean.clone()
            if world_size == 2:
                step(model, optimizer, rank)
            found.append((draws, loaded, copy_parameters(model), mean))
        return found

    saved = run_ranks(save, 2)
    assert len([f for f in os.listdir(tmp_path / "sharded" / "latest") if f.endswith(".distcp")]) == 2
    for world_size, backend in ((2, "phalanx"), (3, "gloo")):
        ranks = run_ranks(load, world_size, backend=backend)
        for rank, forms in enumerate(ranks):
            for draws, loaded, after, mean in forms:
                if rank < 2:
                    assert torch.equal(draws, saved[rank][0])
                assert_equal(loaded, saved[0][1])
                assert torch.equal(mean, saved[0][3]), "rank 0's statistics"
                if world_size == 2:
                    assert_equal(after, saved[rank][2])
        assert len({tuple(forms[0][0].tolist()) for forms in ranks}) == world_size, "every rank draws other numbers"


# --- sharded models --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_of_fsdp2_is_read_by_any_number_of_ranks_by_one_process_and_by_plain_torch(tmp_path):
    def build(seed):
        model = network(seed)
        fully_shard(model[0])
        fully_shard(model)
        return model, torch.optim.Adam(model.parameters())

    def whole(model, optimizer):
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        return [p.full_tensor().detach() for p in [*model.parameters(), *moments]]

    def save(rank, world_size):
        model, optimizer = build(0)
        step(model, optimizer, rank)
        manager = CheckpointManager(tmp_path)
        manager.async_save(1, {"model": model, "optimizer": optimizer})
        expected = whole(model, optimizer)
        step(model, optimizer, rank)
        manager.wait()
        return expected

    def load(rank, world_size):
        model, optimizer = build(1)
        CheckpointManager(tmp_path).load({"model": model, "optimizer": optimizer})
        return whole(model, optimizer), load_with_plain_torch(rank)

    def load_with_plain_torch(rank):
        model, optimizer = build(1)
        step(model, optimizer, rank)  # so that it has moments to fill
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "latest")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return whole(model, optimizer)

    expected = run_ranks(save, 2)[0]
    for world_size, backend in ((1, "phalanx"), (3, "gloo")):
        for found, found_by_torch in run_ranks(load, world_size, backend=backend):
            assert_equal(found, expected)
            assert_equal(found_by_torch, expected)

    state = CheckpointManager(tmp_path).load().state
    assert_equal([state["model"][name] for name, _ in network(0).named_parameters()], expected[:5])
    dcp_to_torch_save(tmp_path / "latest", tmp_path / "file.pt")
    plain = torch.load(tmp_path / "file.pt", weights_only=True)
    network(1).load_state_dict(plain["model"])
    assert_equal([plain["optimizer"]["state"][str(n)]["exp_avg"] for n in range(5)], expected[5:])


@pytest.mark.slow
def test_what_one_process_or_replicas_saved_whole_goes_on_in_a_model_of_fsdp2(tmp_path):
    """It was refused, "got mixed torch.Tensor and DTensor": a run under one device or "mirrored" could not be continued
    under `ShardedStrategy("model")`, only the other way round.
    """
    model = network(0)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    CheckpointManager(tmp_path).save(1, {"model": model, "optimizer": optimizer})
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    expected = [one.clone() for one in [*model.state_dict().values(), *moments]]
    step(model, optimizer, 0)
    after = [one.detach() for one in model.parameters()]

    def load(rank, world_size):
        model = network(1)
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())
        CheckpointManager(tmp_path).load({"model": model, "optimizer": optimizer})
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        found = [getattr(one, "full_tensor", lambda one=one: one)() for one in [*model.state_dict().values(), *moments]]
        assert_equal(found, expected)
        step(model, optimizer, 0)  # every rank with the same batch
        torch.testing.assert_close([p.full_tensor().detach() for p in model.parameters()], after)

    for world_size in (2, 3):
        run_ranks(load, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("machines", ["one-machine", "several-machines"])
def test_tensors_sharded_in_every_way_come_back_into_every_other(tmp_path, monkeypatch, machines):
    if machines == "several-machines":
        monkeypatch.setattr(Peers, "is_same_file", lambda self, file: False)
    wholes = {"a": torch.arange(35.0).view(7, 5), "b": torch.arange(12).view(3, 2, 2), "c": torch.tensor(3.5)}

    class Part:  # something with a state that is sharded in a way of its own
        def __init__(self, mesh, way):
            self.state = {n: distribute_tensor(w.clone(), mesh, way(w)) for n, w in wholes.items()}

        def state_dict(self):
            return self.state

    def ways(world_size):
        first = init_device_mesh("cpu", (world_size,))
        yield first, lambda w: [Shard(0) if w.dim() else Replicate()]
        yield first, lambda w: [Shard(w.dim() - 1) if w.dim() else Replicate()]
        yield first, lambda w: [Replicate()]
        if world_size == 4:
            grid = init_device_mesh("cpu", (2, 2))
            yield grid, lambda w: [Shard(0), Shard(1)] if w.dim() else [Replicate(), Replicate()]
            yield grid, lambda w: [Replicate(), Shard(1)] if w.dim() else [Replicate(), Replicate()]

    def save(rank, world_size):
        for number, (mesh, way) in enumerate(ways(world_size)):
            manager = CheckpointManager(tmp_path / f"{world_size}-{number}")
            manager.save(1, {"part": Part(mesh, way), "tied": [wholes["a"], wholes["a"]]})
            state = manager.load().state
            assert_equal({name: state["part"][name] for name in wholes}, wholes)
            assert state["tied"][0].data_ptr() == state["tied"][1].data_ptr()

    for world_size in (3, 4):
        run_ranks(save, world_size)
    for folder in tmp_path.iterdir():
        state = CheckpointManager(folder).load().state["part"]
        assert_equal({name: state[name] for name in wholes}, wholes)


# --- the sharded optimizer -------------------------------------------------------------------------------------------


@pytest.mark.slow(but=("whole",))
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.Adafactor], ids=["cut", "whole"])
def test_a_sharded_optimizer_is_saved_once_and_loaded_into_plain_ones_and_other_world_sizes(tmp_path, optimizer_class):
    def build(seed):
        model = network(seed)
        model[0].weight.data = model[0].weight.data.t().contiguous().t()  # in another order in memory
        model = phalanx.DistributedDataParallel(model)
        return model, phalanx.ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.01)

    def whole(model, optimizer):
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
        moments = [v for n in sorted(state) for _, v in sorted(state[n].items()) if isinstance(v, torch.Tensor)]
        return copy_parameters(model), moments

    def save(rank, world_size):
        model, optimizer = build(0)
        step(model, optimizer)
        for name, sharded in (("auto", None), ("whole", False)):
            manager = CheckpointManager(tmp_path / name, sharded=sharded)
            manager.async_save(1, {"model": model, "optimizer": optimizer})
            manager.wait()
        return whole(model, optimizer)

    def load(rank, world_size):
        found = []
        for name in ("auto", "whole"):
            model, optimizer = build(1)
            CheckpointManager(tmp_path / name).load({"model": model, "optimizer": optimizer})
            found.append(whole(model, optimizer))
        return found

    expected = run_ranks(save, 2)[0]
    sizes = {name: sum(f.stat().st_size for f in (tmp_path / name / "latest").iterdir()) for name in ("auto", "whole")}
    assert sizes["auto"] < 1.3 * sizes["whole"], "each rank its part, none twice"
    cases = ((3, "phalanx"), (2, "gloo")) if optimizer_class is torch.optim.Adam else ((1, "phalanx"),)
    for world_size, backend in cases:
        for rank, forms in enumerate(run_ranks(load, world_size, backend=backend)):
            for parameters, moments in forms:
                assert_equal(parameters, expected[0])
                if rank == 0:
                    assert_equal(moments, expected[1])

    def load_plain(rank, world_size):
        model = network(1)
        optimizer = optimizer_class(model.parameters())
        CheckpointManager(tmp_path / "auto").load({"model": model, "optimizer": optimizer})
        state = optimizer.state_dict()["state"]
        moments = [v for n in sorted(state) for _, v in sorted(state[n].items()) if isinstance(v, torch.Tensor)]
        return copy_parameters(model), moments

    parameters, moments = run_ranks(load_plain, 1, backend=None)[0]
    assert_equal(parameters, expected[0])
    assert_equal(moments, expected[1])


# --- what goes wrong -------------------------------------------------------------------------------------------------


@BACKENDS
def test_every_rank_hears_what_went_wrong_on_one_and_the_job_can_go_on(tmp_path, backend):
    def save(rank, world_size):
        told = []
        manager = CheckpointManager(tmp_path / "run", sharded=True)
        manager.save(1, {"w": torch.ones(300_000), "v": torch.ones(300_000)})
        # A part that cannot be asked for its state on one rank.
        try:
            manager.async_save(2, {"part": Broken() if rank == 1 else {}, "w": torch.ones(3)})
        except CheckpointError as error:
            told.append(str(error))
        # Nobody can write; and only rank 1 cannot, with a limit on the size of its files.
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        manager.async_save(3, {"w": torch.ones(300_000), "v": torch.ones(300_000)})
        try:
            manager.wait()
        except CheckpointError as error:
            told.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        total = torch.ones(1)
        dist.all_reduce(total)
        manager.save(4, {"w": torch.zeros(5)})
        left = sorted(os.listdir(tmp_path / "run"))
        return told, total.item(), manager.load().step, left

    first, second = run_ranks(save, 2, backend=backend)
    assert first == second
    (broken, full), total, loaded, left = first
    assert "async_save on rank 1: RuntimeError: no state today" in broken
    assert "step 3 to" in full
    assert "on rank 1: File too large" in full
    assert "unchanged" in full
    assert (total, loaded) == (2.0, 4)
    assert left == ["00000001-step-1", "00000002-step-4", "latest"]


class Broken:
    def state_dict(self):
        raise RuntimeError("no state today")


def test_a_folder_that_other_hosts_do_not_share_is_an_error_on_every_rank_before_anything_is_written(tmp_path):
    def save(rank, world_size):
        (tmp_path / str(rank)).mkdir()
        manager = CheckpointManager(tmp_path / str(rank) / "run", sharded=True)
        told = []
        for save in (manager.save, manager.async_save):
            with pytest.raises(CheckpointError) as caught:
                save(1, {"w": torch.ones(3)})
            told.append(str(caught.value))
        whole = CheckpointManager(tmp_path / str(rank) / "run", sharded=False)
        whole.save(1, {"w": torch.ones(3)})  # rank 0 has it, and hands it on
        loaded = whole.load().state["w"]
        return told, os.path.exists(tmp_path / str(rank) / "run"), loaded

    (first, exists, loaded), (second, not_there, handed_on) = run_ranks(save, 2)
    assert first == second
    assert all("does not see the files of rank 0 in" in text for text in first)
    assert "the hosts do not share this folder. Nothing was written. Save to a folder on a disk" in first[0]
    assert (exists, not_there) == (True, False)
    assert torch.equal(loaded, handed_on)


def test_a_rank_that_does_not_see_the_folder_gets_everything_from_the_others(tmp_path):
    def save(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        CheckpointManager(tmp_path / "run").save(
            1, {"s": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]), "w": torch.ones(3)}
        )

    def load(rank, world_size):
        state = CheckpointManager(tmp_path / ("elsewhere" if rank == 1 else "run")).load().state
        model = nn.Linear(1, 1)
        with pytest.raises(CheckpointError, match="rank 0, which reads them, does not"):
            CheckpointManager(tmp_path / ("elsewhere" if rank == 0 else "run")).load({"model": model})
        return state["s"], state["w"]

    run_ranks(save, 2)
    for sharded, plain in run_ranks(load, 2):
        assert torch.equal(sharded, torch.arange(10.0))
        assert torch.equal(plain, torch.ones(3))


def test_ranks_read_the_pieces_that_they_hand_on_at_the_same_time(tmp_path, monkeypatch):
    """Each read its piece when its turn came, and the others waited for it."""
    state = {name: torch.full((4,), number) for number, name in enumerate("abc")}

    def save(rank, world_size):
        CheckpointManager(tmp_path, sharded=True).save(1, state)

    def load(rank, world_size):
        monkeypatch.setattr(Peers, "is_same_file", lambda self, file: False)  # as on two machines
        readers, met, read = dist.new_group(), [], PieceReader.read

        def read_together(self, name, chunk):
            if not met:
                met.append(name)
                dist.barrier(group=readers)  # the others must be reading, too
            return read(self, name, chunk)

        monkeypatch.setattr(PieceReader, "read", read_together)
        loaded = CheckpointManager(tmp_path).load().state
        assert_equal({name: loaded[name] for name in state}, state)
        return met

    run_ranks(save, 2)
    assert run_ranks(load, 2) == [["a"], ["b"]]
