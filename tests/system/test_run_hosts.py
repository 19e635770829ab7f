"""`phalanx run` on several hosts: network namespaces, each with an agent of its own, which meet over the network."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.system.host_commands import _PORT, commands, finish, numbered
from tests.system.phalanx_command import Finished, Running, start, write_script

from phalanx._comm.control.key import Key
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

_ADD_UP = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
x = torch.ones(4) * (dist.get_rank() + 1)
dist.all_reduce(x)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
print("sum", x[0].item(), *(os.environ[name] for name in names), flush=True)
dist.destroy_process_group()
"""
_SAVES_AT_THE_END = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]

def save(*_):
    (folder / f"told-{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    (folder / f"saved-{rank}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, lambda *_: print("asked", rank, flush=True))
(folder / f"ready-{rank}").touch()
while True:
    time.sleep(0.01)
"""
_FOR_EVER = """
import torch, torch.distributed as dist
dist.init_process_group("phalanx")
x = torch.ones(4)
dist.all_reduce(x)
print("running", flush=True)
while True:
    dist.all_reduce(x)
"""


def sums(finished: Finished) -> list[list[str]]:
    """What the ranks of `_ADD_UP` said, by rank, without the label in front."""
    said = [line.partition("] ")[2].split() for line in finished.lines if "] sum" in line]
    return sorted(said, key=lambda words: int(words[2]))


@pytest.mark.slow
def test_hosts_that_share_a_home_without_a_key_may_start_in_any_order(tmp_path: Path) -> None:
    """The others ended at once, unless the first host had made the key by then, which waited ten minutes for them."""
    script = write_script(tmp_path, "import os; print('this is rank', os.environ['RANK'])")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    with hosts(2) as machines, contextlib.ExitStack() as stack:
        jobs: list[Running] = []
        lines = numbered(machines, "--no-preload", script=(script,), nproc="1")
        for machine, line in reversed([*zip(machines, lines, strict=True)]):
            running = start(*line, env=environ, before=machine.command, stderr=subprocess.STDOUT)
            jobs.append(stack.enter_context(running))
            if len(jobs) == 1:
                jobs[0].read_until("for the first host to create one, in case the two hosts share this folder")
        second, first = finish(jobs)
    assert (first.code, second.code) == (0, 0), first.out + second.out
    assert sorted(re.findall(r"this is rank (\d)", first.out)) == ["0", "1"]


def test_a_host_without_a_key_ends_and_says_what_to_do(tmp_path: Path) -> None:
    where = ("--node-rank", "1", "--master-addr", "192.0.2.1", "--rdzv-conf", "join_timeout=0.5", "--no-preload")
    line = ("run", "--nnodes", "2", *where, write_script(tmp_path, ""))
    with start(*line, env={"XDG_CONFIG_HOME": str(tmp_path)}, stderr=subprocess.STDOUT) as running:
        end = running.finish()
    assert end.code == 2
    assert "no key to join 192.0.2.1:" in end.out


def test_a_job_begins_with_the_hosts_that_it_needs_when_the_time_to_join_is_over(tmp_path: Path) -> None:
    """It failed with "1 of 1 hosts joined": the wait for further hosts lasted longer than the time to join."""
    script = write_script(tmp_path, "print('begun')")
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-conf", "join_timeout=0.5")
    words = ("--nnodes", "1:4", *where, "--nproc-per-node", "1", "--no-preload", script)
    with start("run", *words, env={"XDG_CONFIG_HOME": str(tmp_path)}) as running:
        end = running.finish()
    assert (end.code, end.out.endswith("begun\n")) == (0, True), end.out + end.err


@pytest.mark.slow(but=("phalanx",))
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_two_hosts_are_one_job_with_the_env_of_the_first(tmp_path: Path, backend: str) -> None:
    """A host that had the variable ignored it, its torch had begun with one thread, and the interface was replaced."""
    names = ("WORD", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "PHALANX_KEY")
    show = f"import os, torch\nassert torch.get_num_threads() == 1\nenv = [os.environ.get(name) for name in {names}]\n"
    script = write_script(tmp_path, show + _ADD_UP.replace("flush=True", "*env, flush=True"))
    given = ("--env", "WORD", "--env", "OMP_NUM_THREADS=1", "--env", "GLOO_SOCKET_IFNAME=eth0")
    key = {"PHALANX_KEY": str(Key(bytes(32)))}
    with hosts(2) as machines, contextlib.ExitStack() as stack:
        first, second = numbered(machines, script=(script, backend), nproc="1")
        first = (first[0], *given, *first[1:])
        jobs = [
            stack.enter_context(start(*line, env=environ, before=machine.command, stderr=subprocess.STDOUT))
            for machine, line, environ in (
                (machines[0], first, {**key, "WORD": "first", "NCCL_DEBUG": "INFO"}),
                (machines[1], second, {**key, "WORD": "second", "NCCL_DEBUG": "WARN"}),
            )
        ]
        one, other = finish(jobs)
    assert (one.code, other.code) == (0, 0), one.out + other.out
    assert sums(one) == [
        ["sum", "3.0", "0", "0", "2", "1", "0", "2", "0", "first", "1", "eth0", "INFO", "None"],
        ["sum", "3.0", "1", "0", "2", "1", "1", "2", "1", "first", "1", "eth0", "WARN", "None"],
    ]
    name = os.uname().nodename
    assert f"2 hosts: {name}#0 (10.77.0.1) rank 0; {name}#1 (10.77.0.2) rank 1" in one.out
    assert f"[1 {name}#1] sum" in one.out
    assert "Their output is shown there" in other.out
    assert "sum" not in other.out


@pytest.mark.slow
@pytest.mark.parametrize("network", [{"ipv6": True, "mtu": 1280}, {"dead_end": True}], ids=["ipv6", "dead end"])
def test_the_line_that_is_printed_is_all_that_others_type(tmp_path: Path, network: dict[str, bool]) -> None:
    """IPv6 alone, with the shortest packets; and a second interface with the default route that leads nowhere."""
    script = write_script(tmp_path, _ADD_UP)
    key = Key.generate()
    with hosts(2, **network) as machines, contextlib.ExitStack() as stack:
        environ = {"PHALANX_KEY": str(key)}
        line = ("run", "--nnodes", "2", "--nproc-per-node", "1", script, "phalanx")
        first = stack.enter_context(start(*line, env=environ, before=machines[0].command, stderr=subprocess.STDOUT))
        said = first.read_until("phalanx join")
        assert "waiting for 1 more host" in said
        join = said.splitlines()[-1].split()[1:]
        if "dead_end" in network:  # the address with the default route stands in front; the other one is named, too
            assert join[1].startswith("192.168.77.1:")
            (word,) = [word for word in first.read_until("10.77.0.1:").split() if word.startswith("10.77.0.1:")]
            join[1] = word.rstrip(",")
        second = stack.enter_context(start(*join, env=environ, before=machines[1].command, stderr=subprocess.STDOUT))
        ended = finish([first, second])
    assert [end.code for end in ended] == [0, 0], ended[0].out + ended[1].out
    assert [words[1] for words in sums(ended[0])] == ["3.0", "3.0"]


@pytest.mark.slow
def test_hosts_without_numbers_meet_at_the_one_that_is_named(tmp_path: Path) -> None:
    """As torchrun's c10d rendezvous: one line for all; a host with another number of ranks, and another role."""
    script = write_script(tmp_path, _ADD_UP)
    with hosts(3) as machines:
        line = (
            "run",
            "--nnodes=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={machines[1].address}:{_PORT}",
            "--rdzv-id=j",
        )
        lines = [(*line, f"--nproc-per-node={n}", "--role", f"r{n}", script, "phalanx") for n in (1, 1, 2)]
        with commands(machines, *lines) as jobs:
            finished = finish(jobs)
    assert [end.code for end in finished] == [0, 0, 0], [end.out for end in finished]
    said = sums(finished[1])  # the host that was named shows all
    assert [words[:3] for words in said] == [["sum", "10.0", str(rank)] for rank in range(4)]
    assert said[0][6] == "0"
    assert sorted(words[8] for words in said) == ["0", "0", "1", "1"]


@pytest.mark.slow
def test_the_first_failure_of_any_host_is_told_last_and_all_start_again(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx')\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt, flush=True)\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 3 and attempt == '0':\n"
        "    raise ValueError('the data is wrong')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 2:\n"
        "    os._exit(7)\n"
        "dist.barrier()\n",
    )
    logs = tmp_path / "logs"
    with hosts(2) as machines:
        lines = numbered(machines, "--max-restarts", "1", "--log-dir", str(logs), script=(script,))
        with commands(machines, *lines) as jobs:
            first, second = finish(jobs)
    assert (first.code, second.code) == (7, 7), first.out
    name = os.uname().nodename
    assert f"First failure: rank 3 of 4 on {name}#1 (10.77.0.2) (pid " in first.out
    assert "ValueError: the data is wrong at script.py:7 (exit code 1)" in first.out
    assert "starting all 4 ranks again (once more)" in first.out
    assert first.out.count("ValueError: the data is wrong\n") == 1  # of the traceback, which is told last
    last = first.out.rpartition("First failure: ")[2]
    assert last.startswith(f"rank 2 of 4 on {name}#1 (10.77.0.2) (pid ")
    assert last.rstrip().endswith("exit code 7")
    assert {path.name for path in logs.iterdir()} >= {f"rank_{rank}.log" for rank in range(4)}
    assert (logs / "rank_3.log").read_text().splitlines()[0] == "attempt 0"
    flight = json.loads((logs / "flight_attempt_0.json").read_text())
    (group,) = [group for group in flight["groups"] if group["name"] == "0"]
    assert [rank["rank"] for rank in group["ranks"]] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, 1], ids=["first", "other"])
def test_ctrl_c_on_any_host_ends_all(tmp_path: Path, where: int) -> None:
    script = write_script(tmp_path, _FOR_EVER)
    with hosts(2) as machines, commands(machines, *numbered(machines, script=(script,))) as jobs:
        jobs[0].read_until_all("running", 4)
        jobs[where].process.send_signal(signal.SIGINT)
        first, second = finish(jobs)
    assert (first.code, second.code) == (130, 130)
    on = f" on {os.uname().nodename}#1" if where else ""
    assert f"SIGINT{on}: stopping 4 ranks" in first.out
    stopped = "phalanx run: stopped by SIGINT (interrupted)"
    assert re.fullmatch(
        rf"{re.escape(stopped)}; ranks 0-3 at script\.py:\d+ \(--traceback shows tracebacks\)", first.lines[-1]
    )


@pytest.mark.slow
def test_a_host_that_cannot_start_a_rank_is_lost_for_that_reason(tmp_path: Path) -> None:
    """The first host reported that the other one was lost because "it has finished"."""
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os\n"
        "def refuse(): raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "os.fork = refuse\n"
    )
    environ = {"PHALANX_KEY": str(Key(bytes(32)))}
    refusing = {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    with hosts(2) as machines, contextlib.ExitStack() as stack:
        lines = numbered(machines, "--no-python", script=("sleep", "600"), nproc="1")
        jobs = [
            stack.enter_context(start(*line, env={**environ, **more}, before=at.command, stderr=subprocess.STDOUT))
            for line, more, at in zip(lines, ({}, refusing), machines, strict=True)
        ]
        first, second = finish(jobs)
    assert (first.code, second.code) == (1, 1)
    why = "rank 1 of 2 could not be started: Resource temporarily unavailable."
    assert f"phalanx run: {why}" in second.out
    assert f"#1 (10.77.0.2), with rank 1 of 2, is lost: {why}" in first.lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_host_that_goes_is_named_on_the_others(tmp_path: Path, how: str) -> None:
    """All three say who has gone, those that are left and the one that was cut off, and so does every rank.

    No process is left anywhere. A killed agent was noticed by its silence alone; now it is told at once, however long
    a host may be silent.
    """
    script = write_script(tmp_path, _FOR_EVER)
    with hosts(3) as machines:
        timeout = "600" if how == "killed" else "2"
        lines = numbered(machines, "--host-timeout", timeout, "--shutdown-timeout", "2", script=(script,), nproc="1")
        with commands(machines, *lines) as jobs:
            jobs[0].read_until_all("running", 3)
            jobs[1].process.kill() if how == "killed" else machines[1].cut_off()
            finished = finish(jobs)
    name = os.uname().nodename
    assert [finished[0].code, finished[2].code] == [1, 1]
    last = finished[0].lines[-1]
    begins = f"First failure: {name}#1 (10.77.0.2), with rank 1 of 3, is lost: "
    if how == "killed":
        assert last.startswith(f"{begins}{name} (member ")
        assert f"says: `phalanx run` (pid {jobs[1].process.pid}) was killed there, and its ranks with it" in last
    else:
        assert last.startswith(f"{begins}the coordinator received nothing")
        assert "(the limit is 2 s)" in last
    assert f"{name}#1 (10.77.0.2), with rank 1, is lost" in finished[2].out
    lost = r"phalanx\.errors\.PeerLostError: all_reduce #\d+ in group '0' on rank"
    assert re.search(rf"ranks 0, 2: {lost}", finished[0].out)
    assert how == "killed" or re.search(rf"{lost} 1: ", finished[1].out)
    if how == "cut off":
        assert "rank 1 (pid " in finished[0].out
        assert f"is gone: its host, {name}#1 (10.77.0.2), is lost: the coordinator received nothing" in finished[0].out
        assert "is gone: this host lost its connection to the first host" in finished[1].out
        assert finished[1].code == 1
        assert "phalanx run: the first host is lost: it has sent nothing for 2." in finished[1].out


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "ended", "cut off"])
def test_the_others_end_when_the_first_host_goes(tmp_path: Path, how: str) -> None:
    """A first host whose command was killed was waited for as long as one that is silent, though its kernel answered
    that nobody listens there any more."""
    script = write_script(tmp_path, _FOR_EVER)
    with hosts(3) as machines:
        timeout = "2" if how == "cut off" else "600"
        lines = numbered(machines, "--host-timeout", timeout, "--shutdown-timeout", "2", script=(script,), nproc="1")
        with commands(machines, *lines) as jobs:
            jobs[0].read_until_all("running", 3)
            if how == "cut off":
                machines[0].cut_off()
            else:
                jobs[0].process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
            _, *others = finish(jobs)
    for other in others:
        assert other.code == (143 if how == "ended" else 1)
        assert ("the first host is lost: it has sent nothing" in other.out) == (how == "cut off")
        said = f"the coordinator at 10.77.0.1:{_PORT} has ended: its host answers, but nothing listens there any longer"
        assert (said in other.out) == (how == "killed")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3.0, 5.0, 6.0])  # from four on, the kernel has given up the agents' connection
def test_a_short_cut_is_survived(seconds: float, tmp_path: Path) -> None:
    """A host without a network is lost after nine seconds: the ranks continue, and all ends well."""
    script = write_script(
        tmp_path,
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx')\n"
        "x = torch.ones(4)\n"
        "dist.all_reduce(x)\n"
        "print('running', flush=True)\n"
        "while True:\n"
        f"    over = torch.tensor([float(os.path.exists({str(tmp_path / 'over')!r}))])\n"
        "    dist.all_reduce(over, op=dist.ReduceOp.MIN)\n"
        "    if over.item():\n"
        "        break\n"
        "print('done')\n"
        "dist.destroy_process_group()\n",
    )
    with hosts(2) as machines, commands(machines, *numbered(machines, script=(script,), nproc="1")) as jobs:
        jobs[0].read_until_all("running", 2)
        machines[1].cut_off()
        jobs[0].process.send_signal(0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            jobs[1].process.wait(seconds)
        machines[1].plug_in()
        with contextlib.suppress(subprocess.TimeoutExpired):
            jobs[1].process.wait(3.0)
        (tmp_path / "over").touch()
        first, second = finish(jobs)
    assert (first.code, second.code) == (0, 0), first.out + second.out
    assert "done" in first.out


@pytest.mark.slow
def test_hosts_that_cannot_meet_say_who_tried_what(tmp_path: Path) -> None:
    script = write_script(tmp_path, _ADD_UP)
    with hosts(3) as machines:
        first, second, third = numbered(machines, "--rdzv-conf", "timeout=4", script=(script, "phalanx"))
        nowhere = tuple(word.replace("10.77.0.1", "10.77.0.99") for word in second)
        taken = tuple(word.replace(_PORT, "29478") for word in third)
        with commands(machines, first, nowhere, taken) as jobs:
            finished = finish(jobs)
    assert [end.code for end in finished] == [1, 1, 1]
    assert (
        "1 of 3 hosts joined within 4 s: this one. This host waited for the others at 10.77.0.1:29477"
        in finished[0].out
    )
    assert "gave up after " in finished[1].out
    assert "Tried 10.77.0.99:29477: " in finished[1].out
    assert "Tried 10.77.0.1:29478: refused (nothing listens at this port there)" in finished[2].out


@pytest.mark.slow
def test_addresses_that_lead_nowhere_are_found_before_ranks_start(tmp_path: Path) -> None:
    """The second host gives the address of an interface that nobody can reach: each says who tried it from where."""
    script = write_script(tmp_path, "print('never')\n")
    with hosts(2, dead_end=True) as machines:
        first, second = numbered(machines, script=(script,))
        second = (*second[:-1], "--local-addr", "192.168.77.2", script)
        with commands(machines, first, second) as jobs:
            finished = finish(jobs)
    name = os.uname().nodename
    assert [end.code for end in finished] == [1, 1]
    for end in finished:
        assert "the hosts cannot all reach each other" in end.out
        assert f"from {name}#0 to {name}#1 at 192.168.77.2:" in end.out
        assert "never" not in end.out


@pytest.mark.slow
def test_a_host_with_another_key_is_refused_by_address(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('never')\n")
    with hosts(2) as machines, contextlib.ExitStack() as stack:
        first, second = numbered(machines, "--rdzv-conf", "timeout=5", script=(script,))
        jobs = [
            stack.enter_context(
                start(
                    *line, env={"PHALANX_KEY": str(Key(bytes([n] * 32)))}, before=at.command, stderr=subprocess.STDOUT
                )
            )
            for n, (line, at) in enumerate(zip((first, second), machines, strict=True))
        ]
        ended = finish(jobs)
    assert [end.code for end in ended] == [1, 2], ended[1].out
    assert "refused a connection from 10.77.0.2: it does not know the job's key" in ended[0].out
    assert "does not accept this host's key" in ended[1].out


@pytest.mark.slow
def test_a_script_that_only_the_first_host_has_is_missed_where_it_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "only here"
    folder.mkdir()
    script = write_script(folder, "print('never')\n")
    with hosts(2) as machines, contextlib.ExitStack() as stack:
        environ = {"PHALANX_KEY": str(Key(bytes(32)))}
        line = ("run", "--nnodes", "2", "--master-port", _PORT, "--rdzv-conf", "timeout=6", script)
        first = stack.enter_context(start(*line, env=environ, before=machines[0].command, stderr=subprocess.STDOUT))
        first.read_until("phalanx join")
        Path(script).unlink()  # another host has another disk
        join = ("join", f"10.77.0.1:{_PORT}")
        second = stack.enter_context(start(*join, env=environ, before=machines[1].command, stderr=subprocess.STDOUT))
        ended = finish([first, second])
    assert [end.code for end in ended] == [1, 2]
    assert f"phalanx join: script {script!r}: no such file" in ended[1].out
    # The first host was not told, and its user waited for somebody who had long given up.
    (told,) = [line for line in ended[0].lines if "cannot run the job" in line]
    assert told.startswith(f"phalanx run: {os.uname().nodename} joined, but cannot run the job: script {script!r}")
    assert "1 of 2 hosts joined within 6 s" in ended[0].out  # it has waited on


@pytest.mark.slow
def test_no_port_of_a_joining_agent_is_open_while_ranks_run(tmp_path: Path) -> None:
    """Each joining agent kept the port open at which others had tried to reach it, until the job was over."""
    script = write_script(
        tmp_path,
        "import os, pathlib, sys, time\n"
        "lines = [line.split() for table in ('tcp', 'tcp6') for line in open(f'/proc/net/{table}').readlines()[1:]]\n"
        "ports = [int(words[1].rpartition(':')[2], 16) for words in lines if words[3] == '0A']\n"
        "print('listening', os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'], ports, flush=True)\n"
        # Rank 1 fails once all have printed: it may be so early that the others are stopped before.
        "folder = pathlib.Path(__file__).parent\n"
        "(folder / f\"said-{os.environ['RANK']}\").touch()\n"
        "while len(list(folder.glob('said-*'))) < 3: time.sleep(0.01)\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1')\n",
    )
    with hosts(3) as machines:
        lines = numbered(machines, "--max-restarts", "1", script=(script,), nproc="1")
        with commands(machines, *lines) as jobs:
            ended = finish(jobs)
    assert [end.code for end in ended] == [0, 0, 0], ended[0].out
    said = sorted(line.partition("] listening ")[2] for line in ended[0].lines if "] listening" in line)
    coordinator = f"[{_PORT}]"
    assert said == sorted(f"{rank} {n} {'[]' if rank else coordinator}" for rank in range(3) for n in range(2))


@pytest.mark.slow
def test_ctrl_z_suspends_no_job_on_several_hosts(tmp_path: Path) -> None:
    """It stopped the agent, with its coordinator; and after --host-timeout the other host ended its ranks."""
    script = write_script(tmp_path, _FOR_EVER)
    with hosts(2) as machines, commands(machines, *numbered(machines, script=(script,), nproc="1")) as jobs:
        jobs[0].read_until_all("running", 1)
        for job in jobs:
            job.process.send_signal(signal.SIGTSTP)
        jobs[0].read_until("a job on several hosts cannot be suspended")
        jobs[0].process.send_signal(signal.SIGINT)
        ended = finish(jobs)
    assert "is lost" not in ended[0].out + ended[1].out
    assert "cannot be suspended" in ended[1].out


@pytest.mark.slow
def test_stacks_of_all_hosts_are_shown_on_the_first(tmp_path: Path) -> None:
    script = write_script(tmp_path, _FOR_EVER)
    with hosts(2) as machines, commands(machines, *numbered(machines, script=(script,), nproc="1")) as jobs:
        jobs[0].read_until_all("running", 2)
        shown = []
        for machine, job in zip(machines, jobs, strict=True):
            with start("stacks", str(job.process.pid), before=machine.command) as stacks:
                shown.append(stacks.finish())
        jobs[0].process.send_signal(signal.SIGTERM)
        finish(jobs)
    name = os.uname().nodename
    assert [each.code for each in shown] == [0, 0], shown[0].err + shown[1].err
    here, there = shown[0].out.split(f"On {name}#1 (10.77.0.2):")
    assert "1 of 2 ranks running on this host, 1 of 2" in here
    assert "rank 0 (pid " in here
    assert "1 of 2 ranks running on this host, 2 of 2" in there
    assert "rank 1 (pid " in there
    for said in (here, there):
        assert "all_reduce #" in said
        assert 'script.py", line 8 in <module>' in said
    assert "Ranks of 1 other host are shown on the host that leads the job, usually the first" in shown[1].out


def test_a_job_on_one_host_loads_nothing_for_several(tmp_path: Path) -> None:
    """The first start on one host is what people wait for: neither ZeroMQ nor anything of several hosts is loaded."""
    script = write_script(tmp_path, "print('here')\n")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "phalanx.cli", "run", "--nproc-per-node=1", "--no-preload", script],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "phalanx._job.agent.job" in loaded
    assert not [name for name in loaded if name.partition(".")[0] == "zmq" or name.startswith("phalanx._job.hosts")]
    assert not [name for name in loaded if name.startswith(("phalanx._comm.control.", "phalanx._job.coordinator."))]
    assert {name for name in loaded if name.startswith("phalanx._comm.rendezvous.")} == {
        "phalanx._comm.rendezvous.launchers"
    }


@pytest.mark.slow
def test_a_host_too_many_is_told_so_and_one_that_is_lost_is_replaced(tmp_path: Path) -> None:
    """Two of three hosts begin; the third waits, and comes in when the second is lost and all start again.

    It waits also through a start for which both are still there: there it was thrown out ("the job has its 2 hosts").
    """
    fail, over = tmp_path / "fail", tmp_path / "over"
    script = write_script(
        tmp_path,
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx')\n"
        "dist.barrier()\n"
        "print('running attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "while True:\n"
        f"    if attempt == '0' and os.path.exists({str(fail)!r}):\n"
        "        sys.exit(5)\n"
        f"    over = torch.tensor([float(os.path.exists({str(over)!r}))])\n"
        "    dist.all_reduce(over, op=dist.ReduceOp.MIN)\n"
        "    if over.item():\n"
        "        break\n",
    )
    with hosts(3) as machines, contextlib.ExitStack() as stack:
        where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:{_PORT}")
        line = ("run", "--nnodes", "2", *where, "--nproc-per-node", "1", "--max-restarts", "2", "--host-timeout", "2")
        environ = {"PHALANX_KEY": str(Key(bytes(32)))}

        def begin(number: int) -> Running:
            at = machines[number].command
            return stack.enter_context(start(*line, script, env=environ, before=at, stderr=subprocess.STDOUT))

        first, second = begin(0), begin(1)
        first.read_until_all("running attempt 0", 2)
        third = begin(2)
        third.read_until("the job has begun without this host. This host waits for the job's next start")
        fail.touch()
        first.read_until_all("running attempt 1", 2)
        third.read_until("the job has begun without this host. This host waits for the job's next start")
        second.process.kill()
        first.read_until_all("running attempt 2", 2)
        over.touch()
        ended = finish([first, second, third])
    assert [end.code for end in ended] == [0, -signal.SIGKILL, 0], [end.out for end in ended]


@pytest.mark.slow
def test_ranks_on_two_hosts_see_what_torchrun_tells_them(tmp_path: Path) -> None:
    """One line, typed for torchrun and for us: the variables are the same, to the address and the job's name."""
    names = (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME",
        "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS",
    )  # fmt: skip
    script = write_script(
        tmp_path,
        f"import os\nprint('see', *(os.environ[name] for name in {names!r}), os.environ['MASTER_PORT'] != '0')\n",
    )
    seen = []
    with hosts(2) as machines:
        options = ("--role", "w", "--rdzv-id", "x", "--max-restarts", "2")
        ours = numbered(machines, *options, script=(script,), nproc="1")
        for python, skip in (("torch.distributed.run", 1), ("phalanx.cli", 0)):
            with contextlib.ExitStack() as stack:
                jobs = [
                    stack.enter_context(
                        start(*line[skip:], before=machine.command, python=("-m", python), stderr=subprocess.STDOUT,
                              env={"PHALANX_KEY": str(Key(bytes(32)))})
                    )
                    for machine, line in zip(machines, ours, strict=True)
                ]  # fmt: skip
                ended = finish(jobs)
            assert [end.code for end in ended] == [0, 0], [end.out for end in ended]
            lines = [line for end in ended for line in end.lines if "see " in line]
            seen.append(sorted(line.partition("see ")[2] for line in lines))
    assert len(seen[0]) == 2
    assert seen[0] == seen[1]


def wait_for_files(folder: Path, *names: str) -> None:
    """Wait until these files are there."""
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_sigterm_at_all_hosts_leaves_the_ranks_their_time_to_save(tmp_path: Path, first: int) -> None:
    """As Slurm sends it: that of the second host counted as the second signal, at which all are killed at once."""
    script = write_script(tmp_path, _SAVES_AT_THE_END)
    with hosts(2) as machines:
        lines = numbered(
            machines, "--no-preload", "--shutdown-timeout", "100", script=(script, str(tmp_path)), nproc="1"
        )
        with commands(machines, *lines) as jobs:
            wait_for_files(tmp_path, "ready-0", "ready-1")
            jobs[first].process.send_signal(signal.SIGTERM)
            wait_for_files(tmp_path, "told-0", "told-1")
            jobs[1 - first].process.send_signal(signal.SIGTERM)
            jobs[1 - first].process.send_signal(signal.SIGUSR1)  # the first host hears of it behind that
            jobs[0].read_until(f"asked {1 - first}")
            (tmp_path / "go").touch()
            ends = [job.finish() for job in jobs]
    assert (tmp_path / "saved-0").exists(), ends[0].out
    assert (tmp_path / "saved-1").exists(), ends[0].out
    assert [end.code for end in ends] == [0, 0], ends[0].out
    assert "killing" not in ends[0].out


@pytest.mark.slow
def test_more_hosts_than_this_one_may_have_connections_are_refused_with_what_to_type(tmp_path: Path) -> None:
    """It began, and told so when the first host for which there was no room had come."""
    script = write_script(tmp_path, "print('never')\n")
    words = ("run", "--nnodes", "500", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "0", script)
    environ = {"PHALANX_KEY": str(Key(bytes(32))), "XDG_CONFIG_HOME": str(tmp_path)}
    with start(*words, env=environ, before=("prlimit", "--nofile=512:512")) as refused:
        end = refused.finish()
    assert (end.code, end.out) == (2, "")
    assert "500 hosts need 998 connections to this one, and no more than 384 are allowed here" in end.err
    assert "Raise the limit to 1332 or more" in end.err
    assert "ulimit -Hn" in end.err
