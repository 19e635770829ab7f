"""SyncBatchNorm trains with parametrized layers and absent statistics as one process with the whole batch."""

import pytest
import torch.distributed as dist
from tests.nn.batchnorms import CHANNELS, _batch, _check, _randomized, _slopes, _steps
from tests.on_ranks import on_ranks
from torch import nn
from torch.nn.utils import parametrize

from phalanx import SyncBatchNorm
from phalanx.testing import run_ranks


class _Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_parametrized_layers_are_converted_and_train_as_in_one_process():
    """Conversion took the class that has the parametrized weight: AttributeError."""

    def make():
        layer = _randomized(nn.BatchNorm1d(CHANNELS))
        parametrize.register_parametrization(layer, "weight", _Halved())
        return layer

    x, slopes = _batch(6), _slopes(6, CHANNELS)
    expected = _steps(make(), x, slopes)

    def run(rank, world_size):
        model = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(make(), make()))
        assert isinstance(model[0], SyncBatchNorm)
        results = _steps(model[0], x.split([2, 4])[rank], slopes.split([2, 4])[rank])
        parametrize.remove_parametrizations(model[1], "weight")
        assert type(model[1]) is SyncBatchNorm
        assert isinstance(model[1].weight, nn.Parameter)
        return results

    _check(run_ranks(run, 2), expected, [2, 4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("absent", [["num_batches_tracked"], ["running_mean", "running_var"]])
def test_statistics_that_are_none_are_not_tracked(absent, momentum):
    """It was an AssertionError without a word; PyTorch's layer trains."""

    def make(kind):
        layer = _randomized(kind(CHANNELS, momentum=momentum))
        for name in absent:
            setattr(layer, name, None)
        return layer

    x, slopes = _batch(6), _slopes(6, CHANNELS)
    expected = _steps(make(nn.BatchNorm1d), x, slopes)

    def run(rank, world_size):
        return _steps(make(SyncBatchNorm), x.split([2, 4])[rank], slopes.split([2, 4])[rank])

    _check(run_ranks(run, 2), expected, [2, 4], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_a_group_that_a_rank_is_not_in_is_refused_there(rank):
    layer = SyncBatchNorm(CHANNELS, process_group=dist.new_group([0]))
    if rank == 0:
        layer(_batch(4))
    else:
        with pytest.raises(ValueError, match="this rank is not in process_group"):
            layer(_batch(4))
    layer.eval()(_batch(4))
