"""Every undocumented name of torch that the package uses is in the installed torch; one that is not fails by name."""

import ast
import functools
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.compatibility.run import PAIRS
from tests.sources import tree as parse

from phalanx._base.torch_names import describe_missing, resolve
from phalanx._base.torch_versions import OLDEST, TESTED, describe_untested

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "phalanx"

# A private attribute of an object whose class the walk cannot see: where torch has it. Classes have it as an attribute;
# a module's source mentions it, where objects get it as they are made or used.
OWNERS = {
    "_auto_collation": "torch.utils.data.dataloader",
    "_backward_cls": "torch.autograd.function",
    "_backward_hooks": "torch.nn.modules.module",
    "_build_debug_param_to_name_mapping": "torch.nn.parallel.DistributedDataParallel",
    "_build_params_for_reducer": "torch.nn.parallel.DistributedDataParallel",
    "_build_tree": "torch.autograd.profiler_util.EventList",
    "_call_end_callbacks_on_future": "torch.autograd.profiler.record_function",
    "_cdata": "torch.UntypedStorage",
    "_ddp_init_helper": "torch.nn.parallel.DistributedDataParallel",
    "_ddp_params_and_buffers_to_ignore": "torch.nn.parallel.distributed",
    "_devices": "torch._C._distributed_c10d.ProcessGroupGloo._Options",
    "_get_root_mesh": "torch.distributed.device_mesh.DeviceMesh",
    "_has_rebuilt_buckets": "torch.nn.parallel.distributed",
    "_in_backward_optimizers": "torch.distributed.optim.apply_optimizer_in_backward",
    "_indices": "torch.Tensor",
    "_is_full_backward_hook": "torch.nn.modules.module",
    "_ModeStackStateForPreDispatch__infra_modes": "torch._ops._mode_stack_state_for_pre_dispatch",
    "_is_profiler_enabled": "torch.autograd.profiler",
    "_join_config": "torch.distributed.algorithms.join",
    "_load_state_dict_pre_hooks": "torch.nn.modules.module",
    "_MapDatasetFetcher": "torch.utils.data._utils.fetch",
    "_non_persistent_buffers_set": "torch.nn.modules.module",
    "_num_workers": "torch.utils.data.dataloader",
    "_num_yielded": "torch.utils.data.dataloader",
    "_opt_called": "torch.optim.lr_scheduler",
    "_optimizer_step_post_hooks": "torch.optim.optimizer",
    "_optimizer_step_pre_hooks": "torch.optim.optimizer",
    "_per_optimizer_states": "torch.amp.grad_scaler",
    "_pg": "torch.distributed.checkpoint._pg_transport",
    "_post_accumulate_grad_hooks": "torch.Tensor",
    "_register_backend": "torch.distributed.ProcessGroup",
    "_schema": "torch._ops",
    "_set_default_backend": "torch.distributed.ProcessGroup",
    "_set_unwrap_func": "torch.futures.Future",
    "_torchdynamo_disable": "torch._dynamo.eval_frame",
    "_torchdynamo_disable_msg": "torch._dynamo.eval_frame",
    "_wrapped_async_rpc_function": "torch.distributed.rpc.functions",
    "_wrapped_by_lr_sched": "torch.optim.lr_scheduler",
}

# What autograd's nodes have saved for backward: the node that has it.
SAVED = {
    "_saved_alpha": lambda x: torch.sub(x, x),
    "_saved_input": lambda x: torch.nn.functional.conv1d(x, x),
    "_saved_dilation": lambda x: torch.nn.functional.conv1d(x, x),
    "_saved_groups": lambda x: torch.nn.functional.conv1d(x, x),
    "_saved_output_padding": lambda x: torch.nn.functional.conv1d(x, x),
    "_saved_padding": lambda x: torch.nn.functional.conv1d(x, x),
    "_saved_stride": lambda x: torch.nn.functional.conv1d(x, x),
    "_saved_transposed": lambda x: torch.nn.functional.conv1d(x, x),
    "_set_sequence_nr": lambda x: x + x,
    "_input_metadata": lambda x: x + x,
    "_sequence_nr": lambda x: x + x,
}

# Of Python's own library, and numpy's; and what the package itself sets on functions.
OTHERS = {
    "_calls_function", "_calls_method",
    "_args_from_interpreter_flags", "_bit_generator", "_config", "_exit", "_getframe", "_inst", "_rand",
    "_replace", "_run_exitfuncs", "_run_module_as_main", "_shutdown",
}  # fmt: skip


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {file: parse(file) for file in sorted(PACKAGE.rglob("*.py"))}


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def aliases(tree: ast.Module) -> dict[str, str]:
    """Return the path in torch for which each name of a module stands."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for _ in range(2):  # an alias of an alias
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                path = path_of(node.value, found)
                if path and len(targets) == 1 and isinstance(targets[0], ast.Name):
                    found.setdefault(targets[0].id, path)
    return found


def path_of(node: ast.AST, known: dict[str, str]) -> str:
    """The dotted name in torch that an expression stands for, or nothing."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = path_of(node.value, known)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Call):
        called, first = node.func, node.args[0] if node.args else None
        if isinstance(called, ast.Attribute) and called.attr == "import_module" and isinstance(first, ast.Constant):
            return first.value if str(first.value).split(".")[0] == "torch" else ""
        if isinstance(called, ast.Name) and called.id == "distributed_c10d":
            return "torch.distributed.distributed_c10d"
    return ""


def own_names() -> set[str]:
    """Private names that the package itself gives to something."""
    found = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found


@functools.cache
def used_names() -> frozenset[tuple[str, str, str]]:
    """Each private name that is not the package's own: where it is used, its path in torch if that is known, and it."""
    return frozenset(_find_used())


def _find_used() -> Iterator[tuple[str, str, str]]:
    own = own_names()
    for file, tree in trees().items():
        known, name_of_file = aliases(tree), str(file.relative_to(PACKAGE.parent))
        for node in ast.walk(tree):
            where = f"{name_of_file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                for alias in node.names:
                    if is_private(path := f"{node.module}.{alias.name}"):
                        yield where, path, alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "torch" and is_private(alias.name):
                        yield where, alias.name, alias.name.rpartition(".")[2]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if (
                    node.value.startswith("torch.")
                    and " " not in node.value.partition("(")[0]
                    and is_private(node.value)
                ):
                    yield where, node.value, node.value
            elif isinstance(node, ast.Attribute):
                path = path_of(node, known)
                if path and is_private(path):
                    yield where, path, node.attr
                elif not path and node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own:
                    yield where, "", node.attr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
                named = node.args[1]
                if node.func.id not in ("getattr", "hasattr", "setattr", "delattr") or not isinstance(
                    named, ast.Constant
                ):
                    continue
                if is_private(str(named.value)) and named.value not in own:
                    base = path_of(node.args[0], known)
                    yield where, f"{base}.{named.value}" if base else "", named.value


def problem_with(path: str, name: str) -> str:
    """Say what the installed torch lacks, or return nothing."""
    if path:
        return describe_missing(path)
    if name in OTHERS:
        return ""
    if name in SAVED:
        with torch.enable_grad():
            node = SAVED[name](torch.ones(1, 1, 1, requires_grad=True)).grad_fn
        return "" if hasattr(node, name) else f"has no {name} in {node.name()}"
    if name not in OWNERS:
        return f"may have {name} or not: say in OWNERS of this test where it is"
    owner = resolve(OWNERS[name])
    if hasattr(owner, name):
        return ""
    source = getattr(owner, "__file__", None)
    if source and name in Path(source).read_text():
        return ""
    return f"has no {name} in {OWNERS[name]}"


@pytest.fixture
def inductor_folder(monkeypatch):
    """Restore the variable that torch._dynamo sets when it is imported."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")


@pytest.mark.slow
@pytest.mark.usefixtures("inductor_folder")
def test_every_private_name_that_is_used_is_in_this_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its modules as they are imported
        problems = {(path, name): problem_with(path, name) for _, path, name in used_names()}
    wrong = sorted(
        {f"{where}: torch {problem}" for where, path, name in used_names() if (problem := problems[path, name])}
    )
    assert wrong == []


def is_patch(where: str) -> bool:
    """Whether a line is in the room whose patches are probed, each as a whole, by a table of their own."""
    return "/torch_integration/" in where


@pytest.mark.lint
def test_each_private_name_is_looked_up_where_it_can_be_missing():
    """An import, or an attribute, of a name that a later torch lacks takes with it whatever stands in the same file."""
    taken = [f"{where}: {path}" for where, path, name in used_names() if path and name != path and not is_patch(where)]
    assert [line for line in sorted(taken) if not line.startswith("phalanx/nn/sync_batchnorm.py")] == []  # for mypy


# Without the names that it reads: what uses them is imported, a job begins, reduces, and trains a step.
PROGRAM = """
import importlib, json, sys
import torch, torch.distributed as dist, torch.nn.parallel.distributed, torch.optim
from phalanx._base.torch_names import resolve

names, users = json.load(sys.stdin)
assert "phalanx._comm.backend.process_group" not in sys.modules, "too early: it is what is tried"
owners = {name: resolve(name.rpartition(".")[0]) for name in names if resolve(name) is not name}
for name in names:
    owner, last = owners[name], name.rpartition(".")[2]
    delattr(next((c for c in getattr(owner, "__mro__", [owner]) if last in vars(c)), owner), last)
for user in users:
    importlib.import_module(user)
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
print(x.tolist(), flush=True)
from phalanx.ddp import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
before = model.module.bias.item()
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(round(model.module.bias.item() - before, 6), flush=True)
dist.destroy_process_group()
"""

# What can't be taken from torch: methods of a class in C, and what torch itself does not run without.
NEEDED_BY_TORCH = (
    "torch.Tensor._is_zerotensor",
    "torch._C._get_tracing_state",
    "torch._C._set_grad_enabled",
    "torch.autograd.Variable._execution_engine",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.Tensor._use_count",
)

# Without these our DistributedDataParallel does not average, and says so at its first step.
DDP_NEEDS = (
    "torch._C._storage_Use_Count",
    "torch._utils._flatten_dense_tensors",
)


def run_without(names: list[str], users: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], input=json.dumps([names, users]),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("inductor_folder")
def test_without_private_names_what_does_not_need_them_works():
    """A name that was imported at the top of a file, and gone from torch, was the end of `phalanx.init`."""
    users: dict[str, set[str]] = {}
    for where, path, name in used_names():
        if path == name and "(" not in path and not is_patch(where) and not problem_with(path, name):
            module = where.partition(":")[0].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            users.setdefault(path, set()).add(module)
    for name in (*DDP_NEEDS, *NEEDED_BY_TORCH):
        del users[name]
    assert len(users) > 40
    run = run_without(sorted(users), sorted(set.union(*users.values())))
    assert run.stdout.splitlines() == ["[1.0, 1.0]", "-0.5"], run.stderr
    told = run.stderr.splitlines()
    assert all(any(f"has no {name}: " in line for name in users) for line in told), run.stderr
    assert len(told) >= 15, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", DDP_NEEDS)
def test_without_a_name_that_it_needs_a_wrapper_says_so(name):
    run = run_without([name], [])
    assert run.stdout.splitlines() == ["[1.0, 1.0]"], run.stderr
    assert f"PhalanxError: torch {torch.__version__} has no {name}: " in run.stderr


def test_what_is_tested_is_said_in_one_place():
    """pyproject.toml promised 2.6, which nobody had ever run."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, OLDEST))}",' in pyproject
    assert {torch for pair in PAIRS for torch in pair.split("=")[1:]} == set(TESTED)
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition(";")[0].removeprefix("torch==") for line in constraints if line.startswith("torch==")}
    assert pinned <= set(TESTED)


@pytest.mark.parametrize(
    ("version", "newer"),
    [("2.13.0+cpu", False), (TESTED[-1], False), ("2.14.7", False), ("2.15.1", True), ("2.16.0.dev20261201", True)],
)
def test_a_newer_torch_is_told(version, newer):
    assert bool(describe_untested(version)) == newer
    assert TESTED[-1] in describe_untested("99.0")


@pytest.mark.slow
def test_a_group_of_a_newer_torch_works_and_says_so_once():
    code = (
        "import torch, torch.distributed as dist\n"
        "torch.__version__ = '99.1.0'\n"
        "dist.init_process_group('phalanx', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.new_group([0])\n"
        "x = torch.ones(1); dist.all_reduce(x); print(x.item())\n"
        "dist.destroy_process_group()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert run.stdout == "1.0\n", run.stderr
    assert run.stderr.count("torch 99.1.0 is newer than ") == 1
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.lint
def test_the_walk_finds_names_in_every_form():
    """Attributes, imports, names in strings and in getattr: a walk that found none would pass."""
    found = {path for _, path, _ in used_names()}
    assert {
        "torch._C._len_torch_dispatch_stack",
        "torch._C._current_graph_task_id",
        "torch._C._collect_all",
        "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch(self, possibly_batched_index)",
        "torch.distributed.distributed_c10d._world",
    } <= found
    assert len(found) > 60


@pytest.mark.lint
def test_each_entry_of_the_tables_is_still_used():
    assert {*OWNERS, *SAVED, *OTHERS} - {name for _, _, name in used_names()} == set()
