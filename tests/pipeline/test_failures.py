"""A failure in a pipeline is reported on every rank, with stage, micro-batch and layer."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch import nn
from torch.nn import functional

import phalanx
from phalanx.errors import summary_of
from phalanx.pipeline.schedule import SCHEDULES
from phalanx.testing import run_ranks


class Watcher(nn.Module):
    """Does something odd with the micro-batch whose first number is above a half."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        if x[0, 0] < 0.5:
            return x if self.what != "object" else Strange(x)
        if self.what == "raise":
            raise ArithmeticError("seven is not a prime here")
        if self.what == "raise the silent":
            raise Silent
        if self.what == "shape":
            return x[:, :2]
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Silent(ValueError):
    def __str__(self):
        raise LookupError("no text here")


class Strange:
    def __init__(self, x):
        self.x = x


class Unwrap(nn.Module):
    def forward(self, strange):
        return strange.x if isinstance(strange, Strange) else strange


def _model(what, at):
    layers = [nn.Identity(), nn.Identity(), nn.Identity(), Unwrap()]
    layers[at] = Watcher(what)
    layers[0] = layers[0] if at == 0 else nn.Linear(3, 3, bias=False)
    if at:
        nn.init.eye_(layers[0].weight)
    return nn.Sequential(*layers, nn.Linear(3, 3))


def _fail(rank, world_size, what, at, schedule):
    """In the micro-batch 2 of 4; the message of whatever is raised."""
    pipe = phalanx.Pipeline(
        _model(what, at), micro_batches=4, schedule=schedule, balance=[2, 1, 2], loss_fn=functional.mse_loss
    )
    x = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat_interleave(2)[:, None].expand(8, 3).contiguous()
    try:
        pipe.step(x, target=x)
    except Exception as error:
        text = summary_of(error)
        try:
            pipe.step(x, target=x)
        except phalanx.ClosedError as again:
            return text, str(again)
    return None


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_an_exception_in_a_layer_is_reported_on_every_rank(backend):
    texts = run_ranks(_fail, 3, "raise", 2, "1f1b", backend=backend)
    where = "Pipeline: stage 1 (rank 1), micro-batch 2, forward in layer '2'"
    for rank, (text, again) in enumerate(texts):
        assert where in text
        assert "seven is not a prime here" in text
        assert text.startswith("ArithmeticError" if rank == 1 else "StageFailedError: Pipeline: stage")
        assert "an earlier step failed" in again
    assert "xx" in texts[1][0].splitlines()[-2], "the cell is marked in the drawing"
    assert "F2" not in texts[1][0].splitlines()[-2]


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_an_exception_without_a_readable_text_is_reported_on_every_rank(backend):
    """The others were not notified of the failure, and waited for the timeout."""
    texts = run_ranks(_fail, 3, "raise the silent", 2, "1f1b", backend=backend)
    for rank, (text, again) in enumerate(texts):
        assert text.startswith("Silent" if rank == 1 else "StageFailedError: Pipeline: stage")
        assert "(no message: __str__ raised builtins.LookupError)" in text
        assert "an earlier step failed" in again


def _fail_in_all(rank, world_size):
    """In every schedule, one pipeline of the same group after the other."""
    texts = {}
    for schedule in SCHEDULES:
        for what in ("raise", "shape", "object"):
            balance = [1, 1, 1, 2] if schedule == "interleaved" else [2, 3]
            pipe = phalanx.Pipeline(
                _model(what, 1), micro_batches=4, schedule=schedule, balance=balance, loss_fn=functional.mse_loss
            )
            x = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat_interleave(2)[:, None].expand(8, 3).contiguous()
            with pytest.raises((ArithmeticError, ValueError, TypeError, phalanx.PhalanxError)) as caught:
                pipe.step(x, target=x)
            texts[schedule, what] = str(caught.value)
    return texts


def test_each_schedule_reports_on_every_rank_which_layer_of_which_stage_failed_and_draws_it():
    words = {
        "raise": ("seven is not a prime here", "forward in layer '1'", 2),
        "shape": ("layer '1' returns float32 of shape (N, 2) for micro-batch 2", "forward of layer", 2),
        "object": ("layer '1' returns a Strange, which is not a tensor", "forward of layer", 0),
    }
    for texts in run_ranks(_fail_in_all, 2):
        assert len(texts) == 12
        for (schedule, what), text in texts.items():
            fact, where, micro_batch = words[what]
            stage = int(schedule == "interleaved")
            assert fact in text
            assert f"stage {stage} (rank {stage}), micro-batch {micro_batch}, {where}" in text
            drawn = [line for line in text.splitlines() if line.startswith("rank ")]
            assert ["x" in line for line in drawn] == [stage == 0, stage == 1], text


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "1f1b"])
def test_a_stage_that_dies_is_reported_in_every_schedule(schedule):
    def train(rank, world_size):
        x = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat_interleave(2)[:, None].expand(8, 3).contiguous()
        balance = [1, 1, 1, 2] if schedule == "interleaved" else [2, 3]
        model = _model("die", 1 if schedule == "interleaved" else 2)
        pipe = phalanx.Pipeline(model, micro_batches=4, schedule=schedule, balance=balance, loss_fn=functional.mse_loss)
        with pytest.raises(phalanx.PeerLostError) as caught:
            pipe.step(x, target=x)
        return str(caught.value)

    text, _ = run_ranks(train, 2, lost=[1])
    assert "Pipeline: stage" in text
    assert "(rank 0), micro-batch" in text
    assert "waiting for stage" in text
    assert "rank 1 (pid" in text


def test_a_stage_that_dies_is_reported_with_the_action_that_waited_for_it():
    def train(rank, world_size):
        x = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat_interleave(2)[:, None].expand(8, 3).contiguous()
        pipe = phalanx.Pipeline(_model("die", 2), micro_batches=4, balance=[2, 1, 2], loss_fn=functional.mse_loss)
        with pytest.raises(phalanx.PhalanxError) as caught:
            pipe.step(x, target=x)
        return isinstance(caught.value, phalanx.PeerLostError), str(caught.value)

    first, _, last = run_ranks(train, 3, lost=[1])
    for rank, (lost, text) in ((0, first), (2, last)):
        assert lost, "phalanx.elastic goes by the class"
        assert f"Pipeline: stage {rank} (rank {rank}), micro-batch" in text
        assert "rank 1 (pid" in text
        assert "is gone" in text


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow(but=("_wire.share",))
@pytest.mark.parametrize("place", ["_outcome._sum", "_tied.add", "_replicas.average", "_wire.share"])
def test_other_pipelines_detect_a_rank_lost_after_its_part_of_a_step(place, tmp_path):
    """Who saw it told no replica once its own part was done: one that had no group with the lost rank, and whose peers
    lived on with their error, waited for them until the timeout, here or in the next step."""

    def train(rank, world_size):
        mesh = phalanx.mesh(pipeline=2, data=2)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        pipe = phalanx.Pipeline(model, micro_batches=4, mesh=mesh, loss_fn=functional.mse_loss)
        x, store = torch.ones(8, 3), dist.FileStore(str(tmp_path / "store"), world_size)
        if rank == 3:
            owner, _, method = place.partition(".")
            setattr(getattr(pipe, owner), method, _die)

        def steps():
            for _ in range(3):
                pipe.step(x, target=x)

        with pytest.raises(phalanx.PhalanxError) as caught:
            steps()
        store.set(str(rank), "has its error")
        store.wait([str(other) for other in range(3)], timedelta(seconds=60))
        with pytest.raises(phalanx.PhalanxError):
            pipe.step(x, target=x)
        return isinstance(caught.value, phalanx.PeerLostError), str(caught.value)

    for rank, (lost, text) in enumerate(run_ranks(train, 4, lost=[3])[:3]):
        assert lost, text
        assert "is gone" in text or (rank == 0 and "a replica has lost a rank of its pipeline" in text)


def test_wrong_arguments_are_refused_on_entry_on_every_rank():
    def build(rank, world_size):
        layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))

        class Branching(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers

            def forward(self, x):
                return self.layers(x) if x.sum() > 0 else x

        class Training(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers

            def forward(self, x):
                return functional.dropout(self.layers(x), 0.5, self.training)

        shared = nn.BatchNorm1d(2)
        wrong = {
            "module": dict(module=lambda x: x),
            "loss_fn": dict(module=layers, loss_fn=0.5),
            "loss_reduction": dict(module=layers, loss_reduction="max"),
            "few": dict(module=layers, micro_batches=1),
            "schedule": dict(module=layers, schedule="2f2b"),
            "layers": dict(module=nn.Sequential(layers)[0][:1]),
            "numbers": dict(module=layers, balance=[1, 2]),
            "names": dict(module=layers, balance=["5"]),
            "unknown": dict(module=layers, balance=["2", "3"]),
            "first": dict(module=layers, balance=["0"]),
            "mixed": dict(module=layers, balance=[1, "2"]),
            "word": dict(module=layers, balance="speed"),
            "time": dict(module=layers, balance="time"),
            "branch": dict(module=Branching()),
            "training": dict(module=Training()),
            "buffers": dict(module=nn.Sequential(shared, nn.Linear(2, 2), nn.Linear(2, 2), shared), balance=[2, 2]),
            "example": dict(module=layers, example=torch.zeros(3, 5)),
            "differs": dict(module=layers, micro_batches=4 + rank),
        }
        texts = {}
        for name, arguments in wrong.items():
            try:
                phalanx.Pipeline(**arguments)
            except Exception as error:
                texts[name] = f"{type(error).__name__}: {error}"
        pipe = phalanx.Pipeline(layers, micro_batches=2)
        return texts, len(wrong), pipe.plan.counts

    with pytest.raises(RuntimeError) as torchs:  # whose words differ by torch
        nn.Linear(2, 2)(torch.zeros(3, 5))
    expected = {
        "module": "TypeError: Pipeline: module must be an nn.Module, got function",
        "loss_fn": "TypeError: Pipeline: loss_fn must be a function, got float",
        "loss_reduction": "ValueError: Pipeline: loss_reduction must be one of 'mean', 'sum', got 'max'",
        "few": "ValueError: Pipeline: 1 micro-batch cannot keep 2 ranks busy",
        "schedule": "ValueError: schedule must be one of",
        "layers": "ValueError: Pipeline: Sequential has 1 layer to cut between (0), too few for 2 stages",
        "numbers": "ValueError: Pipeline: balance [1, 2] is not 2 numbers of at least one layer that add up to 4",
        "names": "ValueError: Sequential has no module '5' to cut at",
        "unknown": "ValueError: Pipeline: balance names 2 modules at which a stage begins (2, 3); 2 stages need 1",
        "first": "ValueError: Pipeline: the stage that begins at '0' would be empty",
        "mixed": "TypeError: Pipeline: balance takes one number of layers for each stage",
        "word": "ValueError: Pipeline: balance must be 'auto', 'time', 'memory', numbers of layers or names, got 'sp",
        "time": "ValueError: Pipeline: balance='time' runs every layer to measure it: give an example",
        "branch": "ValueError: Branching cannot be cut: torch.fx could not follow its forward",
        "training": "ValueError: Training cannot be cut: its forward depends on self.training",
        "buffers": "ValueError: Pipeline: layer '0' has buffers and is called in stages 0 and 1",
        "example": f"RuntimeError: {torchs.value}",
        "differs": "MismatchError: Pipeline: rank 1 has another model or other arguments than rank 0: micro_batches 5",
    }
    for texts, count, counts in run_ranks(build, 2):
        assert counts == [2, 2]
        for name, text in expected.items():
            assert texts[name].startswith(text), texts[name]
        assert len(texts) == count


@pytest.mark.parametrize(("word", "ours"), [("chunks", "micro_batches"), ("n_microbatches", "micro_batches")])
def test_another_librarys_word_for_an_argument_names_ours(word, ours):
    """`Pipeline(model, chunks=8)`, as of torchgpipe, ended in Python's "unexpected keyword argument"."""
    with pytest.raises(TypeError, match=f"Pipeline has no argument '{word}': use {ours}=8"):
        phalanx.Pipeline(nn.Sequential(nn.Linear(2, 2)), **{word: 8})


@pytest.mark.slow
def test_a_wrong_target_or_loss_is_reported_by_its_rank():
    def train(rank, world_size, kind):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        loss_fn = {"loss": lambda y, t: y, "rows": functional.mse_loss, "none": None}[kind]
        pipe = phalanx.Pipeline(model, micro_batches=2, loss_fn=loss_fn)
        x = torch.zeros(4, 3)
        with pytest.raises((ValueError, TypeError, phalanx.PhalanxError)) as caught:
            pipe.step(x, target=x[:3] if kind == "rows" else x)
        return str(caught.value)

    for kind, words in (
        ("loss", "loss_fn's result must be the loss, a tensor with one number, got a tensor of shape (2, 3)"),
        ("rows", "the target has 3 rows, the input 4"),
        ("none", "the model's result, without a loss_fn, must be the loss"),
    ):
        for text in run_ranks(train, 2, kind):
            assert words in text
            assert "stage 1 (rank 1), micro-batch 0" in text


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, mask=None):
        return self.b(self.a(x) if mask is None else self.a(x) * mask)


@on_ranks(2)
def test_an_argument_that_was_traced_as_its_default_is_refused_with_what_to_do():
    """torch.fx's AssertionError said that it 'has been specialized'."""
    x = torch.ones(4, 3)
    with pytest.raises((ValueError, phalanx.PhalanxError)) as caught:
        phalanx.Pipeline(Masked(), micro_batches=2, loss_fn=functional.mse_loss).step(x, mask=x, target=x)
    pipe = phalanx.Pipeline(Masked(), micro_batches=2, example=dict(x=x[:2], mask=x[:2]), loss_fn=functional.l1_loss)
    text, _ = str(caught.value), pipe.step(x, mask=x, target=x)
    assert "Masked: the argument 'mask' is fixed to its default, None, because the example" in text
    assert "dict(x=..., mask=...)" in text


class InPlace(nn.Module):
    """In one process, what is added at the end is what the relu has left."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.a(x)
        return self.c(self.b(self.relu(x))) + x


class ChangesView(nn.Module):
    """In one process, what is added at the end is a view of what the relu, two stages on, has left; or of the rest."""

    def __init__(self, begin):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.relu, self.begin = nn.ReLU(inplace=True), begin

    def forward(self, x):
        x = self.a(x)
        changed, kept = x[:, :2], x[:, self.begin :]
        y = self.b(x.clone())
        return self.c(y) + self.relu(changed).sum() + kept.sum()


@pytest.mark.slow
@on_ranks(3)
def test_a_value_whose_view_another_stage_changes_is_refused_on_every_rank():
    """It came to its stage as a copy, and stayed as it was before the change: other losses than in one process."""
    x, texts = torch.ones(8, 4), []
    for begin in (1, 2):  # the second ones have no element in common
        pipe = phalanx.Pipeline(ChangesView(begin), micro_batches=4, balance=["b", "c"])
        pipe._loss._loss_fn = lambda y: y.sum()
        try:
            pipe.step(x)
            texts.append("")
        except (ValueError, phalanx.PhalanxError) as error:
            texts.append(str(error))
    refused, fine = texts
    assert "stage 2 changes the value 'getitem' of an earlier stage in place, and 'getitem_1', which" in refused
    assert not fine


class Samples(nn.Module):
    """Returns its samples in the second dimension, or a loss."""

    def __init__(self, loss):
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(3, 3), nn.Linear(3, 3), loss

    def forward(self, x):
        y = self.b(self.a(x))
        return y.mean() if self.loss else y.t()


@on_ranks(3)
def test_a_mistake_that_would_leave_others_waiting_is_refused_on_every_rank():
    """A value that is changed in place where another stage has it from elsewhere came there unchanged; results were put
    together along a dimension that is not that of the samples; who had no part in a refusal waited; and a new Pipeline
    took messages of the one that had failed for its own."""
    x, texts = torch.ones(8, 3), []
    for model, balance, call in (
        (InPlace(), ["relu", "c"], lambda pipe: pipe.step(x, target=x)),
        (InPlace(), [1, 1, 2], lambda pipe: pipe.step(x[:0], target=x)),
        (Samples(False), None, lambda pipe: pipe(x)),
        (Samples(True), None, lambda pipe: pipe(x)),
    ):
        if balance is None:
            balance, model = [1, 1, 1], nn.Sequential(nn.Linear(3, 3), nn.Identity(), model)
        pipe = phalanx.Pipeline(model, micro_batches=4, balance=balance, outputs="all", loss_fn=functional.mse_loss)
        with pytest.raises((ValueError, TypeError, phalanx.PhalanxError)) as caught:
            call(pipe)
        texts.append(str(caught.value))
    assert "layer 'relu' changes the value 'a' of an earlier stage in place, but a later stage also uses" in texts[0]
    assert "the input has no rows" in texts[1]
    assert "the model returns a tensor of shape (3, 2) for 2 samples" in texts[2]
    assert "the model returns a tensor without dimensions" in texts[3]


class NoGradient(torch.autograd.Function):
    """Fails in the backward of the samples that begin with a one, or is interrupted there, as by Ctrl-C."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error if x[0, 0] > 0.5 else None
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.error is not None:
            raise ctx.error("no gradient today")
        return grad, None


class FailsInBackward(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.scale, self.error = nn.Parameter(torch.ones(())), error

    def forward(self, x):
        return NoGradient.apply(x * self.scale, self.error)


@pytest.mark.slow
@on_ranks(4)
def test_a_rank_that_has_completed_its_part_is_notified_of_one_that_has_failed(rank):
    """The first stage failed in its last backward: the others had the loss, went on, and waited for it elsewhere; so
    did the stages of another pipeline of the mesh, and the first ranks of an evaluation that fails behind them."""
    texts = []
    mesh = phalanx.mesh(pipeline=2, data=2)
    x = torch.tensor([0.0, 0.0, 0.0, 1.0])[:, None].expand(4, 3).contiguous()
    for error, axes, zero in ((ArithmeticError, None, 0), (ArithmeticError, mesh, 0), (KeyboardInterrupt, None, 0)):
        model = nn.Sequential(FailsInBackward(error), *(nn.Linear(3, 3) for _ in range(3)))
        pipe = phalanx.Pipeline(model, micro_batches=4, mesh=axes, loss_fn=functional.mse_loss)
        given = x * (axes is None or axes.get_local_rank("data") == zero)
        try:
            pipe.step(given, target=given)
        except BaseException as caught:
            texts.append(f"{type(caught).__name__}: {caught}")
        with pytest.raises(phalanx.ClosedError, match="an earlier step failed"):
            pipe.step(given, target=given)
    model = nn.Sequential(nn.Identity(), nn.Identity(), Watcher("raise"), nn.Identity())
    pipe = phalanx.Pipeline(model, micro_batches=4)
    with pytest.raises((ArithmeticError, phalanx.PhalanxError)) as caught:
        pipe.eval()(x)
    (alone, in_mesh, interrupted, evaluated) = [*texts, str(caught.value)]
    for text, first in ((alone, 0), (in_mesh, 0)):
        assert text.startswith("ArithmeticError: no gradient" if rank == first else "StageFailedError: ")
        assert "no gradient today" in text
        assert "stage 0 (rank 0), micro-batch 3, backward" in text
    assert interrupted.startswith(
        "KeyboardInterrupt" if rank == 0 else "StageFailedError: Pipeline: another rank of this"
    )
    assert "stage 2 (rank 2), micro-batch 3, forward in layer '2'" in evaluated
    assert "seven is not a prime here" in evaluated
