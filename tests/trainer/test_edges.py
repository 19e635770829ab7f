"""What people give a Trainer at the edges of what it is for: the expected result, or an error that says what to do."""

import itertools
import os

import pytest
import torch
from tests.small_models import make_data
from tests.trainer.trainers import WithSteps, make, make_model, weights
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import phalanx
import phalanx.checkpoint.series
from phalanx import strategies
from phalanx.testing import run_ranks
from phalanx.trainer import Callback, EarlyStopping, LambdaCallback, SummedMetric
from phalanx.trainer.arguments import returns_nothing


class Ones(Dataset):
    """Samples as `make` makes them of ones."""

    def __init__(self, make, size=10):
        self.make, self.size = make, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError
        return self.make(torch.ones(6) * index)


class Divided(IterableDataset):
    """As one of Hugging Face, whose ranks have parts."""

    def __init__(self):
        self._distributed = (0, 2)

    def __iter__(self):
        return iter([(torch.ones(6), torch.ones(1))] * 10)


def load(data=None, batch=8, **options):
    return DataLoader(make_data(32) if data is None else data, batch, **options)


def without_loss(model):
    return phalanx.Trainer(
        model, lambda p: torch.optim.SGD(p, 0.01), strategy=strategies.SingleDeviceStrategy("cpu"), show_progress=False
    )


def trainer_of(loss):
    return phalanx.Trainer(
        nn.Linear(6, 1),
        lambda p: torch.optim.SGD(p, 0.01),
        loss,
        strategy=strategies.SingleDeviceStrategy("cpu"),
        show_progress=False,
    )


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (
            lambda result, y: F.mse_loss(result, y, reduction="none"),
            ValueError,
            r"loss has shape \(8, 1\): it must be one",
        ),
        (lambda result, y: 1.0, TypeError, "the loss is a float: it must be a tensor"),
        (lambda result, y: None, TypeError, "the loss is a NoneType"),
        (lambda result, y: F.mse_loss(result, y).detach(), ValueError, "depends on no trained parameter"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_an_error_that_says_why(loss, error, words):
    """ "grad can be implicitly created only for scalar outputs", or "'float' object is not iterable"."""
    with pytest.raises(error, match=words):
        trainer_of(loss).fit(load())


def test_a_loss_of_one_element_and_one_that_is_not_a_number_train_on():
    one = trainer_of(lambda result, y: F.mse_loss(result, y).reshape(1))
    one.fit(load(), load())
    assert one.step == 4
    nan = trainer_of(lambda result, y: F.mse_loss(result, y) * float("nan"))
    nan.callbacks.append(EarlyStopping(patience=2))
    nan.max_epochs = 9
    nan.fit(load(), load())
    assert nan.epoch == 2
    assert nan.metrics["loss"] != nan.metrics["loss"]


@pytest.mark.parametrize(
    "batch", [lambda x: {"x": x, "y": x[:1]}, lambda x: x, lambda x: (x,)], ids=["dict", "tensor", "1"]
)
def test_a_batch_that_is_no_inputs_and_target_needs_steps_of_the_model(batch):
    """The rows of a tensor were taken for the model's arguments, and so were the keys of a dict."""
    with pytest.raises(TypeError, match=r"give the model a training_step\(batch\), and no loss"):
        make(nn.Linear(6, 1)).fit(load(Ones(batch)))

    class Own(nn.Linear):
        def training_step(self, batch):
            x = batch if isinstance(batch, torch.Tensor) else batch["x"] if isinstance(batch, dict) else batch[0]
            return {"loss": self(x).square().mean()}  # as Lightning has it

        def validation_step(self, batch):
            return {"loss": self.training_step(batch)["loss"]}

    trainer = without_loss(Own(6, 1))
    trainer.fit(load(Ones(batch), 4), load(Ones(batch), 3))
    assert trainer.step == 3
    assert trainer.metrics["loss"] >= 0


def test_several_inputs_and_results_that_are_dicts_are_as_in_any_loop():
    class Sum(nn.Linear):
        def forward(self, a, b):
            return {"y": super().forward(a + b)}

    x = torch.randn(10, 6)
    trainer = phalanx.Trainer(
        Sum(6, 1),
        lambda p: torch.optim.SGD(p, 0.01),
        lambda result, y: F.mse_loss(result["y"], y),
        metrics={"error": lambda result, y: (result["y"] - y).abs(), "number": lambda result, y: 3},
        strategy="single_device",
        show_progress=False,
    )
    data = TensorDataset(x, x, x[:, :1])
    trainer.fit(load(data, 4), load(data, 3))
    assert list(trainer.metrics) == ["loss", "error", "number"]
    assert trainer.metrics["number"] == 3


@pytest.mark.parametrize(
    ("loader", "error", "words"),
    [
        (
            lambda: [(torch.ones(2, 6), torch.ones(2, 1))],
            TypeError,
            "must be a torch.utils.data.DataLoader, a dict of them, or a function .* got a list",
        ),
        (lambda: load(make_data(0)), ValueError, "has no batch: 0 samples for 1 replicas, in batches of 8 on each"),
        (lambda: load(make_data(5), drop_last=True), ValueError, "has no batch: 5 samples .* the last is dropped"),
        (lambda: load(Divided()), TypeError, "split_dataset_by_node has given each rank its part already"),
        (lambda: load(sampler=WeightedRandomSampler([1.0] * 32, 32)), ValueError, "a WeightedRandomSampler, cannot be"),
    ],
    ids=["a list", "empty", "less than a batch", "divided", "a sampler"],
)
def test_a_loader_that_gives_nothing_or_cannot_be_divided_is_refused_before_the_first_step(loader, error, words):
    """An empty one trained on nothing without a word, and validated nothing behind the first epoch, with an error."""
    trainer = make()
    with pytest.raises(error, match=words):
        trainer.fit(loader())
    with pytest.raises(error, match=words):
        trainer.fit(load(), loader())
    assert trainer.step == 0


def test_what_makes_no_sense_is_said_before_anything_is_done():
    """save_every=0 divided by zero behind the first step, max_steps=0 trained nothing without a word, and the rest came
    as an AttributeError from inside."""
    strategy = strategies.SingleDeviceStrategy("cpu")
    make(strategy=strategy)
    for options, words in (
        ({"max_steps": 0}, "max_steps must be 1 or more, got 0"),
        ({"save_every": 0, "checkpoint": "x"}, "save_every must be 1 or more updates, .*, got 0"),
        ({"metrics": [abs]}, "metrics must be a dict of functions by name, got a list"),
        ({"metrics": {"loss": abs}}, "'loss' is the loss itself, which is always measured"),
        ({"callbacks": [print]}, "callbacks must be phalanx.trainer.Callback objects"),
        ({"seed": "a"}, "seed must be an int"),
        ({"scheduler": "cosine"}, "scheduler must be an LRScheduler, or a function that makes one, got 'cosine'"),
        ({"strategy": strategy}, "has a model already: each Trainer needs one of its own"),
        ({"precision": "16-mixed"}, "is for GPUs"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**options)
    with pytest.raises(ValueError, match="loss must be a function of the model's result and the target, got 'mse'"):
        trainer_of("mse")
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        make(nn.ReLU())


def test_a_step_that_wants_a_batch_idx_and_a_metric_that_fails_are_named():
    """They ended inside of the first step, or validation, with a TypeError of somebody's."""

    class Lightnings(WithSteps):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch)

    with pytest.raises(ValueError, match="training_step must take the batch alone, no batch_idx"):
        without_loss(Lightnings())
    Lightnings.training_step = lambda self, batch, batch_idx=0: WithSteps.training_step(self, batch)
    without_loss(Lightnings()).fit(load())
    with pytest.raises(RuntimeError, match="metric 'recall' fails: ZeroDivisionError: division by zero"):
        make(metrics={"recall": lambda result, target: 1 / 0}).fit(load(), load())


def test_who_watches_a_validation_needs_one():
    """ReduceLROnPlateau and EarlyStopping reported it after the first epoch."""
    with pytest.raises(ValueError, match="ReduceLROnPlateau steps by the validation's loss: pass a val_loader"):
        make(scheduler=lr_scheduler.ReduceLROnPlateau).fit(load())
    with pytest.raises(ValueError, match="EarlyStopping watches 'loss' of the validation: give fit a val_loader"):
        make(callbacks=[EarlyStopping(), Fails()]).fit(load())


def test_a_second_fit_goes_on_where_the_first_has_ended(tmp_path):
    """It began at epoch 0 again, unless there was a checkpoint."""
    for options in ({}, {"checkpoint": tmp_path}):
        trainer = make(max_epochs=2, **options)
        trainer.fit(load(), load())
        trainer.fit(load(), load())
        assert (trainer.epoch, trainer.step) == (2, 8)
        trainer.max_epochs = 3
        trainer.fit(load(), load())
        assert (trainer.epoch, trainer.step) == (3, 12)
    whole = make(max_epochs=3)
    whole.fit(load(), load())
    assert torch.equal(weights(trainer), weights(whole))
    inside = make(max_epochs=3, max_steps=6)
    inside.fit(load())
    inside.max_steps = None
    inside.fit(load())
    assert (inside.epoch, inside.step) == (3, 12)
    assert torch.equal(weights(inside), weights(whole))
    other = make(max_steps=2)
    other.fit(load())
    other.max_steps = None
    other.fit(load(make_data(16)))  # other data: from its begin
    assert other.step == 4


def test_two_trainers_side_by_side_do_not_know_of_each_other():
    alone = make(max_epochs=2)
    alone.fit(load())
    first, second = make(max_epochs=2), make(make_model(), max_epochs=2)
    inner = LambdaCallback(on_epoch_begin=lambda _: second.step or second.fit(load()))
    first.callbacks.append(inner)
    first.fit(load())
    assert torch.equal(weights(first), weights(alone))
    assert torch.equal(weights(second), weights(alone))


def test_a_finished_run_that_is_started_again_knows_what_it_had_measured(tmp_path):
    """Its metrics were empty, or measured once more, callbacks and TensorBoard included."""
    for options in ({}, {"save_every": 4}, {"max_steps": 6}):
        calls = []
        trainers = []
        for _ in range(2):
            callback = LambdaCallback(on_epoch_end=lambda trainer, calls=calls: calls.append(trainer.step))
            folder = tmp_path / "-".join(options)
            trainers.append(make(max_epochs=2, checkpoint=folder, callbacks=[callback], **options))
            trainers[-1].fit(load(), load())
        assert trainers[0].metrics == trainers[1].metrics
        assert calls == ([4] if "max_steps" in options else [4, 8])
        assert (trainers[1].epoch, trainers[1].step) == (trainers[0].epoch, trainers[0].step)


class Count(LambdaCallback):
    """Any callback with a state."""

    def __init__(self):
        super().__init__(on_step_end=lambda trainer, loss: vars(self).update(steps=self.steps + 1))
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


def test_a_run_goes_on_with_other_callbacks_than_it_had(tmp_path, caplog):
    """Their states were told apart by their places: one that was put in front got another's."""
    make(checkpoint=tmp_path, callbacks=[Count()]).fit(load(), load())
    count, stopping = Count(), EarlyStopping(patience=9)
    make(checkpoint=tmp_path, max_epochs=2, callbacks=[stopping, count]).fit(load(), load())
    assert count.steps == 8
    assert "no state was loaded for EarlyStopping 0, which only one of" in caplog.text


REGRESSION = {  # R2 of the whole, and a root, which are no means of batches
    "r2": SummedMetric(
        lambda result, y: torch.stack(
            [torch.tensor(float(len(y))), y.sum(), y.square().sum(), (result - y).square().sum()]
        ),
        lambda sums: 1 - sums[3] / (sums[2] - sums[1] ** 2 / sums[0]),
    ),
    "root": SummedMetric(
        lambda result, y: torch.tensor([(result - y).square().sum(), len(y)]), lambda sums: (sums[0] / sums[1]).sqrt()
    ),
    "error": lambda result, y: (result - y).abs(),
}


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_metrics_are_those_of_one_process_under_every_strategy(world_size):
    """There was nothing for a metric that is no mean."""
    words = [("mirrored", {}), ("sharded", {}), ("local_sgd", {})]
    words += [("sharded", {"shard": "model"}), ("pipeline", {"micro_batches": 4})] if world_size > 1 else []
    sizes = (1, 3, 29)

    def measure(rank, world_size):
        found = []
        for (word, options), size in itertools.product(words, sizes):
            torch.manual_seed(1)
            layers = [
                nn.Linear(6, 5),
                nn.ReLU(),
                nn.Linear(5, 5),
                nn.ReLU(),
                nn.Linear(5, 5),
                nn.ReLU(),
                nn.Linear(5, 1),
            ]
            model = nn.Sequential(*layers)
            data = make_data(size)
            with torch.no_grad():
                off = (model(data.tensors[0]) - data.tensors[1]).double()
            y = data.tensors[1].double()
            spread = (y - y.mean()).square().sum()
            expected = {
                "loss": off.square().mean().item(),
                "r2": (1 - off.square().sum() / spread).item() if size > 1 else None,
                "root": off.square().mean().sqrt().item(),
                "error": off.abs().mean().item(),
            }
            metrics = REGRESSION if size > 1 else {name: one for name, one in REGRESSION.items() if name != "r2"}
            trainer = make(model, strategy=strategies.get(word, **options), metrics=metrics)
            trainer.model.train()
            got = trainer.validate(DataLoader(data, 2 * world_size))
            assert trainer.model.training  # a pipeline is not among its own modules, whose modes are put back
            trainer.strategy.close()
            found.append((word, size, got, {name: one for name, one in expected.items() if one is not None}))
        return found

    for rank in run_ranks(measure, world_size):
        for word, size, got, expected in rank:
            assert got == pytest.approx(expected, rel=1e-4), (word, size)


def test_a_validation_step_that_returns_no_dict_is_refused():
    class Wrong(WithSteps):
        def validation_step(self, batch):
            return torch.ones(1)

    with pytest.raises(TypeError, match="validation_step must return a dict of metrics by name, got a Tensor"):
        without_loss(Wrong()).fit(load(), load())


# --- what is known before the first step ------------------------------------------------------------------------------


class LikeLightning(nn.Linear):
    """Its validation_step gives its metrics to self.log, and returns nothing: a TypeError after the first epoch."""

    def training_step(self, batch, batch_idx=0):
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx=0):
        self.latest = self(batch[0])


def cpu():
    return strategies.SingleDeviceStrategy("cpu")


class Fails(Callback):
    def on_step_end(self, trainer, loss):
        raise AssertionError("a step was made")


def test_what_makes_no_sense_is_refused_before_the_first_step(tmp_path):
    model = LikeLightning(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"validation_step returns nothing: it must return a dict of metrics"):
        phalanx.Trainer(model, optimizer)
    with pytest.raises(ValueError, match=r"optimizer must be a torch.optim.Optimizer, or a function .*, got None"):
        phalanx.Trainer(model, None, F.mse_loss)
    data = DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4, 1)), 2)
    keep_best = {"checkpoint": tmp_path / "a", "keep_best": ("accuracy", "max", 1)}
    for options in (keep_best, {"callbacks": [Fails(), EarlyStopping("accuracy")]}):
        trainer = phalanx.Trainer(model, optimizer, F.mse_loss, **{"callbacks": Fails(), "strategy": cpu()} | options)
        with pytest.raises(ValueError, match=r"'accuracy' is not a metric of the validation: \['loss'\]"):
            trainer.fit(data, data)
    trainer = phalanx.Trainer(model, optimizer, F.mse_loss, strategy=cpu(), callbacks=EarlyStopping("accuracy"))
    with pytest.raises(ValueError, match=r"'accuracy' is not a metric of the validation: \['a/loss', 'b/loss'\]"):
        trainer.fit(data, {"a": data, "b": data})


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_place_that_cannot_be_written_to_is_refused_before_the_first_step_also_in_a_dry_run(tmp_path, dry_run):
    (tmp_path / "file").touch()
    model = make_model()
    for place in (tmp_path / "file" / "a", tmp_path / "file"):
        options = {"checkpoint": place, "dry_run": dry_run, "callbacks": Fails(), "strategy": cpu()}
        trainer = phalanx.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, **options)
        with pytest.raises(ValueError, match=r"checkpoint=.*file.* (is a file|can't be created|can't be written to)"):
            trainer.fit(DataLoader(make_data(), 16))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("function", "nothing"),
    [
        (lambda: None, True),
        (lambda: 0, False),
        (lambda x: x, False),
        (lambda x: None if x else 1, False),
        (len, False),
        (None, False),
    ],
)
def test_only_code_that_can_return_nothing_but_none_returns_nothing(function, nothing):
    assert returns_nothing(function) is nothing


class Merging(nn.Linear):
    """A layer like loralib's merges or splits its weights in `train`, which also sets the flag."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_a_validation_gives_every_module_its_mode_back():
    """A frozen BatchNorm trained after the first validation, or a class with its own `train` did not know of it."""
    model = nn.Sequential(Merging(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    trainer = make(model)
    model.train()
    model[1].eval()
    trainer.validate(load())
    assert [one.training for one in model.modules()] == [True, True, False, True]
    assert not model[0].merged
