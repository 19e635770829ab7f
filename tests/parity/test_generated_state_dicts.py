"""The state of random modules through every wrapper and every kind of checkpoint, and back into plain PyTorch.

What is expected is the state of the plain module that one process has trained on the same batches: names in their
order, bits, dtypes, strides, `requires_grad`, which tensors are one memory, what is no tensor. A load is right if the
next step of training is, too, to the bit.

"""

import copy
import io
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.random_trees import difference
from tests.parity import random_modules
from tests.parity.random_modules import batch, build, scramble
from torch import nn
from torch.optim.swa_utils import AveragedModel

import phalanx
from phalanx._comm.transport.tensors import is_dense
from phalanx.checkpoint import CheckpointManager, load_checkpoint, save_checkpoint
from phalanx.testing import run_ranks

STEPS = 2
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.001, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    # Without an eps PyTorch takes that of the first parameter's dtype for all, and each rank has another first one.
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01, "eps": (1e-7, 1e-3)}),
    "fused SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
}


class Derived(phalanx.DistributedDataParallel):
    """A class of the user's own."""


def compiled(model):
    return torch.compile(model, backend="eager", dynamic=False)


def ddp(model, kind=phalanx.DistributedDataParallel):
    return kind(model, find_unused_parameters=True)


def synced(model, alone):
    """With layers over a group of one rank, whose numbers are those of plain ones."""
    return phalanx.SyncBatchNorm.convert_sync_batchnorm(model, alone)


# Each with what it puts before the names in a state_dict.
WRAPPERS = {
    "ddp": ("module.", lambda model, alone: ddp(model)),
    "derived ddp": ("module.", lambda model, alone: ddp(model, Derived)),
    "torch ddp": ("module.", lambda model, alone: ddp(model, nn.parallel.DistributedDataParallel)),
    "compiled": ("_orig_mod.", lambda model, alone: compiled(model)),
    "compiled ddp": ("_orig_mod.module.", lambda model, alone: compiled(ddp(model))),
    "ddp of compiled": ("module._orig_mod.", lambda model, alone: ddp(compiled(model))),
    "synced": ("", synced),
    "ddp of synced": ("module.", lambda model, alone: ddp(synced(model, alone))),
    "ddp in a container": ("0.module.", lambda model, alone: nn.Sequential(ddp(model))),
    "data parallel": ("module.", lambda model, alone: nn.DataParallel(model)),
}
TAKES_BARE_NAMES = ("ddp", "derived ddp", "ddp of synced", "synced")  # the others' load_state_dict is PyTorch's
SAVES = ("whole", "sharded", "async", "async sharded", "file")


def train(model, optimizer, seed, step):
    optimizer.zero_grad()
    output, mean = model(batch(seed, step))
    loss = output.square().mean() + mean
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained_parameters(model):
    """Some of the others have dtypes that fused optimizers refuse."""
    return [p for p in model.parameters() if p.requires_grad]


# -- comparison --------------------------------------------------------------------------------------------------------


def state_of(model, prefix=""):
    """A module's state without what a wrapper puts before its names, and the names of what is trained."""
    kept = model.state_dict(keep_vars=True)
    assert all(name.startswith(prefix) for name in kept)
    wants = {name[len(prefix) :] for name, value in kept.items() if getattr(value, "requires_grad", False)}
    return {name[len(prefix) :]: value for name, value in model.state_dict().items()}, wants


def memory_of(state, *, whole):
    """For each tensor the first one that is the same memory, and with `whole` the first in whose memory it lies."""
    same, part = {}, {}
    found = {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            first = same.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), name)
            found[name] = first, part.setdefault(tensor.untyped_storage().data_ptr(), name) if whole else None
    return found


def unlike(expected, found, *, whole=True):
    """How a module's state differs from the expected one, in words; empty if it does not.

    With `whole=False` it may lack the memory around tensors: torch.distributed.checkpoint stores each on its own.
    """
    if text := difference(dict(expected), dict(found)) or unlike_strides(expected, found, whole=whole):
        return text
    mine, theirs = memory_of(expected, whole=whole), memory_of(found, whole=whole)
    return next((f"{name}: memory {mine[name]} and {theirs[name]}" for name in mine if mine[name] != theirs[name]), "")


def unlike_strides(expected, found, *, whole=True):
    for name, tensor in expected.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel() and (whole or is_dense(tensor)):
            other = found[name].stride()
            if tensor.stride() != other:
                return f"{name}: strides {tensor.stride()} and {other}"
    return ""


def unlike_optimizer(expected, found):
    """As `unlike`, of the states of optimizers; the order of a group's options says nothing."""
    if not expected:
        return ""
    groups = [[dict(sorted(group.items())) for group in state["param_groups"]] for state in (expected, found)]
    if text := difference(*groups, "param_groups") or difference(expected["state"], found["state"], "optimizer"):
        return text
    told = (unlike_strides(entry, found["state"][number]) for number, entry in expected["state"].items())
    return next((f"optimizer, parameter {number}: {text}" for number, text in enumerate(told) if text), "")


def by_torch(state):
    """As torch.save keeps it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- one model ---------------------------------------------------------------------------------------------------------


class Plain:
    """What one process trains without any wrapper: its states after some steps, and after one more."""

    def __init__(self, seed, optimizer, *, zero):
        self.seed, self.zero = seed, zero
        self.optimizer_class, self.options = OPTIMIZERS[optimizer]
        if any(p.dtype is torch.bfloat16 for p in self.build().parameters()):
            # PyTorch's fused SGD reads memory that nobody has written there: its own results differ from run to run.
            self.options = {key: value for key, value in self.options.items() if key != "fused"}
        model, optimizer, averaged = self.make()
        self.averages = all(p.dtype.is_floating_point and p.dtype.itemsize > 1 for p in model.parameters())
        for step in range(STEPS):
            train(model, optimizer, seed, step)
            self.average(averaged, model)
        self.state, self.versions = copy.deepcopy(state_of(model)), model.state_dict()._metadata
        self.optimizer_state = copy.deepcopy(optimizer.state_dict())
        self.averaged_state = copy.deepcopy(averaged.state_dict())
        self.full_state = copy.deepcopy(model.state_dict())
        self.next_loss = train(model, optimizer, seed, STEPS)
        self.next_state = copy.deepcopy(state_of(model))

    def build(self):
        # ZeroRedundancyOptimizer moves parameters, as PyTorch's does with parameters_as_bucket_view: a buffer that lay
        # in the memory of one does not any more, and gaps go.
        return build(self.seed, in_other_memory=not self.zero)

    def make(self, *, scrambled=False):
        model = scramble(self.build(), extra_state=True) if scrambled else self.build()
        return model, self.optimizer_class(trained_parameters(model), **self.options), AveragedModel(model)

    def average(self, averaged, model):
        if self.averages:  # PyTorch makes no means of float8
            averaged.update_parameters(model)


class Case:
    """A drawn way of a model through a wrapper and a checkpoint; collects in what it is unlike plain PyTorch."""

    def __init__(self, seed, rank, alone, folder):
        dice = random.Random(seed)
        self.seed, self.rank, self.alone, self.folder = seed, rank, alone, folder
        self.wrapper, self.save = dice.choice(list(WRAPPERS)), dice.choice(SAVES)
        self.prefix = WRAPPERS[self.wrapper][0]
        self.zero, self.strict, self.compiles_average = (dice.random() < 0.5 for _ in range(3))
        optimizer = dice.choice(list(OPTIMIZERS))
        self.name = f"seed {seed}: {self.wrapper}, {optimizer}, zero={self.zero}, {self.save}"
        self.plain = Plain(seed, optimizer, zero=self.zero)
        self.problems = []

    def expect(self, what, problem):
        if problem:
            self.problems.append(f"{self.name}: {what}: {problem}")

    def run(self):
        self.into_a_checkpoint()
        for way in ("load_state_dict", "load_checkpoint"):
            self.from_plain(way)
        return self.problems

    def wrap(self, model):
        wrapped = WRAPPERS[self.wrapper][1](model, self.alone)
        kind, options, parameters = self.plain.optimizer_class, self.plain.options, trained_parameters(model)
        if self.zero:
            return wrapped, phalanx.ZeroRedundancyOptimizer(parameters, kind, **options)
        return wrapped, kind(parameters, **options)

    def into_a_checkpoint(self):
        plain, model = self.plain, self.plain.build()
        averaged = AveragedModel(model)
        if self.rank and "ddp" in self.wrapper:
            scramble(model)
        wrapped, optimizer = self.wrap(model)
        for step in range(STEPS):
            train(wrapped, optimizer, self.seed, step)
            plain.average(averaged, wrapped)
        self.expect_trained("trained", wrapped, self.prefix, optimizer, averaged)
        parts = {"averaged": compiled(averaged) if self.compiles_average else averaged}
        load = self.save_parts({"model": wrapped, "optimizer": optimizer, **parts})
        self.back_into_plain(load)

    def save_parts(self, parts):
        """Save them; return what loads them into parts, or gives their state."""
        path = f"{self.folder}/{self.seed}"
        if self.save == "file":
            states = {name: part.state_dict() for name, part in parts.items()} if self.rank == 0 else {}
            save_checkpoint(path, states)
            return lambda into=None: load_checkpoint(path, into=into)
        manager = CheckpointManager(path, sharded="sharded" in self.save)
        if "async" in self.save:
            manager.async_save(1, parts)
            manager.wait()
        else:
            manager.save(1, parts)
        return lambda into=None: manager.load(into, strict=self.strict).state

    def back_into_plain(self, load):
        """By the state alone, and by parts; a file has the names of the wrappers, which PyTorch takes off."""
        plain, state = self.plain, load()
        contained = "0." if "container" in self.wrapper else ""
        prefix, averaged_prefix = contained, ""
        if self.save == "file":
            prefix, averaged_prefix = self.prefix, "_orig_mod." * self.compiles_average
        else:
            self.expect("versions", self.unlike_versions(state["model"]._metadata, contained))
        found = {name.removeprefix(prefix): value for name, value in state["model"].items()}
        self.expect("saved", unlike(by_torch(plain.full_state), found, whole="sharded" not in self.save))
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state["model"], prefix)
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state["averaged"], averaged_prefix)
        model, optimizer, averaged = plain.make(scrambled=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        averaged.load_state_dict(state["averaged"])
        self.expect_loaded("the state, loaded by plain PyTorch", model, "", optimizer, averaged)
        if self.save != "file":
            model, optimizer, averaged = plain.make(scrambled=True)
            holder = nn.Sequential(model) if contained else model
            load({"model": holder, "optimizer": optimizer, "averaged": averaged})
            self.expect_loaded("loaded into plain parts", model, "", optimizer, averaged)

    def unlike_versions(self, found, contained):
        mine = {contained + name if name else contained[:-1]: value for name, value in self.plain.versions.items()}
        theirs = {name: value for name, value in found.items() if name or not contained}
        return "" if list(mine.items()) == list(theirs.items()) else f"{mine} and {theirs}"

    def from_plain(self, way):
        """What plain PyTorch has saved, into the wrapper."""
        path = f"{self.folder}/{self.seed}-{way}"
        if self.rank == 0:
            torch.save({"model": self.plain.full_state, "optimizer": self.plain.optimizer_state}, path)
        dist.barrier()
        model = scramble(self.plain.build(), extra_state=True)
        wrapped, optimizer = self.wrap(model)
        if way == "load_checkpoint":
            whole = wrapped[0] if "container" in self.wrapper else wrapped
            load_checkpoint(path, into={"model": whole, "optimizer": optimizer})
        else:
            state = torch.load(path, weights_only=True)
            (wrapped if self.wrapper in TAKES_BARE_NAMES else model).load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        dist.barrier()  # with ZeroRedundancyOptimizer each has written into the memory of all
        self.expect_loaded(f"a plain state, by {way}", wrapped, self.prefix, optimizer)

    def expect_trained(self, what, model, prefix, optimizer, averaged=None):
        plain = self.plain
        self.expect_state(what, plain.state, model, prefix)
        if averaged is not None:
            self.expect(f"{what}, averaged", unlike(plain.averaged_state, averaged.state_dict()))
        found = self.state_of_optimizer(optimizer)
        self.expect(what, unlike_optimizer(plain.optimizer_state if found else found, found))

    def state_of_optimizer(self, optimizer):
        """The whole state; on the first rank alone where each has a part of it."""
        if isinstance(optimizer, phalanx.ZeroRedundancyOptimizer):
            optimizer.consolidate_state_dict(to=0)
            if self.rank:
                return {}
        return optimizer.state_dict()

    def expect_loaded(self, what, model, prefix, optimizer, averaged=None):
        self.expect_trained(what, model, prefix, optimizer, averaged)
        loss = train(model, optimizer, self.seed, STEPS)
        if not torch.equal(loss, self.plain.next_loss):
            self.expect(f"{what}, the next step", f"the loss is {loss}, {self.plain.next_loss} in plain PyTorch")
        self.expect_state(f"{what}, the next step", self.plain.next_state, model, prefix)

    def expect_state(self, what, expected, model, prefix):
        found, wants = state_of(model, prefix)
        self.expect(what, unlike(expected[0], found))
        if wants != expected[1]:
            self.expect(what, f"trained are {wants}, {expected[1]} in plain PyTorch")


def run_cases(rank, world_size, seeds, folder):
    warnings.simplefilter("ignore")  # PyTorch's own, of find_unused_parameters and of what it deprecates
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    problems = []
    for seed in seeds:
        case = Case(seed, rank, alone, folder)
        try:
            problems += case.run()
        except Exception as error:
            raise AssertionError(case.name) from error
    return problems


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.slow
def test_the_state_of_random_modules_is_that_of_plain_pytorch(effort, seed, tmp_path):
    """Versions did not reach modules in wrappers, and moments in channels_last came back contiguous."""
    seeds = range(seed, seed + 10 * effort)
    compiled(nn.Identity())  # imports much: once here, and not once in each rank
    found = run_ranks(run_cases, 2, seeds, str(tmp_path), timeout=60 + 5 * len(seeds))
    assert not any(found), "\n".join(problem[:500] for problems in found for problem in problems)


def test_all_kinds_of_modules_are_drawn():
    drawn = [build(seed) for seed in range(100)]
    kinds = {type(module).__name__ for model in drawn for module in model.modules()}
    assert {"Counting", "Versioned", "SavedOtherwise", "Named", "Cast", "Gaps", "BatchNorm1d", "Column"} <= kinds
    names = {part for model in drawn for name in model.state_dict() for part in name.split(".")}
    assert names.issuperset(random_modules.NAMES)
    for has in (
        lambda model: len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())),
        lambda model: len(list(model.named_buffers())) > len(model.state_dict().keys() & dict(model.named_buffers())),
        lambda model: not all(p.requires_grad for p in model.parameters()),
        lambda model: len({p.dtype for p in model.parameters()}) > 1,
        lambda model: {b.data_ptr() for b in model.buffers() if b.numel()} & {p.data_ptr() for p in model.parameters()},
        lambda model: not all(map(is_dense, model.parameters())),
    ):
        assert any(map(has, drawn))
