"""The picture in docs/architecture, enforced: imports only go down, and importing the package does nothing."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from tests.sources import tree

T = TypeVar("T")
PACKAGE = Path(__file__).parents[1] / "src" / "phalanx"

LAYERS = [
    {
        "errors",
        "deadline",
        "descriptors",
        "host_addresses",
        "loss_detection",
        "processes",
        "control_groups",
        "core_numbers",
        "dtypes",
        "extras",
        "log",
        "malloc",
        "svg",
        "torch_versions",
        "torch_names",
    },
    {"_core", "ipc", "symmetric_memory", "engines", "diagnostics", "coordination", "partition", "storage"},
    {"transport", "collectives", "schedulers", "output"},
    {"backend"},
    {"ddp", "nn", "optim", "data", "checkpoint", "pipeline", "rpc", "inspect", "loggers"},
    {
        "parameter_server",
        "strategies",
        "trainer",
        "elastic",
        "mapreduce",
        "report",
        "agent",
        "hosts",
        "launch",
        "ssh",
        "manifests",
        "testing",
        "doctor",
        "bench",
    },
    {"cli"},
]
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
FEATURES = 4
MOST_LINES = 500

# The facade, `python -m phalanx` and the entry point that torch calls are outside the layers: they only name packages.
OUTSIDE = {"__init__", "__main__", "_autoload"}

# An import that goes sideways or up on purpose, with the reason.
ALLOWED: dict[tuple[str, str], str] = {
    ("core_numbers", "_core"): "the core, which imports nothing, is where the numbers are written down",
    ("optim", "rpc"): "DistributedOptimizer calls the workers on which parameters live",
    ("ddp", "nn"): "DistributedDataParallel(sync_batchnorm=...) converts BatchNorm layers",
}

TORCH_FREE = {
    "agent": "it starts in milliseconds; its zygote imports torch inside a function",
    "hosts": "so do the agents of a job on several hosts",
    "launch": "`phalanx run` starts in milliseconds",
    "schedulers": "the launcher asks which of them has started it",
    "ssh": "`phalanx run --hosts` starts in milliseconds, here and on every host",
    "output": "the agent shows what the ranks print",
    "host_addresses": "agents meet at one",
    "coordination": "the launcher asks it who started the command, and agents meet in it",
    "ipc": "agent and zygote talk by it",
    "inspect": "`phalanx top` and `phalanx stacks` show a job at once",
    "cli": "`phalanx run` must not pay for torch",
    "core_numbers": "the agent reads flight recorders",
    "errors": "the agent raises them",
    "deadline": "the agent waits with them",
    "descriptors": "the agent raises its limit",
    "processes": "the agent looks after processes",
    "log": "the agent logs",
    "doctor": "it must be able to say that torch cannot be imported",
    "testing": "a test of the launcher needs ranks and clocks, not torch",
}

READS_ENVIRONMENT = {
    "cli": "on a user's behalf",
    "hosts": "on a user's behalf",
    "launch": "on a user's behalf",
    "ssh": "sends variables to the hosts on a user's behalf",
    "agent": "makes the environment of the ranks, and becomes the user's program there",
    "coordination/witness/etcd_register.py": "users and certificates, by etcdctl's names",
    "backend/rendezvous.py": "reads what launchers set",
    "backend/torch_integration/backend_names.py": "asks whether `phalanx run` started this process",
    "backend/torch_integration/flight_recorder.py": "whether PyTorch's recorder is on, and into which file it dumps",
    "backend/create.py": "the network interface, and whether a public address is allowed, as Gloo's users say it",
    "backend/imported_environment.py": "takes back what torch's compiler sets when it is imported",
    "backend/start.py": "asks whether a launcher put this process in a job",
    "backend/job.py": "finds the job that a launcher put this process in",
    "rpc/rendezvous.py": "finds the job that a launcher put this process in",
    "malloc.py": "leaves malloc alone where its variables have set it up",
    "strategies/start.py": "finds out whether a launcher has started this process",
    "strategies/choose.py": "the same",
    "strategies/single_device.py": "the same",
    "report/recording.py": "finds out which rank of which job it is",
    "trainer/progress_display.py": "is told by `phalanx run` that a terminal lies behind its pipe",
    "schedulers": "finds out what has started this command",
    "output": "is told there how a terminal, or an interpreter, writes",
    "coordination/key_file.py": "looks for the job's key",
    "doctor/host.py": "the variables that steer a job are part of what it examines",
    "testing/child.py": "sets the thread count of a rank, a process of its own",
    "testing/leaks.py": "compares the variables before and after a test",
}

# Imports for types alone that point back: a part is handed the whole that it belongs to, and calls it.
POINT_BACK = {
    ("agent/host_link.py", "agent/attempt.py"),
    ("agent/requests.py", "agent/attempt.py"),
    ("agent/silent_ranks.py", "agent/attempt.py"),
    ("backend/process_group/open_groups.py", "backend/process_group/base.py"),
    ("backend/torch_integration/groups.py", "backend/process_group/__init__.py"),
    ("rpc/agent/answering.py", "rpc/agent/agent.py"),
    ("rpc/agent/completing.py", "rpc/agent/agent.py"),
    ("strategies/current.py", "strategies/strategy.py"),
    ("trainer/callbacks.py", "trainer/trainer.py"),
    ("trainer/fit_display.py", "trainer/trainer.py"),
    ("trainer/hyperparameters.py", "trainer/trainer.py"),
}

VAGUE = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "misc"}


@dataclass(frozen=True)
class Import:
    """One import in a module: of what, on which line, and whether it runs when the module is imported."""

    name: str
    line: int
    at_module_level: bool


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def package_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports(module: Path) -> tuple[Import, ...]:
    return tuple(_imports(tree(module), module, at_module_level=True))


def _imports(node: ast.AST, module: Path, *, at_module_level: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_module_level) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module)
            yield from (Import(f"{base}.{alias.name}", child.lineno, at_module_level) for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.orelse:  # types go with no import at run time
                yield from _imports(statement, module, at_module_level=at_module_level)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, module, at_module_level=at_module_level and not inside)


def imports_for_types(module: Path) -> frozenset[Path]:
    """The files of ours that a module imports for its annotations, and not at run time."""
    blocks = [n for n in ast.walk(tree(module)) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    found = (
        i
        for block in blocks
        for part in block.body
        for i in _imports(ast.Module([part], []), module, at_module_level=True)
    )
    return frozenset(file for i in found if (file := file_of(i.name)) is not None)


def _absolute(node: ast.ImportFrom, module: Path) -> str:
    if not node.level:
        return node.module or ""
    package = ("phalanx", *module.relative_to(PACKAGE).parts[:-1])
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def file_of(name: str) -> Path | None:
    """The file of ours that holds a dotted name, if one does: that of a module, or of what it defines."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    candidates = (
        path.with_suffix(".py"),
        path / "__init__.py",
        path.parent.with_suffix(".py"),
        path.parent / "__init__.py",
    )
    return next((file for file in candidates if name.startswith("phalanx.") and file.is_file()), None)


@functools.cache
def files_imported_by(module: Path, *, at_module_level: bool = False) -> frozenset[Path]:
    """Those of ours, in functions, too; imports for types alone are none."""
    wanted = (i for i in imports(module) if i.at_module_level or not at_module_level)
    return frozenset(file for i in wanted if (file := file_of(i.name)) is not None and file != module)


def without_ends(graph: dict[T, set[T]]) -> dict[T, set[T]]:
    """What is left of a graph when whatever leads nowhere is taken out, again and again: its circles."""
    while ends := [node for node, targets in graph.items() if not targets]:
        graph = {node: targets - set(ends) for node, targets in graph.items() if node not in ends}
    return graph


def where(module: Path, line: int) -> str:
    return f"{module.relative_to(PACKAGE.parent)}:{line}"


def test_every_module_lies_in_a_room_of_the_picture():
    assert {package_of(module) for module in modules()} <= LAYER_OF.keys() | OUTSIDE


@pytest.mark.parametrize("document", ["docs/explanation/architecture.md", "CONTRIBUTING.md"])
def test_the_picture_shows_the_rooms_that_there_are(document):
    """It showed five that were never built (strategies, elastic, pipeline, rpc, coordination)."""
    text = (PACKAGE.parents[1] / document).read_text()
    drawn = [set(line.split()[1:]) for line in text.splitlines() if re.match(r" \d  +\w", line)]
    assert drawn == LAYERS[::-1]
    assert set.union(*LAYERS) == {package_of(module) for module in modules()} - OUTSIDE | {"_core"}


def test_no_file_is_longer_than_a_reader_wants():
    lengths = {str(m.relative_to(PACKAGE)): len(m.read_text(encoding="utf-8").splitlines()) for m in modules()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_every_import_that_is_allowed_is_there():
    found = {(package_of(m), i.name.split(".")[1]) for m in modules() for i in imports(m) if i.name.count(".")}
    assert ALLOWED.keys() - found == set()


def test_imports_only_go_down():
    wrong = []
    for module in modules():
        package = package_of(module)
        if package in OUTSIDE:
            continue
        for imported in imports(module):
            parts = imported.name.split(".")
            if parts[0] != "phalanx" or len(parts) == 1 or parts[1] not in LAYER_OF or parts[1] == package:
                continue
            target = parts[1]
            down = LAYER_OF[target] < LAYER_OF[package]
            beside = LAYER_OF[target] == LAYER_OF[package] != FEATURES
            if not (down or beside or (package, target) in ALLOWED):
                wrong.append(f"{where(module, imported.line)}: {package} must not import {target}")
    assert wrong == []


def test_no_rooms_import_each_other_in_a_circle():
    edges = {
        (package_of(m), i.name.split(".")[1]) for m in modules() for i in imports(m) if i.name.startswith("phalanx.")
    }
    assert (
        without_ends({package: {b for a, b in edges if a == package != b and b in LAYER_OF} for package in LAYER_OF})
        == {}
    )


def test_no_files_import_each_other_in_a_circle():
    """Two circles of three files were hidden in imports inside of functions: a group needed what needed a group."""
    circles = without_ends({module: set(files_imported_by(module)) for module in modules()})
    named = {str(m.relative_to(PACKAGE)): sorted(str(t.relative_to(PACKAGE)) for t in circles[m]) for m in circles}
    assert named == {}


def test_only_a_part_that_is_handed_its_whole_imports_back_for_types():
    back = set()
    for module in modules():
        if module == PACKAGE / "__init__.py":  # its names are imported when they are used; types are for editors
            continue
        for target in imports_for_types(module):
            seen, ahead = {target}, [target]
            while ahead:
                new = files_imported_by(ahead.pop()) - seen
                seen |= new
                ahead += new
            if module in seen:
                back.add((str(module.relative_to(PACKAGE)), str(target.relative_to(PACKAGE))))
    assert back == POINT_BACK


def test_what_must_start_fast_never_imports_torch_at_module_level():
    """Neither do the files that it imports: a package may have some that the agent reads, and others with tensors."""
    wrong = []
    for place, reason in TORCH_FREE.items():
        ways = {m: (m,) for m in modules() if package_of(m) == place}
        seen = set(ways)
        while ways:
            module, way = ways.popitem()
            if any(i.at_module_level and i.name.split(".")[0] == "torch" for i in imports(module)):
                wrong.append(f"{' -> '.join(str(m.relative_to(PACKAGE)) for m in way)}: {reason}")
            for file in files_imported_by(module, at_module_level=True):
                if file not in seen:
                    seen.add(file)
                    ways[file] = (*way, file)
    assert wrong == []


def lines_that_read_the_environment(module):
    """The lines of a module that name the environment of the process."""
    nodes = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute | ast.Name)]
    words = ("environ", "environb", "getenv", "putenv")
    return [node.lineno for node in nodes if (node.attr if isinstance(node, ast.Attribute) else node.id) in words]


def test_only_the_rooms_that_face_the_user_read_the_environment():
    wrong, used = [], set()
    for module in modules():
        lines = lines_that_read_the_environment(module)
        allowed = {package_of(module), module.relative_to(PACKAGE).as_posix()} & READS_ENVIRONMENT.keys()
        used |= allowed if lines else set()
        wrong += [] if allowed else [where(module, line) for line in lines]
    assert wrong == []
    assert READS_ENVIRONMENT.keys() - used == set(), "these need no exception any more"


def test_no_module_has_a_name_that_says_nothing():
    assert [str(module) for module in modules() if module.stem in VAGUE or package_of(module) in VAGUE] == []


PROBE = """
import json, logging, os, sys
before = dict(os.environ), set(os.listdir("/proc/self/fd")), list(logging.root.handlers)
import phalanx{name}
after = dict(os.environ), set(os.listdir("/proc/self/fd")), list(logging.root.handlers)
print(json.dumps({{
    "same": before == after,
    "handlers": len(logging.getLogger("phalanx").handlers),
    "threads": len(os.listdir("/proc/self/task")),
    "modules": sorted(sys.modules),
}}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["", ".cli.__main__", ".launch", ".doctor", ".testing"])
def test_importing_does_no_work(name):
    run = subprocess.run([sys.executable, "-c", PROBE.format(name=name)], stdout=subprocess.PIPE, check=True)
    seen = json.loads(run.stdout)
    assert seen["same"], "an import changed the environment, opened a descriptor or configured logging"
    assert (seen["handlers"], seen["threads"]) == (0, 1)
    assert not {"torch", "numpy"} & set(seen["modules"])


def test_importing_the_facade_loads_no_room():
    code = "import sys, phalanx; print(*sorted(m for m in sys.modules if m.startswith('phalanx')))"
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.split() == ["phalanx"]


TORCH_NAMES = {"torch", "dist", "c10d", "dist2", "stores"}


def test_one_room_alone_changes_torch():
    """Each change is listed there with its reason and what ends it; architecture.md tells them as decisions."""
    wrong = []
    for module in modules():
        if "backend/torch_integration/" in module.as_posix():
            continue
        for node in ast.walk(tree(module)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                targets = [node.args[0]]
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                    is_vars = isinstance(root, ast.Call) and ast.unparse(root.func) == "vars" and root.args
                    root = root.args[0] if is_vars else getattr(root, "value", None)
                if root is not target and isinstance(root, ast.Name) and root.id in TORCH_NAMES:
                    wrong.append(where(module, node.lineno))
    assert wrong == []


def test_groups_reach_torchs_machinery_through_one_door():
    """One room knows the base class of groups and torch's list of groups, so that a second way can be added there."""
    wrong = []
    for module in modules():
        if "backend/torch_integration/" in module.as_posix():
            continue
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith(".ProcessGroup") for b in node.bases):
                wrong.append(where(module, node.lineno))
            if isinstance(node, ast.Attribute) and node.attr in ("_world", "pg_map"):
                wrong.append(where(module, node.lineno))
    assert wrong == []


def test_only_the_door_asks_whether_a_group_is_ours():
    """Thirteen isinstance() in ten files took it for granted that torch's group and ours are one object."""
    kinds = {"TorchGroup"}
    classes = [node for module in modules() for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)]
    while more := {c.name for c in classes for base in c.bases if ast.unparse(base) in kinds} - kinds:
        kinds |= more
    assert "PhalanxProcessGroup" in kinds
    wrong = []
    for module in modules():
        if module.as_posix().endswith("backend/torch_integration/groups.py"):
            continue
        for node in ast.walk(tree(module)):
            asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
            asks = asks or (isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("))
            words = set(re.findall(r"\w+", ast.unparse(node))) if asks else set()
            if words & kinds and "phalanx_group" not in words:
                wrong.append(where(module, node.lineno))
    assert wrong == []
