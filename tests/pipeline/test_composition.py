"""A pipeline with what is around it: replicas, sharded optimizers, checkpoints, models on the meta device."""

import random

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from tests.pipeline.unsplit import Transformer, letters_loss
from torch import nn
from torch.nn import functional

import phalanx
import phalanx.optim
from phalanx.testing import run_ranks


def _transformer():
    torch.manual_seed(3)
    return Transformer(11, 8, 3, 0.0, tied=True)


def _letters(rows=16):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(11, (rows, 6), generator=generator), torch.randint(11, (rows, 6), generator=generator)


def _train_unsplit(model):
    inputs, targets = _letters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = letters_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.slow(but=("phalanx",))
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_two_pipelines_in_a_mesh_train_as_one_process_with_all_data(backend):
    def train(rank, world_size):
        mesh = phalanx.mesh(pipeline=2, data=-1)
        data = mesh.get_local_rank("data")
        torch.manual_seed(rank)  # other weights on every rank: the first ones are for all
        model = Transformer(11, 8, 3, 0.0, tied=True) if rank else _transformer()
        if mesh.get_local_rank("pipeline"):
            model = _transformer()
        pipe = phalanx.Pipeline(model, micro_batches=4, mesh=mesh, loss_fn=letters_loss)
        optimizer = phalanx.ZeroRedundancyOptimizer(
            pipe.parameters(), torch.optim.SGD, process_group=mesh.get_group("data"), lr=0.1, momentum=0.9
        )
        inputs, targets = _letters()
        losses = []
        for _ in range(3):
            pipe.zero_grad()
            losses.append(pipe.step(inputs[data::2], target=targets[data::2]))
            optimizer.step()
        return losses, pipe.state_dict()

    model = _transformer()
    losses = _train_unsplit(model)
    for ours, state in run_ranks(train, 4, backend=backend):
        torch.testing.assert_close(ours, losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(state), dict(model.state_dict()), rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_batchnorm_of_replicas_tracks_all_of_their_values(rank):
    mesh = phalanx.mesh(pipeline=1, data=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    pipe = phalanx.Pipeline(model, micro_batches=3, mesh=mesh, loss_fn=functional.mse_loss)
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    pipe.step(inputs[rank::2], target=torch.zeros(10, 2))
    buffers = dict(pipe.named_buffers())
    torch.testing.assert_close(buffers["0.running_mean"], 0.1 * inputs.mean(0))
    torch.testing.assert_close(buffers["0.running_var"], 0.9 + 0.1 * inputs.var(0))
    assert buffers["0.num_batches_tracked"] == 1


class _Normalizes(nn.Module):
    """A layer that hands its BatchNorm the values by position or by keyword."""

    def __init__(self, norm, by_keyword):
        super().__init__()
        self.norm, self.by_keyword = norm, by_keyword

    def forward(self, x):
        return self.norm(input=x) if self.by_keyword else self.norm(x)


def test_a_batchnorm_tracks_inputs_passed_by_keyword():
    """The hook on `self.norm(input=x)` looked at positional arguments alone: the running statistics stood still."""
    draw = random.Random(4)
    cases = [
        (draw.choice([None, 0.1, 0.5]), draw.choice(["never", "always"]), draw.randint(1, 4), draw.random() < 0.5)
        for _ in range(6)
    ]
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))

    def train(rank, world_size):
        found = []
        for momentum, checkpoint, micro_batches, traced in cases:
            for by_keyword in (False, True):
                torch.manual_seed(0)
                layer = _Normalizes(nn.BatchNorm1d(3, momentum=momentum), by_keyword)
                model = layer if traced else nn.Sequential(layer)  # the call is in the graph, or inside of a layer
                pipe = phalanx.Pipeline(
                    model, micro_batches=micro_batches, checkpoint=checkpoint, loss_fn=functional.mse_loss
                )
                pipe.step(inputs, target=inputs)
                found.append({name.rpartition(".")[2]: value for name, value in pipe.state_dict().items()})
        return found

    (states,) = run_ranks(train, 1)
    for (momentum, *_), by_position, by_keyword in zip(cases, states[::2], states[1::2], strict=True):
        torch.testing.assert_close(by_keyword, by_position, rtol=0, atol=0)
        share = 1.0 if momentum is None else momentum
        torch.testing.assert_close(by_keyword["running_mean"], share * inputs.mean(0))
        assert by_keyword["num_batches_tracked"] == 1


def test_a_batchnorm_that_is_called_twice_tracks_each_call():
    """Its running statistics moved once, by the values of both calls together."""

    def build():
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3, momentum=None)
        return nn.Sequential(norm, nn.Linear(3, 3), norm, nn.Linear(3, 2))

    def train(rank, world_size):
        pipe = phalanx.Pipeline(
            build(), micro_batches=4, balance=[3, 1], checkpoint="always", loss_fn=functional.mse_loss
        )
        pipe.step(inputs, target=torch.zeros(20, 2))
        return pipe.state_dict()

    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    model = build()
    calls = [[], []]
    for part in inputs.chunk(4):
        first = model[0](part)
        calls[0].append(part)
        calls[1].append(model[1](first).detach())
    first, second = (torch.cat(call) for call in calls)
    for state in run_ranks(train, 2):
        torch.testing.assert_close(state["0.running_mean"], (first.mean(0) + second.mean(0)) / 2)
        torch.testing.assert_close(state["0.running_var"], (first.var(0) + second.var(0)) / 2)
        assert state["0.num_batches_tracked"] == 2
        assert state["2.num_batches_tracked"] == 2


def test_a_state_loads_into_another_split_and_into_the_unsplit_model(tmp_path):
    path = tmp_path / "model.pt"
    whole = _transformer()
    inputs, _ = _letters()

    def save(rank, world_size):
        pipe = phalanx.Pipeline(_transformer(), micro_batches=4, balance=["blocks.2"], loss_fn=letters_loss)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            pipe.step(*_letters()[:1], target=_letters()[1])
            optimizer.step()
        phalanx.save_checkpoint(path, {"model": pipe.state_dict(rank0_only=True)})
        # It saved the state of rank 0's optimizer, and every rank loaded that: other moments for other parameters.
        with phalanx.CheckpointManager(path.parent / "kept") as manager:
            both = torch.optim.SGD([*pipe.parameters(), nn.Parameter(torch.zeros(rank + 1))], lr=0.1)
            with pytest.raises(phalanx.CheckpointError, match="'optimizer' updates different parameters on rank 1"):
                manager.save(3, {"model": pipe, "optimizer": both})
            manager.save(3, {"model": pipe, "optimizer": optimizer})
        pipe.eval()
        names = [name for name, _ in pipe.named_parameters()]
        return pipe(inputs), names, pipe.plan.counts, list(pipe.state_dict(rank0_only=True))

    def load(rank, world_size):
        with torch.device("meta"):
            model = Transformer(11, 8, 3, 0.0, tied=True)
        pipe = phalanx.Pipeline(model, 6, schedule="interleaved", micro_batches=4, outputs="all")
        phalanx.load_checkpoint(path, into={"model": pipe})
        pipe.eval()
        assert not any(p.is_meta for p in pipe.parameters())
        return pipe(inputs)

    (_, first, counts, keys), (output, second, _, own) = run_ranks(save, 2)
    assert counts == [3, 3]
    assert keys == list(whole.state_dict())
    assert set(own) < set(keys)
    assert set(first) | set(second) == {name for name, _ in whole.named_parameters()}
    assert set(first) & set(second) == {"embed.weight"}  # tied: both stages have it, under its name in the whole
    for theirs in run_ranks(load, 3):
        torch.testing.assert_close(theirs, output)
    whole.load_state_dict(torch.load(path)["model"])
    whole.eval()
    torch.testing.assert_close(whole(inputs), output)


class Masked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x):
        return super().forward(x * self.mask)


def test_a_buffer_that_reset_parameters_leaves_alone_needs_a_value():
    """It was zero."""

    def build(rank, world_size):
        def make(init_fn=None):
            with torch.device("meta"):
                model = nn.Sequential(Masked(), nn.BatchNorm1d(4), Masked())
            return phalanx.Pipeline(model, loss_fn=lambda y, _: y.sum(), balance=[2, 1], init_fn=init_fn)

        x, names = torch.ones(16, 4), []
        with pytest.raises(RuntimeError, match=r"no values for 0\.mask, 2\.mask\. Load a state_dict, or pass init_fn="):
            make().step(x, target=x)
        make(lambda name, tensor: names.append(name)).step(x, target=x)
        return names

    assert run_ranks(build, 2) == [["0.mask"], ["2.mask"]]


def test_a_model_on_the_meta_device_gets_memory_for_its_stage_alone():
    def build(rank, world_size):
        with torch.device("meta"):
            model = Transformer(11, 8, 3, 0.0, tied=False)
        pipe = phalanx.Pipeline(model, micro_batches=4, loss_fn=letters_loss, balance=["blocks.1"])
        inputs, targets = _letters()
        refusal = None
        try:
            pipe.step(inputs, target=targets)
        except RuntimeError as error:
            refusal = str(error)
        with torch.device("meta"):
            model = Transformer(11, 8, 3, 0.0, tied=False)
        group = dist.new_group()  # any group will do
        pipe = phalanx.Pipeline(
            model,
            micro_batches=4,
            loss_fn=letters_loss,
            balance="time",
            example=inputs[:4],
            process_group=group,
            init_fn=lambda name, tensor: tensor.normal_(),
        )
        loss = pipe.step(inputs, target=targets)
        return refusal, loss, [n for n, p in pipe.named_parameters() if not p.is_meta], str(pipe.plan)

    (refusal, loss, first, plan), (other, same, second, _) = run_ranks(build, 2)
    assert "there are no values for position" in refusal
    assert other == refusal  # its own stage has all values, but it would wait for the other
    torch.testing.assert_close(loss, same)
    assert loss.isfinite()
    assert set(first).isdisjoint(second)
    assert len(first) + len(second) == len(list(Transformer(11, 8, 3, 0.0, tied=False).named_parameters()))
    assert "balanced by measured time" in plan


@on_ranks(2)
def test_a_pipeline_is_a_module_of_its_stage():
    model, (inputs, targets) = _transformer(), _letters()
    pipe = phalanx.Pipeline(model, micro_batches=2, loss_fn=letters_loss)
    names = [name for name, _ in pipe.named_parameters()]
    assert names == [name for name, _ in model.named_parameters() if name in names]
    assert all(p is dict(model.named_parameters())[name] for name, p in pipe.named_parameters())
    pipe.eval()
    assert not any(m.training for m in pipe.modules() if m is not pipe._own)
    pipe.train()
    pipe.step(inputs, target=targets)
    assert any(p.grad is not None for p in pipe.parameters())
    gradients = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    pipe.step(inputs, target=targets)  # gradients accumulate, as they do without a pipeline
    ratio = max((p.grad.norm() / gradients[n].norm()).item() for n, p in pipe.named_parameters() if n in gradients)
    assert 1.5 < ratio < 2.5
    norm = pipe.clip_grad_norm_(0.1)
    after = pipe.clip_grad_norm_(1e9)
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())
    pipe.double()
    assert all(p.dtype == torch.float64 for p in pipe.parameters() if p.is_floating_point())
    shown = "stage" in repr(pipe)
    assert norm > 0.1
    torch.testing.assert_close(after, torch.tensor(0.1), rtol=1e-3, atol=1e-4)
    assert shown


def test_gradients_are_clipped_as_those_of_the_whole_model():
    def clip(rank, world_size):
        pipe = phalanx.Pipeline(_transformer(), micro_batches=2, loss_fn=letters_loss)
        pipe.step(*_letters()[:1], target=_letters()[1])
        return pipe.clip_grad_norm_(0.01)

    model = _transformer()
    letters_loss(model(_letters()[0]), _letters()[1]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for ours in run_ranks(clip, 2):
        torch.testing.assert_close(ours, norm)


class Waves(nn.Module):
    """A layer with complex weights between real values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


def _draw_waves(seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    return nn.Sequential(*(draw.choice([Waves, lambda: nn.Linear(4, 4)])() for _ in range(3)), Waves())


def test_complex_gradients_are_clipped_by_their_moduli():
    """The norm left out the imaginary parts, so that gradients were scaled by another factor."""
    seeds = range(6)
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))

    def clip(rank, world_size):
        found = []
        for seed in seeds:
            pipe = phalanx.Pipeline(_draw_waves(seed), micro_batches=2, loss_fn=functional.mse_loss)
            pipe.step(x, target=y)
            norm = pipe.clip_grad_norm_(0.1)
            found.append((norm, {name: p.grad for name, p in pipe.named_parameters()}))
        return found

    ranks = run_ranks(clip, 2)
    for seed in seeds:
        model = _draw_waves(seed)
        functional.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for found in ranks:
            torch.testing.assert_close(found[seed][0], norm)
            for name, gradient in found[seed][1].items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, msg=f"{seed} {name}")


@on_ranks(2)
def test_a_mini_batch_smaller_than_its_micro_batches_makes_fewer(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    pipe = phalanx.Pipeline(model, micro_batches=8, loss_fn=nn.CrossEntropyLoss(reduction="sum"),
                            loss_reduction="sum", outputs="all")  # fmt: skip
    losses = []
    for rows in (8, 3, 1, 11):
        x = torch.linspace(0, 1, rows * 3).view(rows, 3)
        loss = pipe.step(x if rank == 0 else None, target=torch.arange(rows) % 2 if rank else None)
        pipe.eval()
        with torch.no_grad():
            expected = functional.cross_entropy(pipe(x), torch.arange(rows) % 2, reduction="sum")
        pipe.train()
        losses.append((loss, expected))
    for ours, expected in losses:
        torch.testing.assert_close(ours, expected)


@on_ranks(2)
def test_a_model_may_return_its_own_loss():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x, y, scale: float = 2.0):
            return ((self.b(self.a(x).tanh()) - y) ** 2).mean() * scale

    x = torch.linspace(0, 1, 30).view(10, 3)
    pipe = phalanx.Pipeline(WithLoss(), micro_batches=4)
    x = torch.linspace(0, 1, 30).view(10, 3)
    loss = pipe.step(x, y=x[:, :1])
    torch.testing.assert_close(loss, WithLoss()(x, x[:, :1]).detach())


@on_ranks(1)
def test_one_rank_is_the_model_itself():
    inputs, targets = _letters()
    pipe = phalanx.Pipeline(_transformer(), 4, micro_batches=3, schedule="interleaved", loss_fn=letters_loss)
    loss = pipe.step(inputs, target=targets)
    torch.testing.assert_close(loss, letters_loss(_transformer()(inputs), targets).detach())


class OddValues(nn.Module):
    """The state of an LSTM, whose samples are its second dimension; numbers; a frozen layer; one that nobody calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("shift", torch.ones(4))
        self.b.requires_grad_(False)

    def forward(self, x, mask=None, *, scale=1.0):
        h = self.a(x) + self.shift
        if mask is not None:
            h = h * mask
        out, (state, _) = self.lstm(h.unsqueeze(1))
        kinds = h.argmax(-1)
        z = self.b(out.squeeze(1)) * scale
        y = self.d(self.c(z) + state.transpose(0, 1).squeeze(1))
        return {"y": y, "kinds": kinds, "z": (z, x.shape[1])}


def test_values_of_all_kinds_go_from_stage_to_stage():
    """With uneven micro-batches the state of an LSTM was taken for a shape that differs between them."""

    def train(rank, world_size):
        found = []
        x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
        for schedule in ("1f1b", "zero_bubble"):
            pipe = phalanx.Pipeline(
                OddValues(), micro_batches=4, schedule=schedule, outputs="all", example=(x[:2], x[:2]),
                loss_fn=lambda result, target: functional.mse_loss(result["y"], target),
                balance=["lstm", "c"] if world_size == 3 else ["b"],
            )  # fmt: skip
            loss = pipe.step(x, mask=x.sigmoid(), target=torch.ones(10, 4))
            gradients = {name: p.grad for name, p in pipe.named_parameters()}
            pipe.eval()
            found.append((loss, gradients, pipe(x, x.sigmoid()), list(pipe.state_dict())))
        return found

    model, x = OddValues(), torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    result = model(x, x.sigmoid())
    loss = functional.mse_loss(result["y"], torch.ones(10, 4))
    loss.backward()
    for world_size in (2, 3):
        for rank in run_ranks(train, world_size):
            for ours, gradients, output, names in rank:
                torch.testing.assert_close(ours, loss.detach())
                torch.testing.assert_close(output["y"], result["y"].detach())
                assert output["kinds"].equal(result["kinds"])
                assert output["z"][1] == 4
                assert names == list(model.state_dict())
                for name, gradient in gradients.items():
                    expected = dict(model.named_parameters())[name].grad
                    assert (gradient is None) == (expected is None), name
                    if gradient is not None:
                        torch.testing.assert_close(gradient, expected)


class Changed(nn.Module):
    """A weight and what is added to it, as LoRA has: autograd gives both the same tensor for a gradient."""

    def __init__(self):
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return functional.linear(x, self.weight + self.change) + self.scale.sum(0)


def _odd_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Changed(), nn.Tanh(), Changed(), nn.Tanh(), nn.Linear(4, 4))
    return model.requires_grad_(True)


def _frozen_first():
    model = _odd_gradients()
    model[0].requires_grad_(False)
    return model


class Skipping(nn.Module):
    """What goes on inside of a stage goes to a later one, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x):
        kept = []
        for layer in self.layers:
            x = layer(x).tanh()
            kept.append(x)
        return x + kept[2] * kept[0]


class Counting(nn.Module):
    """Has a buffer that every forward changes, and uses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        self.count += 1
        return x * self.count.clone()


def _counting():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Counting(), nn.Tanh(), Counting(), nn.Tanh(), nn.Linear(4, 4))


def test_gradients_are_those_of_one_process_where_memory_is_shared_frozen_or_used_twice():
    """A weight and its change had one gradient, which got both's; a value that was sent and used was cut off; a first
    stage without gradients waited for them for ever if it was run again; a buffer was changed once more then."""
    cases = [
        (_odd_gradients, "zero_bubble", "never"),
        (_frozen_first, "1f1b", "always"),
        (Skipping, "zero_bubble", "never"),
        (_counting, "1f1b", "always"),
    ]
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def train(rank, world_size):
        found = []
        for make, schedule, checkpoint in cases:
            pipe = phalanx.Pipeline(make(), micro_batches=4, schedule=schedule, checkpoint=checkpoint,
                                    balance=[2, 2, 2], loss_fn=functional.mse_loss)  # fmt: skip
            for _ in range(2):
                pipe.step(x, target=x)
            found.append(({n: p.grad for n, p in pipe.named_parameters()}, pipe.state_dict()))
        return found

    ranks = run_ranks(train, 3)
    for at, (make, *_) in enumerate(cases):
        model = make()
        for part in x.split(2) * 2:
            (functional.mse_loss(model(part), part) / 4).backward()
        for gradients, state in (rank[at] for rank in ranks):
            for name, gradient in gradients.items():
                torch.testing.assert_close(
                    gradient, dict(model.named_parameters())[name].grad, msg=f"{cases[at]} {name}"
                )
            torch.testing.assert_close(dict(state), dict(model.state_dict()))


def test_a_sent_message_is_released_when_its_arrival_is_known():
    """Over Gloo a send is over only when somebody waits for it, and all of a step were kept until its end: a stage of a
    1F1B schedule had 1.75 times the memory that the schedule implies.
    """

    def train(rank, world_size):
        pipe = phalanx.Pipeline(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), loss_fn=functional.mse_loss)
        wire, most = pipe._wire, {}
        send = wire._send

        def watched(edge, *args):
            send(edge, *args)
            on_the_way = len({number for number, *_ in wire._works[edge]})
            most[edge] = max(most.get(edge, 0), on_the_way)

        wire._send = watched
        x = torch.ones(16, 4)
        pipe.step(x, target=x)
        return {(edge.source, edge.target): count for edge, count in most.items() if edge.target < world_size}

    found = {edge: count for rank in run_ranks(train, 3, backend="gloo") for edge, count in rank.items()}
    assert set(found) == {(0, 1), (1, 2), (1, 0), (2, 1)}
    assert max(found.values()) <= 4, found


def test_the_random_state_travels_from_where_numbers_are_drawn():
    """It went with every micro-batch from every stage: a message of 5 KB more for each, of models that draw nothing."""

    def received(rank, world_size):
        layers = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4), nn.Dropout(0.5)]
        torch.manual_seed(3)
        pipe = phalanx.Pipeline(nn.Sequential(*layers), balance=[1, 2, 1, 1], loss_fn=functional.mse_loss)
        x = torch.ones(16, 4)
        loss = pipe.step(x, target=x)
        return sum(len(form.leaves) for edge, (form, _) in pipe._wire._forms.items() if edge.target == rank), loss

    found = run_ranks(received, 4)
    assert [tensors for tensors, _ in found] == [0, 1, 2, 2]


class ConstantSource(nn.Module):
    """A layer that returns another constant in each step: equal ones, of other types."""

    def __init__(self):
        super().__init__()
        self.layer, self.constants = nn.Linear(4, 4), [1, True, 1.0, 0.0, -0.0]

    def forward(self, x):
        return self.layer(x), self.constants.pop(0)


class ConstantRecorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.received = nn.Linear(4, 1), []

    def forward(self, x, constant):
        self.received.append(repr(constant))
        return self.layer(x)


class PassesConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.recorder = ConstantSource(), ConstantRecorder()

    def forward(self, x):
        x, constant = self.source(x)
        return self.recorder(x, constant)


def test_a_constant_that_equals_the_one_before_arrives_with_its_own_type():
    """`1`, then `True`: the later stage kept the first."""

    def train(rank, world_size):
        model = PassesConstant()
        pipe = phalanx.Pipeline(
            model, micro_batches=1, schedule="gpipe", loss_fn=functional.mse_loss, balance=["recorder"]
        )
        for _ in range(5):
            pipe.step(torch.ones(2, 4), target=torch.ones(2, 1))
        return model.recorder.received

    assert run_ranks(train, 2)[1] == ["1", "True", "1.0", "0.0", "-0.0"]
