"""torch.compile over functions that call collectives: the graph holds them, and the numbers are the same.

Dynamo traced on into the methods of our groups and works, which are Python where torch's are C++: compiled DDP, a work,
broadcast, messages and the sharded optimizer ended in "UnsafeScriptObjectError: Attempted to access unregistered member
on an OpaqueObject" or a RecursionError; a compiled step with our DDP, in a compiled gradient hook.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.utils.cpp_extension
from tests.small_models import mlp

import phalanx
from phalanx._comm.backend.dynamo import untraced
from phalanx.testing import run_ranks

# Of the names that torch 2.13 deprecates, the older are what people use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated:FutureWarning",
    "ignore::DeprecationWarning",
    "ignore::UserWarning",  # Dynamo's own, of what it meets in torch.distributed: over Gloo as well
)


def _functional(x):
    y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    gathered = functional.all_gather_tensor(y + 1, 0, dist.group.WORLD)
    return functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD).sum()


def _in_place(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


@pytest.mark.slow(but=("_functional",))
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


def _work(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    return y + 1


def _broadcast(x):
    y = x * 2
    dist.broadcast(y, 1)
    return y + 1


def _messages(x):
    y, other = x * 2, 1 - dist.get_rank()
    z = torch.empty_like(y)
    if other:
        dist.send(y, other)
        dist.recv(z, other)
    else:
        dist.recv(z, other)
        dist.send(y, other)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, z, other), dist.P2POp(dist.irecv, y, other)])
    for work in works:
        work.wait()
    return y + z


def _others(x):
    y, part, whole = x * 2, torch.empty(2), torch.empty(8)
    parts = [torch.empty_like(y), torch.empty_like(y)]
    dist.all_gather(parts, y)
    dist.all_gather_into_tensor(whole, y)
    dist.reduce_scatter_tensor(part, y)
    dist.all_to_all_single(y, x)
    dist.reduce(y, 0)
    dist.barrier()
    return part.sum() + whole.sum() + parts[0] + parts[1] + y.sum() * (dist.get_rank() == 0)


def _trained(make_step, compiler=None):
    """The parameters after three steps with `make_step(model)`, compiled by `compiler`."""
    model = mlp((8, 16, 4), activation=torch.nn.ReLU)
    step = make_step(model)
    if compiler is not None:
        torch.compiler.reset()
        step = torch.compile(step, backend=compiler)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        step(torch.randn(3, 8))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _step(wrapper, optimizer=torch.optim.SGD, **arguments):
    """What makes a step of training from a model."""

    def make(model):
        parallel = wrapper(model, **arguments)
        optim = optimizer(model.parameters(), lr=0.1)

        def step(x):
            optim.zero_grad()
            parallel(x).square().mean().backward()
            optim.step()

        return step

    return make


def _sharded(parameters, lr):
    return phalanx.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=lr)


def _forward_of(model):
    """torch's wrapper compiled from outside, as most write it; backward and the step are not."""
    parallel = torch.nn.parallel.DistributedDataParallel(model, static_graph=True)
    return lambda x: parallel(x).square().mean().backward()


def _compile_all(rank, world_size, compilers, libraries):
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes for a few lines
    torch.utils.cpp_extension.TORCH_LIB_PATH = libraries
    for function in (_work, _broadcast, _messages, _others):
        x = torch.arange(4.0) + rank
        assert torch.equal(torch.compile(function, backend="aot_eager")(x), function(x)), function.__name__
    ddp = torch.nn.parallel.DistributedDataParallel
    made = {
        "static ddp": _step(ddp, static_graph=True),
        "forward of ddp": _forward_of,
        "our ddp and sharded optimizer": _step(phalanx.DistributedDataParallel, _sharded),
    }
    for compiler in compilers:
        for name, make in made.items() if compiler == "aot_eager" else [("static ddp", made["static ddp"])]:
            torch.testing.assert_close(_trained(make, compiler), _trained(make), msg=f"{name}, {compiler}")


@pytest.mark.slow
def test_what_torch_compiles_gives_what_it_gives_uncompiled():
    compilers = ["aot_eager", *(["inductor"] if shutil.which("c++") or shutil.which("g++") else [])]
    # Torch's inductor hands its folders to the compiler without quotes: where one has a space in it, nothing compiles.
    # Some of them it knows from its import on, so that it is imported where TMPDIR has none.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "torch").symlink_to(Path(torch.__file__).parent / "lib")
        environ = {**os.environ, "TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        line = (sys.executable, "-c", f"import {__name__}; {__name__}._run_all({compilers}, {folder!r})")
        done = subprocess.run(line, env=environ, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def _run_all(compilers, folder):
    run_ranks(_compile_all, 2, compilers, f"{folder}/torch")


@pytest.mark.slow
def test_joining_does_not_import_dynamo():
    """It costs a second, and only a program that compiles needs it."""
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.all_reduce(torch.ones(1), async_op=True).wait()\n"
        "print('torch._dynamo' in sys.modules)\n"
        "dist.destroy_process_group()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.slow
def test_the_code_of_a_decorator_is_not_ours_to_mark():
    """`torch.no_grad()` wraps every function in the same code: marked, no such function would be compiled any more."""

    class Marked:
        @torch.no_grad()
        def ours(self):
            return 1

    untraced(Marked)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.no_grad()
    def theirs(x):
        return x + 1

    torch.compile(theirs, backend=keep)(torch.ones(1))
    assert len(graphs) == 1
