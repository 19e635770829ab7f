"""`phalanx run --detach`: the job continues without the terminal, ssh and sshd. Real sshd's in network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.phalanx_command import Finished, start, write_script
from tests.system.sshd import SshHosts, find_processes, ssh_hosts, why_no_sshd

from phalanx._base.deadline import Deadline
from phalanx._comm.control.key import Key

pytestmark = pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd())

_WAITS = """
import os, sys, time
print("up", flush=True)
while not os.path.exists("enough"):
    time.sleep(0.02)
if os.environ["RANK"] == "3":
    sys.exit(7)
time.sleep(600)
"""
_ELASTIC = """
import os, time, torch, torch.distributed as dist, phalanx
from phalanx import elastic
dist.init_process_group('phalanx')
model = torch.nn.Linear(2, 2)
state = elastic.State(model=model)
@elastic.run(state)
def train(state):
    print('trains with', dist.get_world_size(), flush=True)
    while True:
        dist.all_reduce(torch.ones(1))
        state.commit()
        time.sleep(0.01)
train()
"""
_RANKS = ("--nproc-per-node", "2", "--no-preload", "--shutdown-timeout", "1")
_DETACH = ("--detach", "--log-dir", "logs")
_GONE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: SshHosts) -> Iterator[Path]:
    """The working folder. What a test leaves on the hosts is killed, and is a failure."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    left = [pid for pids in two.left() for pid in pids]
    kill_all(left)
    assert left == []


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has died with another one
            os.kill(pid, signal.SIGKILL)


def detach(cluster: SshHosts, *words: str, hosts: str = "", before: tuple[str, ...] = ()) -> Finished:
    """How the command ended. No ssh and no session of sshd is left; the job continues.

    It is not marked as the command's: it is no leak.
    """
    before, env = before or cluster.terminal.command, {"PHALANX_TEST_MARK": "of a detached job"}
    with start(*cluster.words(*words, hosts=hosts), before=before, env=env) as running:
        finished = running.finish()
    assert finished.code == 0, finished.err
    assert find_processes(cluster.terminal) == []
    machines = [host.machine for host in cluster.hosts]
    assert not any(name == "ssh" for machine in machines for _, name in find_processes(machine))
    assert Deadline.after(_GONE_S).wait_until(lambda: not any(host.sessions() for host in cluster.hosts), 0.02)
    return finished


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def find_line(finished: Finished, begin: str) -> list[str]:
    """The words of the command that the line with `begin` recommends."""
    (line,) = (line for line in finished.err.splitlines() if begin in line)
    return shlex.split(line.partition(begin)[2])


def wait_end(cluster: SshHosts, code: int, num_hosts: int = 2) -> None:
    assert Deadline.after(_GONE_S).wait_until(lambda: not any(cluster.left()), 0.02), cluster.left()
    for number in range(num_hosts):
        log = Path(f"logs/host-{number}.log").read_text()
        assert log.splitlines()[-1] == f"phalanx run: ended with exit code {code}", log


def test_a_detached_job_goes_on_and_its_first_failure_and_exit_code_are_in_the_logs(
    two: SshHosts, folder: Path
) -> None:
    script = write_script(folder, _WAITS)
    finished = detach(two, *_RANKS, *_DETACH, script)
    assert (
        f"output      {two.hosts[0].address}:{folder}/logs/host-0.log; its last line will be the exit code"
        in finished.err
    )
    (folder / "enough").touch()
    wait_end(two, 7)
    log = (folder / "logs" / "host-0.log").read_text()
    assert "First failure: rank 3 of 4" in log
    assert "[0-3] up" in log or log.count("] up") > 1
    assert [(folder / "logs" / f"rank_{rank}.log").read_text() for rank in range(4)] == ["up\n"] * 4


@pytest.mark.slow
def test_the_lines_that_it_prints_show_the_job_and_end_it_on_all_hosts(two: SshHosts, folder: Path) -> None:
    script = write_script(folder, _WAITS)
    finished = detach(two, *_RANKS, *_DETACH, script)
    command = [*two.terminal.command, sys.executable, "-m", "phalanx.cli"]
    _, *words = find_line(finished, "inspect it ")
    top = subprocess.run([*command, *words, "--json"], capture_output=True, text=True, check=True)
    assert [rank["rank"] for rank in json.loads(top.stdout)["ranks"]] == [0, 1, 2, 3]
    end = find_line(finished, "end it ")
    assert end[:4] == ["ssh", "-F", f"{two.folder}/config", two.hosts[0].address]
    subprocess.run([*two.terminal.command, *end], check=True)
    wait_end(two, 130)


@pytest.mark.slow
def test_the_key_of_a_detached_job_is_in_no_command_line_no_environment_and_no_log(two: SshHosts, folder: Path) -> None:
    script = write_script(folder, _WAITS)
    key = str(Key(bytes(range(32))))
    (folder / "key").write_text(f"{key}\n")
    (folder / "key").chmod(0o600)
    finished = detach(two, *_RANKS, *_DETACH, "--key-file", str(folder / "key"), script)
    pids = [pid for pids in two.left() for pid in pids]
    shown = b"".join(read(pid, name) for pid in pids for name in ("cmdline", "environ"))
    assert b"phalanx._job.ssh" in shown
    assert key.encode() not in shown
    subprocess.run([*two.terminal.command, *find_line(finished, "end it ")], check=True)
    wait_end(two, 130)
    assert all(key not in path.read_text() for path in (folder / "logs").glob("*.log"))


@pytest.mark.slow
def test_the_first_host_of_a_detached_job_may_be_the_one_where_the_command_is_typed(
    two: SshHosts, folder: Path
) -> None:
    script = write_script(folder, _WAITS)
    here = two.hosts[0].machine.command
    finished = detach(two, *_RANKS, *_DETACH, script, hosts=f"localhost,{two.hosts[1].address}", before=here)
    assert find_line(finished, "inspect it ") == ["phalanx", "top"]
    end = find_line(finished, "end it ")
    assert end[:2] == ["kill", "-INT"]
    subprocess.run([*here, *end], check=True)
    wait_end(two, 130)


@pytest.mark.slow
def test_a_detached_job_outlives_the_control_sockets_that_brought_it(two: SshHosts, folder: Path) -> None:
    """The connections stay behind the command, until the user closes them."""
    script = write_script(folder, _WAITS)
    config = folder / "config"
    own = f"ControlMaster auto\nControlPath {folder}/%h\nControlPersist yes\n"
    config.write_text(own + (two.folder / "config").read_text())
    words = ("run", "--hosts", two.names, "--ssh", f"ssh -F {config}", *_RANKS, *_DETACH, script)
    env = {"PHALANX_TEST_MARK": "of a detached job"}
    with start(*words, before=two.terminal.command, env=env) as running:
        assert running.finish().code == 0
    for host in two.hosts:
        end = [*two.terminal.command, "ssh", "-F", str(config), "-O", "exit", host.address]
        subprocess.run(end, check=True, capture_output=True)
    assert Deadline.after(_GONE_S).wait_until(lambda: not any(host.sessions() for host in two.hosts), 0.02)
    (folder / "enough").touch()
    wait_end(two, 7)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL", "a lost host"])
def test_until_all_ranks_have_started_the_connections_keep_the_job(two: SshHosts, folder: Path, end: str) -> None:
    """The ranks wait for the import of torch, which does not return."""
    there = shlex.quote(str(folder))
    stuck = f"import os, time\nopen(f'{there}/importing-{{os.getpid()}}', 'w').close()\nwhile True: time.sleep(0.02)\n"
    (folder / "torch.py").write_text(stuck)
    script = write_script(folder, _WAITS)
    words = two.words("--nproc-per-node", "2", "--shutdown-timeout", "1", *_DETACH, script)
    with start(*words, before=two.terminal.command, env={"PYTHONPATH": str(folder)}) as running:
        while len(list(folder.glob("importing-*"))) < 2:
            time.sleep(0.02)
        if end == "a lost host":
            for pid in two.hosts[1].sessions():
                os.kill(pid, signal.SIGKILL)
        else:
            running.process.send_signal(signal.Signals[end])
        finished = running.finish()
        assert finished.code == {"SIGINT": 130, "SIGKILL": -signal.SIGKILL, "a lost host": 1}[end], finished.err
        assert "all ranks have started" not in finished.err
        assert ("is lost: " in finished.err) == (end == "a lost host")
        assert Deadline.after(_GONE_S).wait_until(lambda: not any(two.left()), 0.02), two.left()


@pytest.mark.slow
def test_a_job_that_cannot_start_ends_with_its_words_and_its_exit_code(two: SshHosts, folder: Path) -> None:
    """The port at which the hosts are to meet is taken, which only the agent finds out."""
    script = write_script(folder, _WAITS)
    listens = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); input()"
    first = [*two.hosts[0].machine.command, sys.executable, "-c", listens]
    with subprocess.Popen(first, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taken:
        assert taken.stdout is not None
        words = two.words(*_RANKS, *_DETACH, "--master-port", taken.stdout.readline().strip(), script)
        with start(*words, before=two.terminal.command) as running:
            finished = running.finish()
        taken.communicate("\n")
    assert finished.code == 2, finished.err
    assert "Address already in use" in finished.err
    assert "all ranks have started" not in finished.err
    wait_end(two, 2, num_hosts=1)


@pytest.mark.slow
def test_a_folder_for_the_output_that_cannot_be_written_is_a_problem_before_the_start(
    two: SshHosts, folder: Path
) -> None:
    script = write_script(folder, _WAITS)
    (folder / "logs").touch()
    with start(*two.words(*_RANKS, *_DETACH, script), before=two.terminal.command) as running:
        finished = running.finish()
    assert finished.code == 2
    assert finished.err.startswith("phalanx run: nothing was started: 2 of 2 hosts cannot run this job")
    assert finished.err.count("--log-dir logs: logs cannot be written: File exists") == 2


@pytest.mark.slow
def test_a_detached_elastic_job_goes_on_without_its_first_host_and_ends_at_any_other(
    folder: Path, tmp_path: Path
) -> None:
    """The host that leads then writes what all print into its own log."""
    script = write_script(folder, _ELASTIC)
    options = ("--nproc-per-node", "1", "--nnodes", "2:3", "--host-timeout", "3", "--shutdown-timeout", "1")
    with ssh_hosts(3, tmp_path) as cluster:
        logs = [folder / "logs" / f"host-{number}.log" for number in range(3)]

        def wait_for(text: str, *numbers: int) -> int:
            """Return which of these hosts has written `text`."""
            while True:
                for number in numbers:
                    if text in logs[number].read_text():
                        return number
                time.sleep(0.02)

        detach(cluster, *options, *_DETACH, script)
        wait_for("would lead the job", 0)
        kill_all(cluster.hosts[0].pids())
        leader = wait_for("this host leads the job now", 1, 2)
        wait_for("trains with 2", leader)
        other = cluster.hosts[3 - leader].address
        top = [sys.executable, "-m", "phalanx.cli", "top", "--once", "--host", other, "--ssh", cluster.ssh]
        shown = subprocess.run([*cluster.terminal.command, *top], capture_output=True, text=True, check=True).stdout
        end = [*shlex.split(cluster.ssh), other, "kill", "-INT", shown.split()[1].rstrip(":,")]  # Job 4711, …
        subprocess.run([*cluster.terminal.command, *end], check=True)
        assert Deadline.after(_GONE_S).wait_until(lambda: not any(cluster.left()), 0.02), cluster.left()
        assert [log.read_text().splitlines()[-1] for log in logs[1:]] == ["phalanx run: ended with exit code 130"] * 2
        assert "ended with exit code" not in logs[0].read_text()
