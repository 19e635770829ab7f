"""torch.compile over functions that call collectives: the graph holds them, and the numbers are the same."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from phalanx.testing import run_ranks

# Of the names that torch 2.13 deprecates, the older are what people use.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore::DeprecationWarning")


def _functional(x):
    y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    gathered = functional.all_gather_tensor(y + 1, 0, dist.group.WORLD)
    return functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD).sum()


def _in_place(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


@pytest.mark.parametrize("function", [_functional, _in_place])
def test_a_compiled_function_gives_what_it_gives_uncompiled(function):
    def call(rank, world_size):
        graphs = []

        def keep(graph, inputs):
            graphs.append(graph)
            return graph.forward

        x = torch.arange(4.0) + rank
        result = torch.compile(function, backend=keep)(x)
        assert torch.equal(result, function(x))
        called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
        assert any("all_reduce" in name for name in called), called  # it was traced, not stepped around
        return result.sum().item()

    first, second = run_ranks(call, 2)
    assert first == second != 0
