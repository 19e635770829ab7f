"""Parameters that are added, unfrozen, frozen or replaced after the model was wrapped."""

import gc

import pytest
import torch
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from phalanx import DistributedDataParallel
from phalanx.ddp.late_parameters import LateParameters
from phalanx.testing import run_ranks


def _model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    return model


def _add_module(model):
    model.append(nn.Linear(2, 2))


def _add_parameter(model):
    model[1].register_parameter("scale", nn.Parameter(torch.ones(2)))


def _replace(model):
    model[1].weight = nn.Parameter(torch.ones(2, 2))


def _unfreeze(model):
    model[0].requires_grad_(True)


CHANGES = {
    _add_module: "'2.weight' and 1 more",
    _add_parameter: "'1.scale'",
    _replace: "'1.weight'",
    _unfreeze: "'0.bias'",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@on_ranks(2)
def test_a_newcomer_is_named_at_the_next_forward_on_every_rank(rank, backend, change):
    ddp = DistributedDataParallel(_model())
    ddp(torch.ones(1, 2)).sum().backward()
    change(ddp.module)
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(1, 2))
    message = str(caught.value)
    assert message.startswith(f"DistributedDataParallel on rank {rank}: {CHANGES[change]} needs a gradient, but was")
    assert "wrap it again, model = DistributedDataParallel(model.module)" in message


@pytest.mark.slow(but=("_add_module",))
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_wrapped_anew_as_the_message_says_the_newcomer_is_averaged(change):
    def fn(rank, world_size):
        model = DistributedDataParallel(_model())
        model(torch.ones(1, 2)).sum().backward()
        change(model.module)
        model = DistributedDataParallel(model.module)
        model.zero_grad()
        x = torch.ones(1, 2) * (rank + 1)
        y = model(x) * (model.module[1].scale if change is _add_parameter else 1)
        y.sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]

    first, second = run_ranks(fn, 2)
    assert_equal(first, second)


@on_ranks(1)
def test_a_newcomer_before_the_first_forward_is_named_too():
    ddp = DistributedDataParallel(_model())
    _add_module(ddp.module)
    with pytest.raises(RuntimeError, match=r"'2\.weight' and 1 more needs a gradient"):
        ddp(torch.ones(1, 2))


@on_ranks(1)
def test_evaluation_and_local_accumulation_may_go_on_with_a_newcomer():
    ddp = DistributedDataParallel(_model())
    _unfreeze(ddp.module)
    with torch.no_grad():
        ddp(torch.ones(1, 2))
    with ddp.no_sync():
        ddp(torch.ones(1, 2)).sum().backward()


@on_ranks(2)
def test_what_needs_no_gradient_or_is_ignored_may_come_and_models_elsewhere_do_not_matter():
    model = _model()
    model._ddp_params_and_buffers_to_ignore = ["mine"]
    ddp = DistributedDataParallel(model)
    model.register_parameter("mine", nn.Parameter(torch.ones(1)))
    model.register_parameter("still", nn.Parameter(torch.ones(1), requires_grad=False))
    model.add_module("act", nn.ReLU())
    _model()
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    model.still.requires_grad_(True)
    with pytest.raises(RuntimeError, match="'still' needs a gradient"):
        ddp(torch.ones(1, 2))


@on_ranks(2)
def test_a_parameter_frozen_between_steps_is_named_by_all_ranks(backend):
    ddp = DistributedDataParallel(_model())
    ddp(torch.ones(1, 2)).sum().backward()
    ddp.module[0].weight.requires_grad_(False)
    ddp(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight' \(Linear\) no longer requires a gradient"):
        ddp(torch.ones(1, 2))


@on_ranks(2)
def test_a_parameter_frozen_between_steps_is_left_out_where_parameters_may_be(rank, backend):
    ddp = DistributedDataParallel(_model(), find_unused_parameters=True)
    ddp(torch.ones(1, 2)).sum().backward()
    ddp.module[0].weight.requires_grad_(False)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 2), float(rank))).sum().backward()
    assert [parameter.grad is None for parameter in ddp.parameters()] == [True, True, False, False]


def test_the_tree_is_walked_only_after_something_was_registered(monkeypatch):
    model = _model()
    late_parameters = LateParameters(model, [p for p in model.parameters() if p.requires_grad], [])
    walks = []
    walk = model.named_parameters
    monkeypatch.setattr(model, "named_parameters", lambda *args: walks.append(1) or walk(*args))
    assert late_parameters.find_newcomers() == []
    assert walks == []
    nn.Linear(1, 1)  # anywhere
    assert late_parameters.find_newcomers() == late_parameters.find_newcomers() == []
    assert walks == [1]


@pytest.mark.slow
@on_ranks(2)
def test_a_model_may_become_a_part_of_another_and_be_compiled():
    # All its parameters arrive once more, with the module that is registered.
    ddp = DistributedDataParallel(_model())
    outer = nn.Sequential(ddp, nn.ReLU())
    torch.compile(ddp, backend="eager")(torch.ones(1, 2)).sum().backward()
    outer.append(nn.Sequential(ddp.module[0]))
    ddp.module.add_module("again", ddp.module[1])
    ddp(torch.ones(1, 2)).sum().backward()
    assert ddp.module[1].bias.grad is not None


@pytest.mark.parametrize("scale", [None, 2.0])
@on_ranks(2)
def test_tensors_that_stand_in_for_parameters_are_no_newcomers(rank, scale):
    gradients = [scale is None, True, scale is None, scale is None]
    ddp = DistributedDataParallel(_model())
    nn.Linear(1, 1)  # something was registered: the tree is walked
    stand_ins = {
        name: nn.Parameter(p.detach().clone()) if scale is None else p * scale for name, p in ddp.named_parameters()
    }
    loss = torch.func.functional_call(ddp, stand_ins, (torch.ones(1, 2) * rank,)).sum()
    loss.backward()
    assert [p.grad is None for p in ddp.parameters()] == gradients
    assert stand_ins["module.1.weight"].is_leaf == (scale is None)


@on_ranks(1)
def test_a_wrapper_that_is_collected_while_torch_calls_its_hooks_does_no_harm():
    """Building a model failed then: "OrderedDict mutated during iteration"; an optimizer's step could as well."""

    def hooks():
        return [
            len(found)
            for found in (
                torch_module._global_parameter_registration_hooks,
                torch_module._global_module_registration_hooks,
                torch_optimizer._global_optimizer_pre_hooks,
            )
        ]

    def collect(*_):
        gc.collect()

    def drop_one():
        ddp = DistributedDataParallel(_model())
        ddp.itself = [ddp]  # only the garbage collector finds it

    kept = DistributedDataParallel(_model())
    counted = hooks()
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)
    gc.disable()
    first = torch_module.register_module_module_registration_hook(collect)
    second = torch_module.register_module_parameter_registration_hook(collect)
    third = register_optimizer_step_pre_hook(collect)
    for _ in range(3):
        drop_one()
        _model()  # modules and parameters are registered, and the wrapper is collected meanwhile
        drop_one()
        kept(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    for handle in (first, second, third):
        handle.remove()
    assert hooks() == counted
