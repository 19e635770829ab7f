"""The wrapper: state, buffers, names, arguments, and what it refuses."""

import copy
import gc
import inspect
import io
import os
import pickle
import platform
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from phalanx import DistributedDataParallel
from phalanx.testing import run_ranks


def _norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


alone = on_ranks(1, backend="gloo")  # what a test wraps needs a process group, and leaves none behind


def test_construction_gives_every_rank_the_state_of_rank_0(backend):
    def fn(rank, world_size):
        torch.manual_seed(rank)
        model = nn.Sequential(_norm(), nn.Linear(4, 2, dtype=torch.bfloat16), nn.Linear(2, 2).requires_grad_(False))
        model.register_buffer("flag", torch.tensor(rank == 0))
        model.register_buffer("none", torch.empty(0))
        model[0][1].running_mean.fill_(rank)
        return DistributedDataParallel(model).state_dict()

    first, *others = run_ranks(fn, 3, backend=backend)
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name]), name
    assert first["module.flag"].item() is True


def test_init_sync_false_leaves_each_rank_its_own_state():
    def fn(rank, world_size):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, rank)
        return DistributedDataParallel(model, init_sync=False).module.weight.item()

    assert run_ranks(fn, 2, backend="gloo") == [0.0, 1.0]


@pytest.mark.parametrize(("options", "expected"), [({}, 0.0), ({"broadcast_buffers": False}, 1.0)], ids=str)
def test_buffers_follow_rank_0_before_each_forward_unless_told_otherwise(backend, options, expected):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(_norm(), **options)
        ddp(torch.randn(4, 3)).sum().backward()
        ddp.module[1].running_mean.fill_(rank)
        ddp.eval()
        with torch.no_grad():
            ddp(torch.randn(4, 3))
        mean = ddp.module[1].running_mean[0].item()
        with torch.no_grad():
            if rank == 0:
                ddp(
                    torch.randn(4, 3)
                )  # nothing has changed since: evaluation on one rank alone does not wait for others
        return mean

    assert run_ranks(fn, 2, backend=backend)[1] == expected


@on_ranks(2, backend="gloo")
def test_a_buffer_that_autograd_saved_can_be_broadcast_before_backward():
    ddp = DistributedDataParallel(_norm().eval())
    losses = [ddp(torch.randn(4, 3)).sum() for _ in range(2)]
    sum(losses).backward()


@alone
def test_state_has_the_keys_of_the_tree_of_modules_and_that_of_the_module_loads_into_a_bare_one():
    """The keys were the bare module's: PyTorch's wrapper did not load them."""
    ddp = DistributedDataParallel(_norm())
    assert [f"module.{name}" for name in _norm().state_dict()] == list(ddp.state_dict())
    _norm().load_state_dict(ddp.module.state_dict())
    bare = ddp.state_dict()
    consume_prefix_in_state_dict_if_present(bare, "module.")
    _norm().load_state_dict(bare)
    first, *_ = dict(ddp.named_parameters())
    assert first == "module.0.weight"


@pytest.mark.parametrize("prefix", ["", "module."])
@alone
def test_both_kinds_of_state_load(prefix):
    source, ddp = _norm(), DistributedDataParallel(_norm())
    ddp.load_state_dict({prefix + name: value for name, value in source.state_dict().items()})
    assert torch.equal(ddp.module[0].weight, source[0].weight)


@alone
def test_a_child_named_module_is_not_mistaken_for_the_prefix():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.zeros(2))  # with the prefix, its name is the child's

    source, ddp = Holder(), DistributedDataParallel(Holder())
    assert list(ddp.state_dict()) == ["module.weight", "module.module.weight", "module.module.bias"]
    for prefix in ("", "module."):
        nn.init.normal_(source.weight)
        nn.init.normal_(source.module.weight)
        ddp.load_state_dict({prefix + name: value for name, value in source.state_dict().items()})
        assert torch.equal(ddp.module.module.weight, source.module.weight)
        assert torch.equal(ddp.module.weight, source.weight)


@alone
def test_state_passes_through_a_module_that_contains_the_wrapper():
    outer = nn.Sequential(DistributedDataParallel(_norm()), nn.Linear(4, 4))
    for number, bare in enumerate((False, True)):  # bare as in checkpoints of earlier versions
        state = {name: torch.full_like(value, number) for name, value in outer.state_dict().items()}
        assert "0.module.0.weight" in state
        if bare:
            state = {name.replace("0.module.", "0."): value for name, value in state.items()}
        outer.load_state_dict(state)
        assert outer[0].module[0].weight[0, 0].item() == number


@alone
def test_loading_reports_what_does_not_fit_under_the_names_that_it_was_given():
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "module.bias"'):
        ddp.load_state_dict({"module.weight": torch.ones(2, 2)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        ddp.load_state_dict({"weight": torch.ones(2, 2)})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "module.other"'):
        ddp.load_state_dict({**ddp.state_dict(), "module.other": torch.ones(1)})
    assert ddp.load_state_dict({"weight": torch.ones(2, 2)}, strict=False).missing_keys == ["bias"]
    with pytest.raises(ValueError, match="would replace the parameters"):
        ddp.load_state_dict(ddp.state_dict(), assign=True)


@alone
def test_modes_and_attributes_reach_the_wrapped_module_and_others_are_not_forwarded():
    module = _norm()
    module.extra = 3
    ddp = DistributedDataParallel(module)
    assert ddp.module is module
    assert not ddp.eval().module[1].training
    assert ddp.train().module[1].training
    with pytest.raises(AttributeError, match="extra"):
        _ = ddp.extra


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps, lambda ddp: torch.save(ddp, io.BytesIO())])
@alone
def test_copies_and_pickles_are_refused_and_those_of_the_module_are_not(act):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    with pytest.raises(TypeError, match=r"cannot be pickled or copied.*Save ddp\.state_dict\(\)"):
        act(ddp)
    act(ddp.module)


@alone
def test_a_dropped_wrapper_is_freed_and_leaves_the_module_free_of_hooks():
    module = nn.Linear(2, 2)
    ddp = DistributedDataParallel(module)
    reducer = weakref.ref(ddp._reducer)
    module(torch.ones(1, 2)).sum().backward()  # past the wrapper: nothing to average, nothing to raise
    del ddp
    gc.collect()
    assert reducer() is None
    again = DistributedDataParallel(module)
    again(torch.ones(1, 2)).sum().backward()
    assert len(module.weight._post_accumulate_grad_hooks) == 1


@alone
def test_forward_passes_anything_through():
    class Anything(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, *args, **kwargs):
            return args, kwargs, None, "text", self.weight

    args, kwargs, *rest = DistributedDataParallel(Anything())(1, key=object)
    assert (args, kwargs, rest[:2]) == ((1,), {"key": object}, [None, "text"])


@alone
def test_functional_call_runs_with_other_parameters():
    ddp = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    other = {"module.weight": torch.tensor([[2.0, 3.0]])}
    assert torch.func.functional_call(ddp, other, (torch.ones(1, 2),)).item() == 5.0


@on_ranks(3)
def test_a_group_of_some_ranks_averages_among_them(rank, backend):
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    ddp = DistributedDataParallel(nn.Linear(1, 1), process_group=groups[rank % 2])
    ddp(torch.full((1, 1), float(rank))).sum().backward()
    assert ddp.module.weight.grad.item() == 1.0


@on_ranks(2, backend="gloo")
def test_a_device_mesh_names_the_group(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    ddp = DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh)
    ddp(torch.full((1, 1), float(rank))).sum().backward()
    with pytest.raises(ValueError, match="process_group or device_mesh, not both"):
        DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="one axis, got 2 axes"):
        DistributedDataParallel(nn.Linear(1, 1), device_mesh=init_device_mesh("cpu", (world_size, 1)))
    assert ddp.module.weight.grad.item() == 0.5


def test_the_arguments_are_those_of_pytorch_in_the_same_order():
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    differing = {name for name, parameter in theirs.items() if ours[name].default != parameter.default}
    assert differing == {"gradient_as_bucket_view"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": object()}, r"does not support mixed_precision: use torch\.autocast"),
        ({"skip_all_reduce_unused_params": True}, "skip_all_reduce_unused_params: whole buckets are sent"),
        (
            {"delay_all_reduce_named_params": [1], "param_to_hook_all_reduce": 2},
            "_params: .*; param_to_hook_all_reduce: ",
        ),
        ({"device_ids": [0]}, r"device_ids=\[0\]: must be None for a module on the CPU"),
        ({"output_device": 0}, "output_device=0 without device_ids"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be above 0 MiB, got 0"),
        ({"bucket_cap_mb_list": [1, -1]}, r"bucket_cap_mb must be above 0 MiB, got \(1, -1\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
@alone
def test_what_is_not_supported_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        DistributedDataParallel(nn.Linear(2, 2), **options)


@alone
def test_bucket_caps_decide_the_plan():
    layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]  # 1 MiB each
    assert len(DistributedDataParallel(nn.Sequential(*layers)).plan.buckets) == 2  # 1 MiB first, then up to 25
    assert len(DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2).plan.buckets) == 2
    assert len(DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5).plan.buckets) == 4
    assert len(DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb_list=[1, 2]).plan.buckets) == 3


@alone
def test_check_reduction_warns_that_it_does_nothing():
    with pytest.warns(FutureWarning, match="check_reduction has no effect"):
        DistributedDataParallel(nn.Linear(2, 2), check_reduction=True)


@alone
def test_a_module_with_nothing_to_train_is_refused():
    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
            DistributedDataParallel(module)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@alone
def test_a_lazy_module_is_refused_by_its_parameters_name():
    with pytest.raises(RuntimeError, match="Parameter 'weight' has no shape yet"):
        DistributedDataParallel(nn.LazyLinear(2))


@alone
def test_a_module_on_several_devices_is_refused():
    with pytest.raises(ValueError, match="one device, but this module is on cpu, meta"):
        DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), init_sync=False)


def test_without_a_process_group_the_message_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"needs a process group: call phalanx\.init\(\)"):
        DistributedDataParallel(nn.Linear(2, 2))


@pytest.mark.parametrize("by", ["attribute", "call"])
def test_parameters_and_buffers_that_the_module_lists_are_ignored(by):
    """Who has experts of its own on each rank calls PyTorch's static method, which our wrapper did not have."""

    def fn(rank, world_size):
        model = _norm()
        nn.init.constant_(model[0].weight, rank)
        ignored = ["0.weight", "1.running_mean"]
        if by == "call":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        else:
            model._ddp_params_and_buffers_to_ignore = ignored
        ddp = DistributedDataParallel(model)
        ddp(torch.randn(4, 3)).sum().backward()
        return ddp.module[0].weight[0, 0].item(), sum(len(bucket.slots) for bucket in ddp.plan.buckets)

    assert run_ranks(fn, 2, backend="gloo") == [(0.0, 3), (1.0, 3)]


_FREED = """
import resource, sys, tempfile
import torch
import torch.distributed as dist
from phalanx import DistributedDataParallel

dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
DistributedDataParallel(torch.nn.Linear(2, 2))
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(1 << 18) for _ in range(16)]  # of 1 MiB, freed together, as a step's activations
    del blocks
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
dist.destroy_process_group()
print(faults[-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(
    "variables", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}], ids=["as it is", "set up by the user"]
)
def test_memory_that_a_step_frees_is_there_in_the_next(variables):
    """glibc gave a small model's activations back in each step; 3 of a ResNet's 26 ms went into new pages for them."""
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", _FREED], env=clean | variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) < 1024) == (not variables)  # of 4096 pages
