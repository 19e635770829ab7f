"""Command lines of torchrun, and of the launcher before it, typed for `phalanx run` with one word replaced."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.system.phalanx_command import run, start, write_script

# What may differ between the two launchers in a rank's environment, and why.
_DIFFERENT = {
    "MASTER_ADDR": "another name of this host",
    "MASTER_PORT": "a free port, taken at random",
    "OMP_NUM_THREADS": "torchrun's 1 leaves the cores idle of a host that has more of them than ranks",
    "TORCHELASTIC_ERROR_FILE": "in a temporary folder of the launcher's own, by the same name below it",
    "TORCHELASTIC_RUN_ID": "where none was given torchrun's is random or none, ours random",
    "TORCHELASTIC_USE_AGENT_STORE": "torchrun keeps a TCPStore at MASTER_PORT; our launcher never imports torch, so "
    "rank 0 opens it, as with torchrun's static rendezvous",
}
_OURS = {
    "GLIBC_TUNABLES": "memory that backward frees is kept for the next step",
    "PYTHONUNBUFFERED": "torchrun starts python -u, which the script's children do not inherit",
    "PHALANX_AGENT": "where groups show their flight recorder",
    "PHALANX_RUN": "which run it is",
    "PHALANX_STORE": "where ranks meet without a port",
    "PHALANX_STORE_OF": "whose that store is",
}
_UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "_", *_DIFFERENT, *_OURS)
_SEE = """
import json, os, sys
seen = {"environment": dict(os.environ), "argv": sys.argv[1:]}
with open(os.path.join(os.environ["SEEN"], os.environ["RANK"]), "w") as file:
    json.dump(seen, file)
print("out of", os.environ["RANK"])
print("err of", os.environ["RANK"], file=sys.stderr)
"""
_LINES = (
    "--nproc-per-node 2 --no-python {python} {script} a '${{local_rank}}' --b",
    "--standalone --nproc_per_node=2 --role trainer --max-restarts 3 --signals-to-handle SIGTERM {script} "
    "--out 'logs/${{local_rank}}/$local_rank' '$$HOME 5$ ${{rank}}'",
    "--nnodes 1 --nproc-per-node 2 --node-rank 0 --master-addr 127.0.0.1 --master-port {port} {script}",
    "--nnodes=1:1 --nproc_per_node=2 --rdzv_id=job7 --rdzv-backend=c10d --rdzv_endpoint=localhost:{port} {script} x",
    "--nproc-per-node=2 --monitor-interval 0.5 --start-method fork --rdzv-conf timeout=30 -m seen_module 1 -m",
)


def _what_ranks_see(tmp_path: Path, name: str, command: list[str], extra: dict[str, str]) -> dict[str, dict[str, Any]]:
    seen = tmp_path / "seen"
    seen.mkdir()
    environ = {key: value for key, value in os.environ.items() if key not in _UNSET and "TORCHELASTIC" not in key}
    done = subprocess.run(
        command, env={**environ, **extra, "SEEN": str(seen)}, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    seen.rename(tmp_path / name)
    return {path.name: json.loads(path.read_text()) for path in sorted((tmp_path / name).iterdir())}


def _see_under_both(tmp_path: Path, words: list[str], extra: dict[str, str]) -> None:
    """The ranks of both launchers have the same variables, but for those that may differ, and the same arguments."""
    theirs = _what_ranks_see(tmp_path, "torchrun", [sys.executable, "-m", "torch.distributed.run", *words], extra)
    ours = _what_ranks_see(tmp_path, "phalanx", [sys.executable, "-m", "phalanx.cli", "run", *words], extra)
    assert sorted(ours) == sorted(theirs) == ["0", "1"]
    for rank, seen in ours.items():
        assert seen["argv"] == theirs[rank]["argv"]
        mine, reference = seen["environment"], theirs[rank]["environment"]
        reference.setdefault("OMP_NUM_THREADS", "")  # torchrun sets it for more than one rank
        assert mine.keys() - reference.keys() <= _OURS.keys()
        assert reference.keys() - mine.keys() == set()
        for name in reference.keys() - _DIFFERENT.keys() - _OURS.keys():
            assert (name, mine[name]) == (name, reference[name])
        assert socket.gethostbyname(mine["MASTER_ADDR"]).startswith("127.")
        assert mine["MASTER_PORT"].isdecimal()
        assert mine["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        if "job7" in reference["TORCHELASTIC_RUN_ID"]:
            assert mine["TORCHELASTIC_RUN_ID"] == "job7"
        for variables in (mine, reference):
            assert re.fullmatch("job7|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|none", variables["TORCHELASTIC_RUN_ID"])
            assert variables["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(_LINES)))
def test_ranks_see_the_same_under_a_torchrun_line(tmp_path: Path, number: int) -> None:
    """Two of torchrun's variables were missing: a script that read TORCHELASTIC_ERROR_FILE, as the one by which PyTorch
    tests its launcher, died of a KeyError.
    """
    script = write_script(tmp_path, _SEE)
    write_script(tmp_path, _SEE, "seen_module.py")
    python, quoted = shlex.quote(sys.executable), shlex.quote(str(script))
    words = shlex.split(_LINES[number].format(python=python, script=quoted, port=29600 + number))
    _see_under_both(tmp_path, words, {})


_OF_RANK = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")


@pytest.mark.slow
@pytest.mark.parametrize("apart_s", [0.0, 2.0])
def test_a_line_for_two_hosts_that_is_typed_twice_on_one_is_a_job_of_two_agents(tmp_path: Path, apart_s: float) -> None:
    """The second ended in "Address already in use", and the first waited for it."""
    script = write_script(tmp_path, _SEE)
    words = shlex.split("--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29632 --rdzv-id 7")
    seen: dict[str, list[tuple[str, ...]]] = {}
    for name, module in (("torchrun", "torch.distributed.run"), ("phalanx", "phalanx.cli")):
        (tmp_path / name).mkdir()
        environ = {key: value for key, value in os.environ.items() if key not in _UNSET and "TORCHELASTIC" not in key}
        environ |= {"SEEN": str(tmp_path / name), "XDG_CONFIG_HOME": str(tmp_path)}
        line = [sys.executable, "-m", module, *(["run"] if name == "phalanx" else []), *words, str(script)]
        started = []
        for number in range(2):
            time.sleep(number * apart_s)
            started.append(
                subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        ends = [(process.communicate()[1], process.returncode) for process in started]
        assert [code for _, code in ends] == [0, 0], ends
        found = [json.loads((tmp_path / name / str(rank)).read_text())["environment"] for rank in range(4)]
        seen[name] = [tuple(one[variable] for variable in _OF_RANK) for one in found]
    assert seen["phalanx"] == seen["torchrun"]


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [("2", "3"), ("3", "2"), ("1:2", "2")])
def test_hosts_that_were_given_different_numbers_of_hosts_all_refuse(tmp_path: Path, numbers: tuple[str, str]) -> None:
    """They started with the first host's number, and nothing was said; or waited for hosts that would not come."""
    script = write_script(tmp_path, "print('ran')")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    environ = {key: value for key, value in os.environ.items() if key not in _UNSET and "TORCHELASTIC" not in key}
    environ |= {"XDG_CONFIG_HOME": str(tmp_path)}
    started = []
    for nnodes in numbers:
        words = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", "7", str(script)]
        line = [sys.executable, "-m", "phalanx.cli", "run", *words]
        started.append(subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for process in started:
        out, err = process.communicate(timeout=600)
        assert (process.returncode, out) == (2, ""), err
        assert all(f"--nnodes {nnodes}" in err for nnodes in numbers), err
        assert "Give the same number on all hosts" in err


@pytest.mark.slow
def test_variables_that_a_cluster_sets_for_torchrun_are_read(tmp_path: Path) -> None:
    extra = {
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "1",
        "PET_ROLE": "w",
        "PET_MAX_RESTARTS": "1",
        "PET_NODE_RANK": "0",
    }
    _see_under_both(tmp_path, [write_script(tmp_path, _SEE)], extra)


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["--local-rank", "--local_rank"])
def test_the_old_launchers_script_is_told_its_local_rank_as_it_spells_it(tmp_path: Path, spelling: str) -> None:
    script = write_script(
        tmp_path,
        "import argparse, os\n"
        "parser = argparse.ArgumentParser()\n"
        f"parser.add_argument('{spelling}', type=int)\n"
        "parser.add_argument('--lr')\n"
        "args = parser.parse_args()\n"
        "print('local rank', args.local_rank, os.environ['LOCAL_RANK'], args.lr)\n",
    )
    line = "--nproc_per_node=2 --nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port=29611"
    command = [sys.executable, "-m", "phalanx.launch", *line.split(), script, "--lr", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] local rank 0 0 3", "[1] local rank 1 1 3"]


@pytest.mark.slow
def test_redirected_streams_go_to_files_and_teed_ones_to_both(tmp_path: Path) -> None:
    script = write_script(tmp_path, _SEE)
    logs = tmp_path / "logs"
    finished = run(
        "--nproc-per-node", "2", "-r", "0:3", "-t", "1:1", "--log-dir", str(logs), "--rdzv-id", "a/b", script,
        env={"SEEN": str(tmp_path)},
    )  # fmt: skip
    assert finished.code == 0
    assert finished.out.splitlines() == ["[1] out of 1"]
    assert "err of 0" not in finished.err
    assert "[1] err of 1" in finished.err
    (folder,) = logs.glob("a_b_*")
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    assert files == {
        "attempt_0/0/stdout.log": "out of 0\n",
        "attempt_0/0/stderr.log": "err of 0\n",
        "attempt_0/1/stdout.log": "out of 1\n",
    }
    assert sorted((logs / "rank_0.log").read_text().splitlines()) == ["err of 0", "out of 0"]


@pytest.mark.slow
def test_only_the_local_ranks_asked_for_are_shown(tmp_path: Path) -> None:
    script = write_script(tmp_path, _SEE)
    finished = run("--nproc-per-node", "3", "--local-ranks-filter", "0,2", script, env={"SEEN": str(tmp_path)})
    assert sorted(finished.out.splitlines()) == ["[0] out of 0", "[2] out of 2"]


@pytest.mark.slow
def test_a_launcher_inside_of_a_rank_meets_at_its_own_store(tmp_path: Path) -> None:
    """PHALANX_STORE was inherited: two ranks of a torchrun that a rank of ours had started met in our agent's store,
    as ranks 0 and 1 of the outer job, and with the outer job's ranks.
    """
    inner = write_script(
        tmp_path,
        "import datetime, os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=20))\n"
        "x = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "sys.stdout.write(f'inner {dist.get_world_size()} {x.item()}\\n')\n"  # in one piece, into a pipe of two
        "dist.destroy_process_group()\n",
        "inner.py",
    )
    outer = write_script(
        tmp_path,
        "import os, subprocess, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0:\n"
        "    words = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']\n"
        f"    subprocess.run([*words, {inner!r}], check=True)\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "print('outer', x.item())\n"
        "dist.destroy_process_group()\n",
        "outer.py",
    )
    finished = run("--nproc-per-node", "2", outer)
    assert finished.code == 0, finished.err
    assert finished.out.count("inner 2 3.0") == 2
    assert {(0, "outer 2.0"), (1, "outer 2.0")} <= set(finished.by_rank)


def test_ctrl_c_while_modules_are_loaded_shows_no_traceback(tmp_path: Path) -> None:
    """In its first 0.1 s the command loaded its modules with Python's own handler of SIGINT: Ctrl-C showed ten lines of
    importlib.
    """
    write_script(
        tmp_path,
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'phalanx._job.launch.command_line':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n",
        "sitecustomize.py",
    )
    script = write_script(tmp_path, "print('never')\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with start("run", script, env={"PYTHONPATH": path}) as running:
        finished = running.finish()
    assert finished.code in (-signal.SIGINT, 128 + signal.SIGINT)
    assert (finished.out, finished.err) == ("", "")


@pytest.mark.slow
def test_a_template_stands_before_the_lines_as_torchrun_puts_it(tmp_path: Path) -> None:
    """The torchrun of torch 2.15 and on has the option; ours has it with any torch."""
    script = write_script(tmp_path, "print('same')\nprint()\n")
    template = "${role_name}/${rank}/${local_rank}/${unknown}$$: "
    words = ["--nproc-per-node", "2", "--role", "w", "--tee", "3", script]
    environ = {**os.environ, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template}
    said = [
        subprocess.run([sys.executable, "-m", *launcher, *words], env=environ, capture_output=True, text=True).stdout
        for launcher in (["torch.distributed.run"], ["phalanx.cli", "run"])
    ]
    assert sorted(said[0].splitlines()) == sorted(said[1].splitlines())
    given = run("--log-line-prefix-template", "${hostname}:${rank}> ", *words)
    assert sorted(given.out.splitlines()) == [f"{socket.gethostname()}:{r}> {x}" for r in "01" for x in ("", "same")]
