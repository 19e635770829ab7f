"""A checkpoint knows no wrapper: PyTorch's DDP, ours and the plain module load each other's.

PyTorch's DDP could not load the `state_dict()` of ours, whose keys had no `module.`; and what ours had saved through a
module that contains it had other keys than PyTorch's.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from tests.small_models import batchnorm_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import phalanx

# torch's planner and its state_dict of optimizers still call parts of torch that it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _model(seed, holder=False):
    model = batchnorm_model(seed=seed)
    return nn.ModuleDict({"module": model, "head": nn.Linear(2, 2)}) if holder else model


def _weights(model):
    return {name.replace("module.", ""): tensor.clone() for name, tensor in model.state_dict().items()}


@on_ranks(2)
def test_every_wrapper_loads_what_every_other_gives():
    """Every kind of wrapper loads what every other kind gives, strictly."""
    wraps = {"torch": nn.parallel.DistributedDataParallel, "ours": phalanx.DistributedDataParallel}
    for holder in (False, True):
        for name, wrap in wraps.items():
            for other, wrap_other in wraps.items():
                source, target = wrap(_model(1, holder)), wrap_other(_model(2, holder))
                assert list(source.state_dict()) == list(target.state_dict()), (name, other)
                assert source.state_dict()._metadata.keys() == target.state_dict()._metadata.keys()
                target.load_state_dict(source.state_dict())
                assert_equal(_weights(source), _weights(target), name, other)
                inside = nn.Sequential(wrap_other(_model(2, holder)))
                inside.load_state_dict(nn.Sequential(source).state_dict())
                assert_equal(_weights(source), _weights(inside[0]), name, other)
            plain = _model(3, holder)
            state = source.state_dict()
            consume_prefix_in_state_dict_if_present(state, "module.")
            plain.load_state_dict(state)
            assert_equal(_weights(source), _weights(plain), name)
            plain = _model(4, holder)
            target.load_state_dict(plain.state_dict())  # ours: what earlier versions saved, and the plain module
            assert_equal(_weights(plain), _weights(target), name)


@on_ranks(2)
def test_torchs_distributed_checkpoint_goes_both_ways(tmp_path):
    """torch.distributed.checkpoint knows PyTorch's wrapper by its class; of ours it is given the module."""
    folder = str(tmp_path)
    kinds = {
        "torch": (nn.parallel.DistributedDataParallel, lambda ddp: ddp),
        "ours": (phalanx.DistributedDataParallel, lambda ddp: ddp.module),
        "plain": (lambda model: model, lambda model: model),
    }
    for name, (wrap, bare) in kinds.items():
        model = wrap(_model(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        weights, moments = get_state_dict(bare(model), optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{name}")
        for other, (wrap_other, bare_other) in kinds.items():
            target = wrap_other(_model(2))
            twin = torch.optim.SGD(target.parameters(), lr=0.1, momentum=0.9)
            weights, moments = get_state_dict(bare_other(target), twin)
            state = {"model": weights, "optimizer": moments}
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
            set_state_dict(
                bare_other(target), twin, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            assert_equal(_weights(model), _weights(target), name, other)
            assert len(twin.state_dict()["state"]) == 6
        if name == "ours":  # and the wrapper itself, into a wrapper of ours
            weights, _ = get_state_dict(model, optimizer)
            target = wrap(_model(2))
            target.load_state_dict(weights)
            assert_equal(_weights(model), _weights(target))
