"""A model over several devices in one process: cut as well as can be, nothing forgotten on the way, the same numbers.

That tensors are moved is shown with the meta device, that the numbers stay the same with the CPU, several times. That
every value is brought to where it is needed is shown in tests/nn/place_on_devices.py.
"""

import copy
import itertools
import linecache
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.comparisons import assert_equal
from tests.nn.placed_models import MODELS, Tied, make, values
from tests.pipeline.generated import draw_batch, draw_generated, loss_of
from torch import nn
from torch.utils._pytree import tree_leaves

from phalanx.nn import Placed, place
from phalanx.nn.placement.devices import Room, format_bytes, parse_bytes, read_rooms
from phalanx.nn.placement.plan import decide_placement
from phalanx.nn.placement.transfers import transfer
from phalanx.partition import LayerCost

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_outputs_gradients_and_weights_are_those_of_the_model_that_was_not_placed(name, num_devices):
    model, example = make(name)
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    state = torch.get_rng_state()
    placed = place(model, ["cpu"] * num_devices, example)
    assert placed is model
    assert isinstance(placed, type(plain))
    assert torch.equal(torch.get_rng_state(), state)
    assert list(placed.state_dict()) == names
    assert [n for n, _ in placed.named_modules()] == [n for n, _ in plain.named_modules()]
    for turn in (placed, plain):
        optimizer = torch.optim.SGD(turn.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(5)
        for _ in range(3):
            optimizer.zero_grad()
            sum(value.square().mean() for value in values(turn(*example))).backward()
            optimizer.step()
    assert_equal(placed.state_dict(), plain.state_dict())
    placed.eval(), plain.eval()
    assert_equal(values(placed(*example)), values(plain(*example)))


@pytest.mark.slow
def test_every_value_is_brought_to_the_device_on_which_it_is_needed():
    """In a process of its own, because a device that is registered there stays (tests/nn/place_on_devices.py)."""
    command = [sys.executable, "-m", "tests.nn.place_on_devices"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(
        r"(\d+) cuts forward, (\d+) forward and backward; without transfers (\d+) are refused\n", done.stdout
    )
    assert said is not None
    forward, both, refused = map(int, said.groups())
    assert (forward > 20, both > 10, refused > 5) == (True, True, True)  # a third of them were tried without


def test_a_value_is_brought_to_a_device_once_however_often_it_is_needed_there():
    model, example = make("unet")
    placed = place(model, ["cpu", "meta"], example, balance=[2, 5])
    code = "".join(linecache.getlines(placed._phalanx_way.run.__code__.co_filename))
    brought = re.findall(r"transfer\((\w+), (device\(.*?\))", code)
    assert len(brought) >= 2
    assert len(brought) == len(set(brought))


@every_model
def test_tensors_are_moved_and_what_is_shared_stays_shared(name):
    model, example = make(name)
    sharing = {}
    for key, tensor in model.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(tensor), []).append(key)
    placed = place(model, ["cpu", "meta"], example, balance="time")
    here = dict(placed.named_parameters(remove_duplicate=False))
    for keys in sharing.values():
        assert len({id(here[key]) for key in keys}) == 1
    of_layer = dict(zip([layer.name for layer in placed.placement.layers], placed.placement.devices, strict=True))
    assert set(map(str, of_layer.values())) == {"cpu", "meta"}
    for layer, device in of_layer.items():
        for tensor in (*model.get_submodule(layer).parameters(), *model.get_submodule(layer).buffers()):
            assert tensor.device == device
    if name == "tied":  # its head is with the embedding: what meta has cannot come back
        with pytest.raises(NotImplementedError, match="meta tensor"):
            placed(*example)
    else:
        assert placed(*example).device == torch.device("meta")


def test_layers_that_share_a_tensor_are_on_one_device_and_the_table_says_so():
    model, example = make("tied")
    placed = place(model, ["cpu", "meta"], example)
    by_name = {layer.name: layer for layer in placed.placement.layers}
    assert by_name["head"].device == by_name["emb"].device == 0
    assert by_name["head"].with_layer == "emb"
    assert by_name["head"].parameter_bytes == 0  # counted once
    assert "with emb" in str(placed.placement)
    assert model.head.weight is model.emb.weight


def test_copies_and_pickles_are_placed_too_and_have_tensors_of_their_own():
    model, example = make("tied")
    placed = place(model, ["cpu", "cpu"], example).eval()
    for other in (copy.deepcopy(placed), pickle.loads(pickle.dumps(placed)), copy.deepcopy(copy.deepcopy(placed))):
        assert isinstance(other, Placed)
        assert isinstance(other, Tied)
        assert other.placement == placed.placement
        assert other.head.weight is other.emb.weight
        assert other.head.weight is not placed.head.weight
        assert torch.equal(other(*example)["logits"], placed(*example)["logits"])
        with torch.no_grad():
            other.mid.weight.zero_()
        assert not torch.equal(other(*example)["logits"], placed(*example)["logits"])


def test_arguments_with_names_and_with_default_values_are_as_before():
    model, (image,) = make("unet")
    plain = copy.deepcopy(model)
    placed = place(model, ["cpu", "cpu"], {"x": image, "gain": 3.0})
    assert torch.equal(placed(image, gain=0.5), plain(image, gain=0.5))
    assert torch.equal(placed(x=image, gain=4.0), plain(x=image, gain=4.0))


@pytest.mark.parametrize("begin", [0, 5])
def test_drawn_models_compute_what_they_did(begin):
    """An argument with a default that the example gave by its place was taken for its default: an AssertionError."""
    for seed in range(begin, begin + 5):
        model = draw_generated(seed)
        plain = copy.deepcopy(model)
        args, given, _ = draw_batch(model, 0, 8)
        example = (*args, *([None] if not model.has_ids and given else []), *given.values())
        placed = place(model, ["cpu"] * (1 + seed % 3), example)
        results = []
        for turn in (placed, plain):
            optimizer = torch.optim.SGD(turn.parameters(), 0.1, momentum=0.9)
            torch.manual_seed(5)
            for step in range(2):
                args, given, target = draw_batch(plain, step, 8)
                optimizer.zero_grad()
                loss_of(turn(*args, **given), target).backward()
                optimizer.step()
            gradients = [p.grad for p in turn.parameters() if p.grad is not None]
            outputs = [leaf for leaf in tree_leaves(turn(*args, **given)) if isinstance(leaf, torch.Tensor)]
            results.append([*turn.state_dict().values(), *gradients, *outputs])
        assert_equal(*results, seed)


def test_a_module_that_is_exchanged_afterwards_is_the_one_that_runs():
    model, example = make("sequential")
    placed = place(model, ["cpu", "cpu"], example)
    placed[4] = nn.Linear(16, 3)
    assert placed(*example).shape == (5, 3)


def cost(name, seconds=0.0, parameters=0, output=1):
    return LayerCost(name, seconds, 0.0, parameters, 0, output)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_is_better(seed):
    """Compared with all cuts there are, tied layers and budgets included."""
    draw = random.Random(seed)
    count, num_devices = draw.randrange(3, 8), draw.randrange(2, 4)
    memory = [draw.randrange(1, 50) for _ in range(count)]
    homes = list(range(count))
    for index in range(1, count):
        if draw.random() < 0.25:
            homes[index] = homes[draw.randrange(index)]
    budgets = [draw.randrange(30, 150) for _ in range(num_devices)] if draw.random() < 0.7 else [None] * num_devices
    rooms = [Room(torch.device("cuda", i), budget) for i, budget in enumerate(budgets)]
    costs = [cost(f"l{i}") for i in range(count)]

    def need(cut, devices):
        of = [sum(index >= at for at in cut) for index in range(count)]
        of = [of[home] for home in homes]
        return [sum(m for m, d in zip(memory, of, strict=True) if d == device) for device in range(devices)], of

    def dearest(needs):
        return max(n / (b or 1) for n, b in zip(needs, budgets, strict=False))

    best = None
    for devices in range(1 if budgets[0] else num_devices, num_devices + 1):
        found = []
        for cut in itertools.combinations(range(1, count), devices - 1):
            needs, of = need(cut, devices)
            free_on_each = all(any(homes[i] == i and of[i] == d for i in range(count)) for d in range(devices))
            if free_on_each and all(b is None or n <= b for n, b in zip(needs, budgets, strict=False)):
                found.append(dearest(needs))
        if found:
            best = (devices, min(found))
            break
    if best is None:
        with pytest.raises(ValueError, match="place: "):
            decide_placement(costs, memory, homes, {}, rooms, "memory")
        return
    placement = decide_placement(costs, memory, homes, {}, rooms, "memory")
    needs = [placement.memory_bytes(device) for device in range(len(placement.rooms))]
    assert (len(placement.rooms), dearest(needs)) == (best[0], pytest.approx(best[1]))


def test_with_budgets_as_few_devices_are_used_as_hold_the_model():
    model, example = make("sequential")
    placed = place(model, {"cpu": "1 GiB", "meta": "1 GiB"}, example)
    assert {str(device) for device in placed.placement.devices} == {"cpu"}
    with pytest.raises(
        ValueError, match=r"layer '2\.0' needs 2\.\d KiB, and the largest device, meta, may hold 2\.0 KiB"
    ):
        place(make("sequential")[0], {"cpu": 1000, "meta": "2KiB"}, example)
    with pytest.raises(
        ValueError, match=r"need .* KiB, and no cut .* fits .* together \(cpu 2\.9 KiB, meta 2\.9 KiB\)"
    ):
        place(make("sequential")[0], {"cpu": 3000, "meta": 3000}, example)


def test_the_optimizer_and_training_count_as_memory():
    model, example = make("sequential")
    sizes = [
        sum(
            layer.memory_bytes
            for layer in place(copy.deepcopy(model), ["cpu", "cpu"], example, **options).placement.layers
        )
        for options in ({"training": False}, {}, {"optimizer_state": 2})
    ]
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert sizes[0] > parameters
    assert sizes[2] - sizes[1] == 2 * parameters
    assert sizes[1] - sizes[0] >= parameters


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if x.sum() > 0 else x


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.mask = torch.ones(4)

    def forward(self, x):
        return x * self.weight * self.mask


class Outcome:
    def __init__(self, tensor):
        self.tensor = tensor


class Wraps(nn.Linear):
    def forward(self, x):
        return Outcome(super().forward(x))


class Unwraps(nn.Linear):
    def forward(self, outcome):
        return super().forward(outcome.tensor)


def test_what_cannot_be_cut_is_refused_by_name():
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"Decides cannot be cut: .*Values may not decide"):
        place(Decides(), ["cpu", "meta"], (x,))
    with pytest.raises(ValueError, match=r"layer '1\.0' keeps the tensor 'mask', .*register_buffer"):
        place(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Keeps())), ["cpu", "meta"], (x,))
    with pytest.raises(ValueError, match=r"1 layer \(0\) cannot be shared out over 2 devices.*split_points"):
        place(nn.Sequential(nn.Linear(4, 4)), ["cpu", "meta"], (x,))
    shared = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"3 layers .*, 1 of which must be with another.* over 3 devices"):
        place(nn.Sequential(shared, nn.ReLU(), shared), ["cpu", "cpu", "meta"], (x,))
    with pytest.raises(TypeError, match=r"layer '0' gives a Outcome, of which it is not known how to bring it to meta"):
        place(nn.Sequential(Wraps(4, 4), Unwraps(4, 4)), ["cpu", "meta"], (x,))(x)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("module", ["cpu"]), TypeError, "takes an nn.Module, got a str"),
        ((nn.Linear(1, 1), "cpu"), TypeError, "devices must be a list"),
        ((nn.Linear(1, 1), []), ValueError, "there is no device"),
        ((nn.Linear(1, 1), ["cpu", "gpu:0"]), ValueError, "'gpu:0' is no device"),
        ((nn.Linear(1, 1), {"cpu": "lots", "gpu": 3}), ValueError, r"cpu: a budget is .*'gpu' is no device"),
    ],
)
def test_wrong_calls_are_refused_at_the_door(arguments, error, words):
    with pytest.raises(error, match=words):
        place(*arguments, (torch.ones(1, 1),))
    placed = place(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), ["cpu", "cpu"], torch.ones(1, 1))
    with pytest.raises(ValueError, match="placed already"):
        place(placed, ["cpu"], (torch.ones(1, 1),))
    with pytest.raises(ValueError, match=r"balance \[1, 2\] does not share out 2 layers over 2 devices"):
        place(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), ["cpu", "cpu"], torch.ones(1, 1), balance=[1, 2])


def test_sizes_are_read_as_people_write_them():
    assert [parse_bytes(size) for size in (7, "7", "2 GiB", "1.5kb", "3M", "1TiB")] == [
        7, 7, 2 << 30, 1500, 3_000_000, 1 << 40,
    ]  # fmt: skip
    for wrong in ("", "GiB", "-1", "0", 0, 1.5, True, "1 XB"):
        with pytest.raises(ValueError, match=r"a budget|positive"):
            parse_bytes(wrong)
    assert [format_bytes(size) for size in (3, 2048, 5 << 20, 3 << 29)] == ["3 B", "2.0 KiB", "5.0 MiB", "1.5 GiB"]
    assert [room.device.type for room in read_rooms(["cpu", torch.device("meta")])] == ["cpu", "meta"]


def test_structures_are_brought_whole_and_what_is_no_tensor_stays():
    value = {"a": [torch.ones(1), (torch.ones(2), 3)], "b": None, "c": torch.Size([1])}
    moved = transfer(value, torch.device("meta"), "layer 'x'")
    assert moved["a"][0].device == moved["a"][1][0].device == torch.device("meta")
    assert (moved["a"][1][1], moved["b"], moved["c"]) == (3, None, torch.Size([1]))
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2)])
    assert transfer(packed, torch.device("meta"), "layer 'x'").data.device == torch.device("meta")
