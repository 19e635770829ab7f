"""A rank is what `python script.py` would be."""

import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from tests.system.phalanx_command import run, write_script

from phalanx.testing.namespaces import why_no_hosts

WHAT_A_SCRIPT_SEES = """
import json, os, sys
import pickle

class Defined:
    pass

main = sys.modules["__main__"]
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path0": sys.path[0], "spec": __spec__ and __spec__.name,
    "package": repr(__package__), "loader": type(__loader__).__name__, "same": main.__dict__ is globals(),
    "names": sorted(name for name in globals() if name.startswith("__")), "doc": __doc__,
    "pickled": pickle.loads(pickle.dumps(Defined())).__class__ is Defined, "optimize": sys.flags.optimize,
    "builtins": type(__builtins__).__name__, "debug": __debug__,
}, sort_keys=True))
"""


@pytest.mark.slow(but=("flags0",))
@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_a_script_sees_what_it_sees_without_us(tmp_path: Path, flags: list[str]) -> None:
    script = write_script(tmp_path, WHAT_A_SCRIPT_SEES)
    command = [sys.executable, *flags]
    alone = subprocess.run([*command, script, "a", "--b"], capture_output=True, text=True, check=True)
    words = ["-m", "phalanx.cli", "run", "--nproc-per-node", "1", "--no-preload", script, "a", "--b"]
    launched = subprocess.run([*command, *words], capture_output=True, text=True)
    assert launched.returncode == 0, launched.stderr
    assert json.loads(launched.stdout.removeprefix("[0] ")) == json.loads(alone.stdout)


def test_a_module_sees_what_it_sees_without_us(tmp_path: Path) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tool.py").write_text(WHAT_A_SCRIPT_SEES)
    words = ["-m", "some_package.tool", "a"]
    alone = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, cwd=tmp_path)
    launcher = [sys.executable, "-m", "phalanx.cli", "run", "--nproc-per-node", "1", "--no-preload"]
    launched = subprocess.run([*launcher, *words], capture_output=True, text=True, cwd=tmp_path)
    assert launched.returncode == 0, launched.stderr
    assert json.loads(launched.stdout.removeprefix("[0] ")) == json.loads(alone.stdout)


def test_the_end_of_a_script_is_the_interpreters_own(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import atexit, sys, threading\n"
        "go = threading.Event()\n"
        "atexit.register(print, 'atexit')\n"
        "threading.Thread(target=lambda: (go.wait(), print('thread joined'))).start()\n"
        "print('end of script')\n"
        "go.set()\n",
    )
    finished = run("--no-preload", "--nproc-per-node", "1", script)
    assert finished.lines == ["[0] end of script", "[0] thread joined", "[0] atexit"]


@pytest.mark.slow
def test_standard_input_that_is_a_terminal_or_nothing_reads_as_empty(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    assert run("--no-preload", "--nproc-per-node", "2", script).by_rank == [(0, "''"), (1, "''")]


def test_modules_of_the_working_directory_do_not_shadow_ours(tmp_path: Path) -> None:
    for name in ("select.py", "socket.py", "struct.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = write_script(folder, "print('fine')")
    command = [sys.executable, "-c", "import sys; sys.path.pop(0); from phalanx.cli.__main__ import main; main()"]
    launched = subprocess.run(
        [*command, "run", "--nproc-per-node", "1", "--no-preload", script],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert launched.stdout == "[0] fine\n", launched.stderr


LOADERS = """
import multiprocessing, os, sys
import random
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return torch.tensor(i * i)

def put(queue, value):
    queue.put((value, __name__))

def spawned(index, queue):
    queue.put((index, __name__))

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=1, num_workers=1, multiprocessing_context=method)
        print("loader", method, [int(batch) for batch in loader])
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    process = context.Process(target=put, args=(queue, "value"))
    process.start()
    print("process", queue.get())
    process.join()
    queue = torch.multiprocessing.get_context("forkserver").Queue()
    torch.multiprocessing.start_processes(spawned, args=(queue,), nprocs=1, start_method="forkserver")
    print("torch", queue.get())
    print("threads", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.slow
def test_workers_start_with_every_method(tmp_path: Path) -> None:
    script = write_script(tmp_path, LOADERS)
    finished = run("--nproc-per-node", "1", script, env={"OMP_NUM_THREADS": "1"})
    assert finished.lines == [
        "[0] loader fork [0, 1, 4]",
        "[0] loader spawn [0, 1, 4]",
        "[0] loader forkserver [0, 1, 4]",
        "[0] process ('value', '__mp_main__')",
        "[0] torch (0, '__mp_main__')",
        "[0] threads 1 1",
    ], finished.err


RANDOM_AND_GLOO = """
import os, random, sys
import numpy, torch
import torch.distributed as dist

print(f"random {random.random()} {numpy.random.rand()} {torch.rand(1).item()}")
os.environ.pop("PHALANX_STORE", None)  # as if the launcher had been torchrun
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print("sum", value.item(), dist.get_world_size())
assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
assert not torch.cuda.is_initialized()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_for_torchrun_runs_unchanged_and_ranks_do_not_share_random_numbers(tmp_path: Path) -> None:
    script = write_script(tmp_path, RANDOM_AND_GLOO)
    finished = run("--nproc-per-node", "3", script)
    assert finished.code == 0, finished.err
    assert [text for _, text in finished.by_rank].count("sum 6.0 3") == 3
    numbers = [word for line in finished.lines if "random" in line for word in line.split()[2:]]
    assert len(numbers) == 9
    assert len(set(numbers)) == 9


@pytest.mark.slow
def test_the_store_is_a_file_without_a_name_that_all_ranks_open(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os\n"
        "path, rank = os.environ['PHALANX_STORE'], int(os.environ['RANK'])\n"
        "with open(path, 'r+b') as file:\n"
        "    os.pwrite(file.fileno(), bytes([rank + 1]), rank)\n"
        "    while os.pread(file.fileno(), 2, 0) != bytes([1, 2]): pass\n"
        "print(os.readlink(path))\n",
    )
    finished = run("--no-preload", "--nproc-per-node", "2", script)
    assert finished.by_rank == [(rank, "/memfd:phalanx-store (deleted)") for rank in range(2)]


@pytest.mark.slow
def test_ranks_are_placed_on_their_cores(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])")
    cpus = sorted(os.sched_getaffinity(0))
    one = run("--no-preload", "--nproc-per-node", "1", script)
    assert one.lines == [f"[0] {cpus} {len(cpus)}"]
    each = run("--no-preload", "--nproc-per-node", "cpu", script)
    assert sorted(each.lines) == [f"[{rank}] [{cpu}] 1" for rank, cpu in enumerate(cpus)] or len(cpus) == 1
    free = run("--no-preload", "--no-affinity", "--nproc-per-node", "1", script, env={"OMP_NUM_THREADS": "5"})
    assert free.lines == [f"[0] {cpus} 5"]


def test_a_program_runs_without_python() -> None:
    finished = run("--nproc-per-node", "2", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert finished.code == 0
    assert sorted(finished.lines) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_the_agent_imports_no_torch_and_no_click(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from phalanx.cli.__main__ import main\n"
        "sys.argv = ['phalanx', 'run', '--no-python', '--nproc-per-node', '1', 'true']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'numpy', 'click', 'rich', 'asyncio') if name in sys.modules])\n"
    )
    script = write_script(tmp_path, code)
    launched = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert launched.stdout == "[]\n", launched.stderr


@pytest.mark.slow
def test_ps_shows_the_command_that_a_rank_is(tmp_path: Path) -> None:
    # It showed `python -B -c import sys…`, of every rank of every job.
    script = write_script(
        tmp_path,
        "import os, sys\n"
        "def shown(pid): return open(f'/proc/{pid}/cmdline', 'rb').read().rstrip(b'\\0').decode().split('\\0')\n"
        "print(shown('self') == [sys.executable, *sys.argv] == sys.orig_argv, len(sys.argv), os.environ['LAST'])\n"
        "print(shown(os.getppid()))\n"
        "if os.fork() == 0: os._exit(0)\n"
        "os.wait()\n",
    )
    for arguments in ([], ["a", "b c", "", "--lr", "0.1", "ü" * 500]):
        finished = run("--no-preload", "--nproc-per-node", "1", script, *arguments, "x", env={"LAST": "variable"})
        assert finished.lines[0] == f"[0] True {len(arguments) + 2} variable", finished
        assert "zygote, which forks the ranks" in finished.lines[1]


def test_words_that_are_too_long_to_show_are_cut() -> None:
    code = (
        "import sys\n"
        "from phalanx._job.agent.title import set_command\n"
        "set_command([sys.executable, 'x' * 10_000])\n"
        "first, second = open('/proc/self/cmdline', 'rb').read().rstrip(b'\\0').decode().split('\\0')\n"
        "assert first == sys.executable and second and set(second) == {'x'}, second\n"
        "set_command(['y'])\n"
        "assert open('/proc/self/cmdline', 'rb').read().rstrip(b'\\0') == b'y'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_pinned_rank_may_have_as_many_workers_as_the_job_has_cores(tmp_path: Path) -> None:
    # Pinned to one core, DataLoader warned of two workers, and they shared that core with the rank.
    script = write_script(
        tmp_path,
        "import os, subprocess, sys\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Cores(Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, i): return len(os.sched_getaffinity(0))\n"
        "if __name__ == '__main__':\n"
        "    cores = int(sys.argv[1])\n"
        "    for method in 'fork', 'forkserver', 'spawn':\n"
        "        loader = DataLoader(Cores(), num_workers=cores, multiprocessing_context=method)\n"
        "        for batch in loader: print(int(batch) == cores)\n"
        "    count = 'import os; print(len(os.sched_getaffinity(0)))'\n"
        "    for close_fds in True, False:  # without it, subprocess calls posix_spawn\n"
        "        out = subprocess.run([sys.executable, '-c', count], capture_output=True, close_fds=close_fds).stdout\n"
        "        print(int(out) == cores)\n"
        "    print(len(os.sched_getaffinity(0)) == 1)\n"
        "    os.sched_setaffinity(0, os.sched_getaffinity(0))\n"
        "    DataLoader(Cores(), num_workers=cores + 1)\n",
    )
    cores = len(os.sched_getaffinity(0))
    finished = run("--no-preload", "--nproc-per-node", "cpu", script, str(cores))
    assert finished.code == 0, finished.err
    assert {line.partition("] ")[2] for line in finished.lines} == {"True"}
    assert f"This DataLoader will create {cores} worker" not in finished.err
    assert f"This DataLoader will create {cores + 1} worker" in finished.err


@pytest.mark.slow
def test_a_group_of_our_backend_meets_in_the_agents_store_and_opens_no_port(tmp_path: Path) -> None:
    # With MASTER_ADDR and MASTER_PORT set, as they are in every rank, it met over TCP, at a port that was only free.
    script = write_script(
        tmp_path,
        "import torch.distributed as dist\n"
        "dist.init_process_group('phalanx')\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "while hasattr(store, 'underlying_store'): store = store.underlying_store\n"
        "print(type(store).__name__)\n"
        "dist.destroy_process_group()\n",
    )
    finished = run("--nproc-per-node", "2", script)
    assert {line.partition("] ")[2] for line in finished.lines} == {"FileStore"}, finished.err


@pytest.mark.slow
def test_ranks_that_may_begin_again_find_imported_what_every_optimizer_loads(tmp_path: Path) -> None:
    """A start of all took 2 s although nothing was to be imported: the first optimizer of each rank loaded Dynamo."""
    script = write_script(
        tmp_path,
        "import os, sys\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print(again, 'torch._dynamo' in sys.modules, 'phalanx.ddp.module' in sys.modules)\n"
        "sys.exit(0 if len(sys.argv) > 1 else 1 - int(again))\n",
    )
    finished = run("--nproc-per-node", "1", "--max-restarts", "1", script)
    assert finished.code == 0
    assert finished.lines == ["[0] 0 True True", "[0] 1 True True"]
    assert run("--nproc-per-node", "1", script, "once").lines == ["[0] 0 False False"]


@pytest.mark.slow
def test_ranks_on_one_host_import_nothing_of_phalanx_to_join_their_group(tmp_path: Path) -> None:
    """Each imported 16 modules by itself, which the process that they are forked from imports once."""
    script = write_script(
        tmp_path,
        "import sys\n"
        "before = set(sys.modules)\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('phalanx')))\n"
        "dist.destroy_process_group()\n",
    )
    assert {line.partition("] ")[2] for line in run("--nproc-per-node", "2", script).lines} == {"[]"}


PROFILED = """
import torch
with torch.profiler.profile() as taken:
    torch.ones(2).add(1)
print("aten::add" in {event.name for event in taken.events()})
"""


def test_the_profiler_of_a_rank_prints_no_error(tmp_path: Path) -> None:
    """Torch's library keeps the thread that has loaded it, and complains if the profiler runs in another one."""
    finished = run("--nproc-per-node", "1", write_script(tmp_path, PROFILED))
    assert (finished.code, finished.by_rank) == (0, [(0, "True")]), finished.err
    assert "ERROR" not in finished.err


@pytest.mark.slow
def test_env_is_there_when_torch_and_modules_are_imported(tmp_path: Path) -> None:
    """The variables were set in the forks of a process that had imported torch long before, with one thread."""
    (tmp_path / "modules").mkdir()
    text = "import os, torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    (tmp_path / "modules" / "only_there.py").write_text(text)
    given = ("--env", "OMP_NUM_THREADS=2", "--env", f"PYTHONPATH={tmp_path / 'modules'}")
    finished = run("--nproc-per-node", "2", *given, "-m", "only_there")
    assert finished.by_rank == [(0, "2 2"), (1, "2 2")], finished.err


def test_env_gives_no_rank_the_jobs_key(tmp_path: Path) -> None:
    finished = run("--env", "PHALANX_KEY=plx-secret", write_script(tmp_path, ""))
    assert finished.code == 2
    assert "--env: PHALANX_KEY is only for this command" in finished.err
    assert "plx-secret" not in finished.err


_WHAT_I_AM = """
import multiprocessing, os, pickle, sys
class Sent: pass
def main():
    names = ("__name__", "__file__", "__package__", "__cached__")
    seen = [globals().get(name) for name in names] + [type(__loader__).__name__, getattr(__spec__, "name", None)]
    child = multiprocessing.get_context("spawn").Process(target=print, args=("child", isinstance(Sent(), Sent)))
    child.start(), child.join()
    print(*seen, sys.argv, sys.path[0], type(pickle.loads(pickle.dumps(Sent()))) is Sent, child.exitcode, flush=True)
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow(but=("source",))
@pytest.mark.parametrize("form", ["source", "bytecode", "bytecode by another name", "folder", "archive", "link"])
def test_every_form_of_a_script_runs_as_python_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A folder with __main__.py, a zipapp and a .pyc were refused."""
    (tmp_path / "app").mkdir()
    source = tmp_path / "app" / "__main__.py"
    source.write_text(_WHAT_I_AM)
    py_compile.compile(str(source), str(tmp_path / "code.pyc"))
    shutil.copy(tmp_path / "code.pyc", tmp_path / "code")
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz", "/usr/bin/env python3")
    (tmp_path / "link.py").symlink_to(source)
    names = {"source": "app/__main__.py", "bytecode": "code.pyc", "bytecode by another name": "code"}
    name = {**names, "folder": "app", "archive": "app.pyz", "link": "link.py"}[form]
    monkeypatch.chdir(tmp_path)
    words = [name, "--flag", "word"]
    plain = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    finished = run("--no-preload", "--nproc-per-node", "1", *words)
    assert finished.code == 0, finished.err
    assert [line.partition("] ")[2] for line in finished.lines] == plain.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_a_host_that_has_only_the_loopback_of_ipv6_runs_a_job(tmp_path: Path) -> None:
    """It was a traceback: no port could be found at 127.0.0.1."""
    script = write_script(
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx')\n"
        "total = torch.ones(2)\n"
        "dist.all_reduce(total)\n"
        "print(total.tolist())\n"
        "dist.destroy_process_group()\n",
    )
    own = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
    finished = run("--nproc-per-node", "2", script, before=("unshare", "--net", "sh", "-c", own, "sh"))
    assert finished.code == 0, finished.err
    assert finished.by_rank == [(0, "[2.0, 2.0]"), (1, "[2.0, 2.0]")]
