"""The watch for mistakes is invisible: with it, a program runs the same operators to the same end as without it.

It used to read whatever forward was given, with operators that modes, tracers and subclasses saw. Sparse, expanded and
cyclic inputs, subclasses, transforms and fake tensors ended training, each of which trains over PyTorch's wrapper.
"""

import dataclasses
import functools
import itertools
import random
import resource
import sys
import warnings

import pytest
import torch
from tests.logs import logged
from tests.modes import functions, operators
from tests.small_models import batch_of
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.masked import masked_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx import DistributedDataParallel
from phalanx.ddp.epoch_order import MOST_STEPS
from phalanx.ddp.invisible import elements_of
from phalanx.testing import run_ranks


class Wrapper(torch.Tensor):
    """A subclass without memory and without operators."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@dataclasses.dataclass
class Node:
    content: object
    parent: "Node | None" = None
    children: list = dataclasses.field(default_factory=list)
    unset: object = dataclasses.field(init=False)


class Strange:
    """An object that fails when it is asked for its class."""

    @property
    def __class__(self):
        raise RuntimeError("no class")


def _freed():
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


# Each makes something that forward is given beside its batch. Of the last ones there is no block of memory to look at.
READABLE = {
    "plain": lambda: torch.ones(5, 7),
    "transposed": lambda: torch.ones(5, 7).t(),
    "channels_last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(64, 128, dtype=torch.bool).expand(1000, 1000, 64, 128),
    "in mid-lane": lambda: torch.arange(9, dtype=torch.float32)[3:],
    "scalar": lambda: torch.tensor(2.5),
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
}
UNREADABLE = {
    "empty storage": _freed,
    "gaps": lambda: torch.ones(4, 6)[:, ::2],
    "overlaps": lambda: torch.ones(10).as_strided((4, 4), (1, 1)),
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.sparse_coo_tensor([[1], [2]], [1.0], (300_000, 300_000), check_invariants=True),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "onednn": lambda: torch.ones(3).to_mkldnn(),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "zeros": lambda: torch._efficientzerotensor(3),
    "masked": lambda: masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
    "wrapper": lambda: Wrapper(torch.ones(3)),
    "dtensor": lambda: distribute_tensor(torch.ones(3), init_device_mesh("cpu", (2,)), [Replicate()]),
}
CONTENTS = READABLE | UNREADABLE | {"no tensor": object, "strange": Strange}


def _cycle(content):
    mapping = {"content": content}
    mapping["itself"] = [mapping]
    return mapping


def _tree(content):
    root = Node(content)
    root.children = [Node(content, root), Node(None, root)]
    return root


STRUCTURES = {
    "itself": lambda content: content,
    "cycle": _cycle,
    "tree": _tree,
    "deep": lambda content: functools.reduce(lambda inner, _: [inner], range(5000), content),
    "wide": lambda content: ([[list(range(100))] * 100] * 5, content),
}
MODES = {"operators": operators, "functions": functions}


class Model(nn.Module):
    """It trains on a batch, and returns what else it is given as it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, batch, *others):
        return self.layers(batch), *others


def _stream(rank, others, mode, check):
    """What a mode sees in each of four steps, and the parameters after them."""
    ddp = DistributedDataParallel(Model(), check=check)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        batch = batch_of(rank, step, shape=(4, 3))
        with mode() as names:
            optimizer.zero_grad()
            ddp(batch, *others)[0].sum().backward()
            optimizer.step()
        seen.append(names)
    return seen, [parameter.tolist() for parameter in ddp.parameters()]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_mode_sees_the_operators_of_plain_training_on_each_rank(seed):
    cases = list(itertools.product(CONTENTS, STRUCTURES, MODES))
    chosen = random.Random(seed).sample(cases, 30 if seed else 10)

    def fn(rank, world_size):
        warnings.simplefilter("ignore")  # of prototypes
        found = {}
        for content, structure, mode in chosen:
            others = STRUCTURES[structure](CONTENTS[content]()), CONTENTS[content]()
            with logged("phalanx.ddp") as lines:
                watched = _stream(rank, others, MODES[mode], check=True)
            if mode == "operators":  # groups are in Python, where a function mode sees what only a source does
                found[content, structure, mode] = watched
            assert watched == _stream(rank, others, MODES[mode], check=False), (content, structure, mode)
            assert lines == [], (content, structure, mode)
        return found

    first, second = run_ranks(fn, 2)
    assert first == second


@pytest.mark.parametrize("name", READABLE)
def test_what_can_be_looked_at_is_looked_at_where_it_lies(name):
    tensor = READABLE[name]()
    elements = elements_of(tensor)
    assert elements.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert elements.numel() == len(set(elements.tolist())) or elements.unique().numel() == 1
    assert elements.numel() == tensor.numel() // (10**6 if name == "expanded" else 1)
    assert not elements.requires_grad


@pytest.mark.parametrize("name", [name for name in UNREADABLE if name != "dtensor"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_block_of_memory_is_not_looked_at(name):
    assert elements_of(UNREADABLE[name]()) is None


def test_a_mask_of_128_gigabytes_in_4_megabytes_takes_no_memory():
    def fn(rank, world_size):
        mask = torch.ones(2048, 2048, dtype=torch.bool).expand(64, 512, 2048, 2048)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _stream(rank, (mask,), operators, check=True)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

    assert max(run_ranks(fn, 2)) < 64 * 2**20


def _contexts():
    def decide(context, operator, *args, **kwargs):
        save = operator in (torch.ops.aten.addmm.default, torch.ops.aten.sum.default)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _transform(function, x, name):
    """What a transform makes of a function of a batch."""
    match name:
        case "vmap":
            return torch.func.vmap(function)(x)
        case "hessian":
            return torch.func.hessian(lambda one: function(one).sum())(x)
        case "jvp":
            return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
        case "trace":
            return torch.jit.trace(function, x)(x)
        case "make_fx":
            return make_fx(function)(x)(x)
        case "checkpoint":
            return checkpoint(function, x, use_reentrant=False, context_fn=_contexts)
        case _:
            raise ValueError(name)


@pytest.mark.slow(but=("vmap", "checkpoint"))
@pytest.mark.parametrize("name", ["vmap", "hessian", "jvp", "trace", "make_fx", "checkpoint"])
def test_transforms_and_traces_see_the_module_alone(name):
    def fn(rank, world_size):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        ddp = DistributedDataParallel(module)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a tracer that has met a number
            warnings.simplefilter("ignore", DeprecationWarning)
            # Forward-mode differentiation scripts functions of torch's own, too.
            warnings.filterwarnings("ignore", "`torch.jit.* is not supported in Python 3.14", FutureWarning)
            for step in range(4):
                x = batch_of(rank, step, shape=(4, 3))
                torch.testing.assert_close(_transform(ddp, x, name), _transform(module, x, name))
        ddp(batch_of(rank, shape=(4, 3))).sum().backward()
        return [parameter.grad.tolist() for parameter in ddp.parameters()]

    first, second = run_ranks(fn, 2)
    assert first == second


def test_a_recomputation_before_the_wrappers_own_backward_is_not_looked_at():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(Model())
        head = nn.Linear(2, 1)
        seen = []
        for step in range(4):
            x = batch_of(rank, step, shape=(4, 3))
            checkpoint(lambda x: head(ddp(x)[0]), x, use_reentrant=False, context_fn=_contexts).sum().backward()
            seen.append([parameter.grad.tolist() for parameter in ddp.parameters()])
        return seen

    first, second = run_ranks(fn, 2)
    assert first == second


def test_a_forward_with_fake_tensors_leaves_nothing_behind():
    """The weights of the digest were fake from then on, and the next real wrapper failed."""

    def fn(rank, world_size):
        faked = DistributedDataParallel(nn.Linear(3, 2))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked(mode.from_tensor(torch.ones(4, 3)))
        ddp = DistributedDataParallel(nn.Linear(3, 2))
        with logged("phalanx.ddp") as lines:
            for _ in range(3):
                ddp(torch.ones(4, 3)).sum().backward()
        return [("same batch" in line) for line in lines]

    assert run_ranks(fn, 2) == [[True], []]


def test_an_error_in_the_watch_ends_the_watch_of_its_rank_alone():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(Model())
        with logged("phalanx.ddp") as lines:
            if rank == 1:
                ddp._reducer.watch.on_gradient(100)  # there is no such parameter
                assert ddp._reducer.watch.disabled
            for _ in range(5):
                ddp(torch.ones(4, 3))[0].sum().backward()
        return lines

    (line,), *others = run_ranks(fn, 3)
    assert "ranks 0 and 2 were given the same batch in each of the first 3 steps" in line
    assert others == [[], []]


def _count_calls(function):
    """How many functions of Python a function calls."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("others", [(), ([list(range(100))] * 1000,)], ids=["batch", "batch and 100,000 ints"])
def test_after_its_steps_it_costs_nothing(others):
    """Rank 0 went on walking through each batch, in every forward."""

    def fn(rank, world_size):
        calls = []
        for check in (True, False):
            ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2)), check=check, broadcast_buffers=False)
            forward = functools.partial(ddp._before_forward, ((batch_of(rank, shape=(4, 3)), others), {}))
            for _ in range(MOST_STEPS + 1 if not others else 5):
                forward()
            for step in range(3):
                ddp(batch_of(rank, step, shape=(4, 3))).sum().backward()
            calls.append(_count_calls(forward))
        return calls

    found = {number for calls in run_ranks(fn, 2) for number in calls}
    assert len(found) == 1
