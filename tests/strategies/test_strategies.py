"""Every strategy trains as one process does; what they share of data, values and weights."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from tests.small_models import make_data
from tests.training import copy_parameters
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from phalanx import strategies
from phalanx.data import DistributedSampler
from phalanx.ddp import DistributedDataParallel
from phalanx.strategies.choose import STRATEGIES, JobDescription, decide_strategy
from phalanx.strategies.loader import divide_batch, make_iterable_loader, make_loader
from phalanx.strategies.recipe import Recipe
from phalanx.strategies.start import ScriptCommand, find_world, is_launched
from phalanx.testing import RankFailed, run_ranks


def make_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def optimizer_of(model):
    weights = [one for name, one in model.named_parameters() if name.endswith("weight")]
    biases = [one for name, one in model.named_parameters() if name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 2e-2}], lr=1e-2)


def train(strategy, epochs=2, max_norm=None):
    """The losses of the global batches, and the norms of their gradients."""
    torch.manual_seed(0)
    with strategy.scope():
        model = make_model()
    strategy.setup(model, optimizer_of(model), F.mse_loss)
    loader = strategy.loader(make_data(96), batch_size=16)
    seen = []
    for _, (inputs, targets) in itertools.product(range(epochs), loader):
        loss = strategy.compute_gradients((inputs, targets))
        norm = strategy.update(max_norm)
        seen.append((strategy.reduce("mean", loss).item(), 0.0 if norm is None else float(norm)))
    strategy.close()
    return torch.tensor(seen)


@pytest.fixture(scope="module")
def alone():
    return train(strategies.SingleDeviceStrategy("cpu"), max_norm=5.0)


@pytest.mark.slow
@on_ranks(4)
def test_pipelines_beside_each_other_share_the_batch(rank, alone):
    strategy = strategies.PipelineStrategy(data=2, micro_batches=2)
    assert (strategy.num_replicas_in_sync, strategy.replica_id_in_sync_group) == (2, rank % 2)
    losses = train(strategy, max_norm=5.0)
    torch.testing.assert_close(losses, alone)


@on_ranks(2)
def test_stages_are_on_the_devices_that_are_named():
    """`devices` of a pipeline only counted: which they were made no difference, nor whether there were any."""
    strategy = strategies.PipelineStrategy(devices=["cpu:0", "cpu:1"], micro_batches=2)
    assert strategy.device == torch.device("cpu")
    with torch.device("meta"):
        model = make_model()
    pipe, _ = strategy.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
    assert {one.device for one in pipe.parameters()} == {torch.device("cpu")}
    # Where a host has no second kind of device: the stage is where the pipeline is told, not where the model was.
    elsewhere = strategies.PipelineStrategy(micro_batches=2)
    elsewhere.device = elsewhere._pipeline_options["device"] = torch.device("meta")
    pipe, _ = elsewhere.setup(make_model(), lambda p: torch.optim.SGD(p, lr=0.1), F.mse_loss)
    assert {one.device.type for one in pipe.parameters()} == {"meta"}


@on_ranks(2)
def test_rounds_of_one_step_with_sgd_are_data_parallel():
    seen = []
    for name, options in (("local_sgd", {"sync_every": 1}), ("mirrored", {})):
        strategy = strategies.get(name, **options)
        torch.manual_seed(0)
        strategy.setup(make_model(), lambda p: torch.optim.SGD(p, lr=0.01), F.mse_loss)
        for inputs, targets in strategy.loader(make_data(96), 16):
            strategy.step(inputs, targets)
        seen.append(copy_parameters(strategy.bare_model))
        strategy.close()
    averaged, mirrored = seen
    torch.testing.assert_close(averaged, mirrored)


def test_models_of_a_scope_are_alike_and_what_is_drawn_behind_it_as_before():
    def run(rank, world_size):
        strategy = strategies.MirroredStrategy()
        torch.manual_seed(0)
        with strategy.scope():
            assert strategies.get_strategy() is strategy
            first = nn.Linear(3, 3).weight.detach()
        alike = torch.rand(1)  # seeded alike: goes on alike
        torch.manual_seed(rank)
        own = torch.rand(1)
        torch.manual_seed(rank)
        with strategy.scope():
            second = nn.Linear(3, 3).weight.detach()
        return first, alike, second, torch.rand(1) if rank else own, own

    zero, one = run_ranks(run, 2)
    assert_equal(zero[:3], one[:3])
    assert torch.equal(one[3], one[4])  # seeded apart: goes on apart


def test_values_of_replicas_are_reduced_and_gathered_as_in_tf_distribute():
    def run(rank, world_size):
        strategy = strategies.MirroredStrategy()
        tensor = torch.full((2, 3), float(rank))
        rows = torch.full((rank + 1, 2), float(rank))
        return (
            strategy.reduce("sum", tensor),
            strategy.reduce(dist.ReduceOp.AVG, {"a": tensor, "b": rank + 1}),
            strategy.reduce("MEAN", rows, axis=0),
            strategy.reduce("sum", rank),
            strategy.gather(rows, axis=0),
            strategy.gather(rows.T, axis=1),
            strategy.run(lambda x: strategies.get_replica_context().all_reduce("sum", x), args=(rank + 1,)),
            strategy.experimental_local_results(rank),
        )

    for rank, (total, mean, by_row, number, rows, columns, run_total, local) in enumerate(run_ranks(run, 3)):
        assert torch.equal(total, torch.full((2, 3), 3.0))
        assert torch.equal(mean["a"], torch.full((2, 3), 1.0))
        assert mean["b"] == 2.0
        torch.testing.assert_close(by_row, torch.full((2,), (0 + 2 * 1 + 3 * 2) / 6))  # each row counts once
        assert (number, run_total, local) == (3, 6, (rank,))
        assert rows[:, 0].tolist() == columns[0].tolist() == [0, 1, 1, 2, 2, 2]


def test_reductions_that_make_no_sense_are_refused():
    """An axis that is not there was an IndexError of a tuple, no number torch's own words; and `args=(x)` gave the
    function the rows of x. Sums of truths were truths.
    """
    strategy = strategies.SingleDeviceStrategy("cpu")
    assert strategy.reduce("mean", [3, 4.0]) == [3.0, 4.0]
    with pytest.raises(ValueError, match="reduce_op must be 'sum' or 'mean', got 'max'"):
        strategy.reduce("max", 1)
    with pytest.raises(ValueError, match="the tensor has no axes"):
        strategy.gather(torch.tensor(1))
    ones = torch.ones(2, 3)
    for call, error, words in [
        (lambda: strategy.reduce("sum", ones, axis=2), ValueError, r"reduce: a tensor of shape \(2, 3\) has no axis 2"),
        (lambda: strategy.reduce("sum", ones, axis=(0, -3)), ValueError, r"shape \(2, 3\) has no axis -3"),
        (lambda: strategy.reduce("sum", ones, axis="0"), TypeError, "reduce: axis must be a number, got '0'"),
        (lambda: strategy.reduce("sum", [1, "a"]), TypeError, "values must be tensors or numbers, got a str"),
        (lambda: strategy.reduce("sum", {"a": None}), TypeError, "got a NoneType"),
        (lambda: strategy.gather(ones, axis=2), ValueError, r"gather: a tensor of shape \(2, 3\) has no axis 2"),
        (lambda: strategy.gather([ones]), TypeError, "gather: value must be a tensor, got a list"),
        (lambda: strategy.run(torch.neg, args=(ones)), ValueError, r"as args=\(x,\), got a Tensor"),
    ]:
        with pytest.raises(error, match=words):
            call()
    assert strategy.reduce("sum", [True, torch.tensor(True)]) == [1, torch.tensor(1)]


@on_ranks(2)
def test_where_no_strategy_is_in_scope_each_process_is_one_replica_and_two_do_not_mix(rank):
    """As in tf.distribute, where a function may ask for the strategy whether there is one or not. It was refused."""
    assert not strategies.has_strategy()
    default = strategies.get_strategy()
    assert (default.num_replicas_in_sync, default.reduce("sum", rank), default.is_main) == (1, rank, True)
    assert strategies.get_replica_context().merge_call(lambda one, x: one.reduce("sum", x), (rank,)) == rank
    strategy = strategies.MirroredStrategy()
    with strategy.scope(), strategy.scope():
        for enter in (default.scope, lambda: default.run(int)):
            with pytest.raises(RuntimeError, match=r"DefaultStrategy.* in the scope of another .*Mirrored.*: leave"):
                enter().__enter__()
    assert not strategies.has_strategy()


# -- data --------------------------------------------------------------------------------------------------------------


def loaders(dataset, batch_size, num_replicas, **options):
    own = divide_batch(batch_size, num_replicas)
    common = {"shuffle": True, "seed": 7, "drop_last": False, "padding": True, "options": {}} | options
    return [make_loader(dataset, own, num_replicas=num_replicas, replica=one, **common) for one in range(num_replicas)]


@pytest.mark.parametrize("size", [1, 11, 24, 96])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_batches_of_all_replicas_together_are_those_of_one(size, shuffle):
    dataset = TensorDataset(torch.arange(size))
    for num_replicas, padding in itertools.product((1, 2, 3, 4), (False, True)):
        ours = loaders(dataset, 12, num_replicas, shuffle=shuffle, padding=padding)
        alone = loaders(dataset, 12, 1, shuffle=shuffle)[0]
        for _ in range(2):  # epochs, which nobody sets
            rows = itertools.zip_longest(*ours, fillvalue=[torch.empty(0)])
            whole = [sorted(torch.cat([batch[0] for batch in row]).tolist()) for row in rows]
            expected = [sorted(batch[0].tolist()) for batch in alone]
            if padding:  # the last may have some twice
                assert whole[:-1] == expected[:-1]
                assert set(whole[-1]) >= set(expected[-1])
            else:
                assert whole == expected


def test_batches_that_replicas_cannot_share_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"batch_size 50 .* 4 replicas can't share it evenly: use 48 or 52"):
        divide_batch(50, 4)
    with pytest.raises(ValueError, match="use 4"):
        divide_batch(3, 4)
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match="batch_size must be a number of samples"):
            divide_batch(wrong, 2)


class Counting(IterableDataset):
    def __init__(self, stop):
        self.stop = stop

    def __iter__(self):
        return iter(range(self.stop))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_batches_of_what_can_only_be_iterated_are_divided_so_that_each_sample_counts_once(num_replicas, workers):
    batches = []
    for replica in range(num_replicas):
        loader = make_iterable_loader(
            Counting(20), 6, num_replicas, replica, False, {"num_workers": workers, "collate_fn": list}
        )
        batches.append([(loader.own, loader.total, batch) for batch in loader])
    for together in zip(*batches, strict=True):  # all replicas have as many batches
        assert sum(own for own, _, _ in together) == together[0][1]
    of_each = [[sample for own, _, batch in mine for sample in batch[:own]] for mine in batches]
    assert sorted(sample for mine in of_each for sample in mine) == list(range(20))
    assert [total for _, total, _ in batches[0]] == [6, 6, 6, 2]
    if num_replicas == 3:
        assert batches[0][-1] == (0, 2, [18])  # it takes part with a sample that does not count
    short = make_iterable_loader(Counting(20), 6, num_replicas, 0, True, {"collate_fn": list})
    assert len(list(short)) == 3


def test_what_can_only_be_iterated_is_divided_by_a_strategy_in_the_batches_of_all_replicas():
    strategy = strategies.SingleDeviceStrategy("cpu")
    divided = strategy.distribute(DataLoader(Counting(10), 4, num_workers=1, collate_fn=list))
    assert strategy.distribute(divided) is divided
    assert list(divided) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert divided.num_workers == 1
    assert [len(batch) for batch in strategy.loader(Counting(10), 4)] == [4, 4, 2]


def test_a_loader_is_divided_with_its_options_or_refused():
    strategy = strategies.SingleDeviceStrategy("cpu")
    data = make_data(96)
    divided = strategy.distribute(DataLoader(data, 5, shuffle=True, drop_last=True, collate_fn=list))
    assert (divided.batch_size, divided.drop_last, divided.collate_fn) == (5, True, list)
    assert divided.sampler.shuffle
    assert strategy.distribute(divided) is divided
    assert strategy.experimental_distribute_dataset(DataLoader(data, 4)).sampler.shuffle is False
    weighted = DataLoader(data, 5, sampler=WeightedRandomSampler([1.0] * 96, 96))
    for loader, error, words in [
        (DataLoader(data, None), ValueError, "without batch_size"),
        (weighted, ValueError, "the loader's sampler, a WeightedRandomSampler,"),
    ]:
        with pytest.raises(error, match=words):
            strategy.distribute(loader)
    for sampler in (
        RandomSampler(data, replacement=True),
        RandomSampler(data, num_samples=5),
        SequentialSampler(range(9)),
    ):
        with pytest.raises(ValueError, match=r"the loader's sampler, a \w+Sampler, cannot be divided among replicas"):
            strategy.distribute(DataLoader(data, 5, sampler=sampler))
    other = DataLoader(data, 5, sampler=DistributedSampler(data, 3, 1))
    with pytest.raises(ValueError, match="sampler gives part 1 of 3, and this is replica 0 of 1"):
        strategy.distribute(other)
    with pytest.raises(TypeError, match=r"got a DataLoader: use strategy.distribute\(loader\)"):
        strategy.loader(DataLoader(data, 5), 4)
    with pytest.raises(TypeError, match="sampler: the strategy divides the batch itself"):
        strategy.loader(data, 4, sampler=range(3))


# -- optimizers, names, places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta"])
def test_an_optimizer_made_again_steps_as_the_first(kind):
    model, other = make_model(), make_model()
    other.load_state_dict(model.state_dict())
    options = {"lr": 0.03, "weight_decay": 0.1} if kind != "Rprop" else {"lr": 0.03}
    bias = {"params": [model[4].bias], "lr": 0.5}
    first = getattr(torch.optim, kind)([{"params": list(model[:3].parameters())}, bias], **options)
    again = Recipe.of("Test", model, first).make(dict(other.named_parameters()))
    assert type(again) is type(first)
    for one, optimizer in ((model, first), (other, again)):
        one(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    assert_equal(list(other.parameters()), list(model.parameters()))


def test_an_optimizer_that_cannot_be_made_again_is_refused_with_the_reason():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="a scheduler uses the SGD"):
        Recipe.of("Test", model, optimizer)
    with pytest.raises(ValueError, match=r"holds a tensor of shape .* that is not a parameter of Linear"):
        Recipe.of("Test", nn.Linear(2, 2), torch.optim.SGD(model.parameters()))
    stepped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 6)).sum().backward()
    stepped.step()
    with pytest.raises(ValueError, match="has made steps already"):
        Recipe.of("Test", model, stepped)


def test_a_step_before_setup_without_a_loss_or_of_two_models_is_refused():
    strategy = strategies.SingleDeviceStrategy("cpu")
    with pytest.raises(ValueError, match="has no model yet: call setup first"):
        strategy.step(torch.ones(1), torch.ones(1))
    model = make_model()
    strategy.setup(model, optimizer_of(model))
    with pytest.raises(ValueError, match="a step needs a loss"):
        strategy.step(torch.ones(1, 6), torch.ones(1, 1))
    with pytest.raises(ValueError, match="pass loss_fn or loss_of, not both"):
        strategy.setup(model, optimizer_of(model), F.mse_loss, loss_of=lambda model, batch: model(batch).sum())
    strategy.setup(model, optimizer_of(model), F.mse_loss)
    with pytest.raises(ValueError, match="was set up several times"):
        strategy.step(torch.ones(1, 6), torch.ones(1, 1))
    for precision, words in (("16-mixed", "is for GPUs"), ("fp16", "must be one of 32-true, bf16-mixed")):
        with pytest.raises(ValueError, match=words):
            strategy.setup(model, optimizer_of(model), precision=precision)


def test_bfloat16_is_used_in_the_forward_alone():
    strategy = strategies.SingleDeviceStrategy("cpu")
    seen = []
    model = nn.Linear(6, 1)
    model.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    strategy.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, precision="bf16-mixed")
    strategy.step(torch.ones(2, 6), torch.ones(2, 1))
    assert seen == [torch.bfloat16]
    assert model.weight.dtype == torch.float32


@on_ranks(2)
def test_several_batches_to_an_update_are_one_large_batch(rank):
    results = []
    for shares in ([1.0], [0.5, 0.5]):
        strategy = strategies.MirroredStrategy()
        torch.manual_seed(0)
        model = make_model()
        strategy.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        inputs, targets = make_data(96)[rank * 8 : rank * 8 + 8]
        parts = zip(inputs.chunk(len(shares)), targets.chunk(len(shares)), strict=True)
        for number, batch in enumerate(parts, start=1):
            strategy.compute_gradients(batch, share=shares[0], is_last=number == len(shares))
        strategy.update()
        results.append(copy_parameters(model))
    torch.testing.assert_close(*results)


MANY = 10**9


@pytest.mark.parametrize(
    ("now", "name", "options", "words"),
    [
        (JobDescription(1, 1, 1, False), "single_device", {}, "there is one device"),
        (JobDescription(1, 1, 8, True), "single_device", {}, "one rank was launched"),
        (JobDescription(1, 1, 8, True, may_grow=True), "multi_worker_mirrored", {}, "one rank, and others may join"),
        (JobDescription(2, 2, 8, True, may_grow=True), "multi_worker_mirrored", {}, "2 ranks, and others may join"),
        (
            JobDescription(1, 1, 1, True, MANY, 3 * MANY, may_grow=True),
            "sharded",
            {},
            "one rank, and others may join; train",
        ),
        (JobDescription(1, 1, 4, False), "mirrored", {}, "4 ranks on one host; a copy of the model fits"),
        (JobDescription(4, 4, 8, True, MANY, 8 * MANY), "mirrored", {}, "4 ranks on one host"),
        (JobDescription(8, 4, 4, True, MANY, 8 * MANY), "multi_worker_mirrored", {}, "8 ranks, 4 of them on this host"),
        (
            JobDescription(4, 4, 4, True, MANY, 3 * MANY),
            "sharded",
            {},
            "takes 4.0 GB, and a rank has 3.0 GB: all fits but",
        ),
        (JobDescription(4, 4, 4, True, 2 * MANY, 3 * MANY), "sharded", {"shard": "model"}, "do not fit"),
    ],
)
def test_auto_takes_what_fits_and_says_why(now, name, options, words):
    choice = decide_strategy(now)
    assert (choice.name, choice.options) == (name, options)
    assert words in choice.reason
    assert choice.name in STRATEGIES


def test_wrong_names_numbers_and_devices_are_refused():
    for call, words in [
        (lambda: strategies.get("ddp"), "no strategy 'ddp'; you may mean 'mirrored': it is 'auto' or one of 'single_d"),
        (lambda: strategies.get("miror"), "no strategy 'miror'; you may mean 'mirrored'"),
        (lambda: strategies.get("MirroredStrategy"), "no strategy 'MirroredStrategy'; you may mean 'mirrored'"),
        (lambda: strategies.get("tf.distribute.MultiWorkerMirroredStrategy"), "may mean 'multi_worker_mirrored'"),
        (lambda: strategies.get("Diloco"), "you may mean 'diloco'"),
        (lambda: strategies.get("fsdp"), "you may mean 'sharded' with shard='model'"),
        (lambda: strategies.MirroredStrategy(0), "devices must be 1 or more, got 0"),
        (lambda: strategies.MirroredStrategy(["cpu:0", "oven"]), "devices=.*oven"),
        (lambda: strategies.MirroredStrategy([]), "must name one or more devices of the same type"),
        (
            lambda: strategies.MirroredStrategy(["cpu", "meta"]),
            "device 'meta': strategies train on 'cpu' and on 'cuda'",
        ),
        (lambda: strategies.MirroredStrategy(["cpu", "cuda:99"]), "device 'cuda:99' does not exist: this host has"),
        (
            lambda: strategies.PipelineStrategy(devices=["/gpu:0"]),
            "device '/gpu:0': PyTorch's name of a GPU is 'cuda:0'",
        ),
        (lambda: strategies.OneDeviceStrategy("cuda:99"), "SingleDeviceStrategy: device 'cuda:99' does not exist"),
        (lambda: strategies.ShardedStrategy("all"), "shard must be 'optimizer' or 'model'"),
        (lambda: strategies.ParameterServerStrategy(0), "num_servers must be 1 or more, got 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match=r"MirroredStrategy has no option 'num_gpus'.*: it has 'devices', 'launch'"):
        strategies.get("mirrored", num_gpus=2)
    with pytest.raises(TypeError, match=r"no option 'device'; you may mean 'devices'"):
        strategies.get("multi_worker_mirrored", device=2)
    with pytest.raises(TypeError, match=r"devices must be a number, or a list of names such as .* got 'cpu'"):
        strategies.MirroredStrategy("cpu")
    with pytest.raises(RuntimeError, match=r"2 ranks were requested, but a .* cannot be restarted"):
        strategies.MirroredStrategy(2)


@on_ranks(2)
def test_what_does_not_go_with_the_ranks_that_were_launched_is_refused(rank):
    with pytest.raises(ValueError, match="3 devices were requested, but the launcher has started 2 ranks"):
        strategies.MirroredStrategy(3)
    with pytest.raises(ValueError, match=f"this is rank {rank} of 2: start the script with `python`"):
        strategies.SingleDeviceStrategy()
    with pytest.raises(ValueError, match="2 ranks do not divide into data=3 pipelines"):
        strategies.PipelineStrategy(data=3)
    with pytest.raises(ValueError, match="3 devices were requested, but the launcher has started 2 ranks"):
        strategies.PipelineStrategy(devices=["cpu"] * 3)
    pipeline = strategies.PipelineStrategy()
    with pytest.raises(ValueError, match="loss_of calls the whole model, but each rank has only a part of it"):
        pipeline.setup(make_model(), torch.optim.SGD, loss_of=lambda model, batch: model(batch).sum())


def test_a_program_is_started_again_as_it_was_started(tmp_path):
    class Main:
        __spec__ = None
        __file__ = str(tmp_path / "train.py")

    assert ScriptCommand.of(["python", "train.py"], [""], Main) == "a notebook or an interactive session"
    assert ScriptCommand.of(["python", "-c", "..."], ["-c"], Main) == "a program given with `python -c`"
    assert ScriptCommand.of(["python", "-"], ["-", "--lr"], Main) == "a program read from standard input"
    (tmp_path / "train.py").touch()
    words = ScriptCommand.of(["python", "-X", "dev", "train.py", "--lr", "1"], ["train.py", "--lr", "1"], Main)
    assert words == ScriptCommand((Main.__file__, "--lr", "1"))
    spec = type("Spec", (), {"name": "pkg.train.__main__"})
    module = type("Main", (), {"__spec__": spec, "__file__": Main.__file__})
    words = ScriptCommand.of(["python", "-m", "pkg.train", "x"], [Main.__file__, "x"], module)
    assert words == ScriptCommand(("-m", "pkg.train", "x"))


@pytest.mark.slow
def test_a_second_strategy_with_other_devices_is_refused_with_what_there_is():
    """It was told that a launcher had started one rank, where the script's first strategy was this one rank."""
    script = """
from phalanx import strategies
assert strategies.get("mirrored", devices=1).num_replicas_in_sync == 1
strategies.get("mirrored", devices=2)
"""
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=600)
    assert "this process is already a job of one rank, perhaps because of an earlier strategy" in done.stderr, (
        done.stderr
    )


@pytest.mark.slow
def test_the_ranks_of_a_restarted_script_have_pythons_options(tmp_path):
    """`python -O train.py` ran its asserts in the ranks."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom phalanx import strategies\nstrategies.get('mirrored', devices=2)\n"
        "print('optimize', sys.flags.optimize)\n"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-O", script], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert {line.partition("] ")[2] for line in done.stdout.splitlines()} == {"optimize 1"}


def test_who_was_launched_is_not_launched_again():
    assert not is_launched({})
    assert is_launched({"RANK": "0", "WORLD_SIZE": "1"})
    assert is_launched({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    assert find_world({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}) == (4, 2)
    assert find_world({"WORLD_SIZE": "4"}) == (4, 4)
    assert find_world({}) == (1, 1)


def test_a_loader_with_an_iterator_of_its_own_is_refused():
    """It was replaced by a plain DataLoader, and its own code never ran."""

    class Halved(DataLoader):
        def __iter__(self):
            return (batch / 2 for batch in super().__iter__())

    with (
        strategies.get("single_device") as strategy,
        pytest.raises(ValueError, match="a Halved defines its own iterator"),
    ):
        strategy.distribute(Halved(torch.ones(4, 1), batch_size=2))


def test_numbers_are_reduced_without_rounding_them_to_float32():
    with strategies.get("single_device") as strategy:
        assert strategy.reduce("sum", 16777217.0) == 16777217.0
        assert strategy.reduce("mean", 100000001) == 100000001
        assert strategy.reduce("mean", torch.tensor([1, 2])).dtype == torch.float32


@on_ranks(2)
def test_buffers_that_each_rank_keeps_stay_its_own_in_an_evaluation(rank):
    """A validation made them rank 0's, with broadcast_buffers=False and for buffers that the wrapper ignores."""
    for options, name in (({"broadcast_buffers": False}, "own"), ({}, "ignored")):
        model = nn.Linear(2, 1)
        model.register_buffer(name, torch.full((1,), float(rank)))
        if name == "ignored":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
        strategy = strategies.get("mirrored", **options)
        strategy.setup(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), F.mse_loss)
        strategy.sync_buffers()
        assert model.get_buffer(name).item() == rank


def test_an_error_inside_a_strategy_that_averages_is_raised_at_once():
    """The rank ran averaging rounds until the others had finished, and raised only then."""

    def train(rank, world_size):
        with strategies.get("local_sgd", sync_every=2) as strategy:
            model = nn.Linear(2, 1)
            strategy.setup(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), F.mse_loss)
            if rank == 1:
                raise ArithmeticError("the data is wrong")
            for _ in range(2):
                strategy.step(torch.ones(2, 2), torch.ones(2, 1))

    with pytest.raises(RankFailed) as caught:
        run_ranks(train, 2)
    assert "ArithmeticError: the data is wrong" in str(caught.value)
    assert "PeerLostError" in str(caught.value)
