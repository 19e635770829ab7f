"""ssh gets in by the user's own ways: jump hosts, an agent, options. Real sshd's in network namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.phalanx_command import Finished, start, write_script
from tests.system.sshd import SshHosts, ssh_hosts, why_no_sshd

from phalanx._base.deadline import Deadline

pytestmark = pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd())

_SAYS = "import os\nprint('rank', os.environ['RANK'], 'of host', os.environ['GROUP_RANK'], flush=True)\n"
_WAITS = "import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.02)\n"
_RANKS = ("--nproc-per-node", "1", "--no-preload", "--shutdown-timeout", "1")
_GONE_S = 30.0


def copy_config(cluster: SshHosts, path: Path, *without: str, first: str = "") -> str:
    """The ssh command with the cluster's configuration but for the options `without`, and with `first` before it."""
    lines = (cluster.folder / "config").read_text().splitlines()
    path.write_text(first + "\n".join(line for line in lines if not line.strip().startswith(without or "?")) + "\n")
    return f"ssh -F {path}"


def run(cluster: SshHosts, ssh: str, *words: str, hosts: str = "", env: dict[str, str] | None = None) -> Finished:
    line = ("run", "--hosts", hosts or cluster.names, "--ssh", ssh, *words)
    with start(*line, before=cluster.terminal.command, env=env) as running:
        finished = running.finish()
        assert Deadline.after(_GONE_S).wait_until(lambda: not any(cluster.left()), 0.02), cluster.left()
        assert Deadline.after(_GONE_S).wait_until(lambda: not running.survivors(), 0.02)
        return finished


def assert_both_ran(finished: Finished) -> None:
    assert finished.code == 0, finished.err
    assert finished.by_rank == [(rank, f"rank {rank} of host {rank}") for rank in range(2)]


@pytest.fixture
def jump(two: SshHosts, folder: Path) -> Iterator[str]:
    """The ssh command that reaches the second host through the first one: the terminal has no other way there."""
    behind = two.hosts[1].address
    route = [*two.terminal.command, "ip", "route"]
    subprocess.run([*route, "add", "blackhole", behind], check=True)
    yield copy_config(two, folder / "config", first=f"Host {behind}\n  ProxyJump {two.hosts[0].address}\n")
    subprocess.run([*route, "del", "blackhole", behind], check=True)


@pytest.mark.slow
def test_a_host_behind_a_jump_host_takes_part(two: SshHosts, folder: Path, jump: str) -> None:
    script = write_script(folder, _SAYS)
    assert_both_ran(run(two, jump, *_RANKS, script))
    refused = run(two, two.ssh, *_RANKS, script)
    assert refused.code == 2
    assert f"{two.hosts[1].address}  " in refused.err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_the_ssh_of_a_jump_host_ends_with_the_job(two: SshHosts, folder: Path, jump: str, name: str) -> None:
    """There are two for one host: Ctrl-C left one behind."""
    script = write_script(folder, _WAITS)
    with start("run", "--hosts", two.names, "--ssh", jump, *_RANKS, script, before=two.terminal.command) as running:
        running.read_until_all("up", 2)
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running.survivors()]
        assert sum(b"-W" in command for command in commands) == 1
        running.process.send_signal(signal.Signals[name])
        running.finish()
        assert Deadline.after(_GONE_S).wait_until(lambda: not running.survivors(), 0.02)
        assert Deadline.after(_GONE_S).wait_until(lambda: not any(two.left()), 0.02)


@pytest.mark.slow
def test_a_key_that_only_the_agent_has_opens_the_hosts(folder: Path, tmp_path: Path) -> None:
    script = write_script(folder, _SAYS)
    socket = str(tmp_path / "agent")
    with ssh_hosts(2, tmp_path) as cluster, subprocess.Popen(["ssh-agent", "-D", "-a", socket]) as agent:
        try:
            assert Deadline.after(_GONE_S).wait_until(lambda: os.path.exists(socket), 0.02)
            env = {"SSH_AUTH_SOCK": socket}
            key = cluster.folder / "id"
            subprocess.run(["ssh-add", "-q", str(key)], env=os.environ | env, check=True)
            key.unlink()
            ssh = copy_config(cluster, folder / "config", "IdentityFile", "IdentitiesOnly")
            finished = run(cluster, ssh, *_RANKS, script, env=env)
            locked_out = run(cluster, ssh, *_RANKS, script)
        finally:
            agent.terminate()
    assert_both_ran(finished)
    assert locked_out.code == 2
    assert locked_out.err.count("ssh needs a password") == 2


@pytest.mark.slow
def test_options_in_the_ssh_command_count_before_those_of_ours_and_of_the_file(two: SshHosts, folder: Path) -> None:
    """A launcher put its own user and port behind those of the user's."""
    script = write_script(folder, _SAYS)
    ssh = copy_config(two, folder / "config", "Port", "User ", first="RequestTTY force\nLogLevel DEBUG\nUser nobody\n")
    own = f"{ssh} -p 2222 -l trainer -o 'SetEnv=A=\"1 2\"'"
    assert_both_ran(run(two, own, *_RANKS, script))
    assert run(two, ssh, *_RANKS, script).code == 2


@pytest.mark.slow
def test_a_list_in_quotes_may_have_blanks_and_a_user(two: SshHosts, folder: Path) -> None:
    script = write_script(folder, _SAYS)
    ssh = copy_config(two, folder / "config", "User ")
    first, second = (host.address for host in two.hosts)
    assert_both_ran(run(two, ssh, "--no-preload", script, hosts=f"trainer@{first}:1 , trainer@{second}:1"))


@pytest.mark.slow
def test_localhost_may_be_any_host_of_the_list(two: SshHosts, folder: Path) -> None:
    script = write_script(folder, _SAYS)
    words = two.words(*_RANKS, script, hosts=f"{two.hosts[0].address},localhost")
    with start(*words, before=two.hosts[1].machine.command) as running:
        assert_both_ran(running.finish())
