"""`phalanx top --host` and `phalanx stacks --host`: on real sshd's, from a host where no job runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.hanging import _HANG
from tests.system.phalanx_command import Running, start, write_script
from tests.system.sshd import SshHosts, ssh_hosts, why_no_sshd

from phalanx._base.deadline import Deadline

pytestmark = pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd())

_WAITS = "import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.02)\n"
_GONE_S = 30.0


@contextlib.contextmanager
def job(cluster: SshHosts, folder: Path, text: str, num_ranks: int, said: str) -> Iterator[Running]:
    """A job on all hosts, with as many ranks in all, each of which has said `said`."""
    per_host = ("--nproc-per-node", str(num_ranks // len(cluster.hosts)))
    script = write_script(folder, text, "my script.py")
    words = cluster.words(*per_host, "--shutdown-timeout", "1", "--remote-dir", str(folder), script)
    with start(*words, before=cluster.terminal.command) as running:
        running.read_until_all(said, num_ranks)
        yield running
        running.process.send_signal(signal.SIGTERM)
        running.finish()
    assert Deadline.after(_GONE_S).wait_until(lambda: not any(cluster.left()), 0.02), cluster.left()


def words_on(cluster: SshHosts, number: int, name: str, *words: str) -> list[str]:
    where = ("--host", cluster.hosts[number].address, "--ssh", cluster.ssh)
    return [*cluster.terminal.command, sys.executable, "-m", "phalanx.cli", name, *where, *words]


def look(cluster: SshHosts, number: int, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = words_on(cluster, number, name, *words)
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_top_and_stacks_show_the_ranks_of_all_hosts_from_a_host_that_is_none_of_them(
    two: SshHosts, tmp_path: Path
) -> None:
    with job(two, tmp_path, _HANG, 2, "running"):
        top = look(two, 0, "top", "--json", "my script.py")
        assert top.returncode == 0, top.stderr
        seen = json.loads(top.stdout)
        assert (seen["world_size"], [rank["rank"] for rank in seen["ranks"]]) == (2, [0, 1])
        assert look(two, 0, "top", "--once").stdout.startswith("Job ")
        stacks = look(two, 0, "stacks")
        assert stacks.returncode == 0, stacks.stderr
        assert "all_reduce #" in stacks.stdout
        assert re.findall(r"^rank (\d) \(pid \d+\)", stacks.stdout, re.MULTILINE) == ["0", "1"]
        assert stacks.stdout.count('my script.py", line') == 2


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_command_there(two: SshHosts) -> None:
    none, wrong = look(two, 1, "top"), look(two, 1, "stacks", "--", "--no-such job")
    assert (none.returncode, none.stdout) == (1, "")
    assert "phalanx top: no job of yours is running on this host" in none.stderr
    assert wrong.returncode == 2
    assert "no `phalanx run` of yours on this host is called --no-such job." in wrong.stderr
    lost = look(two, 1, "top", "--host", "10.77.0.77")
    assert lost.returncode == 255  # that of ssh
    assert "10.77.0.77" in lost.stderr


@pytest.mark.slow
def test_a_host_without_that_python_says_so(two: SshHosts) -> None:
    done = look(two, 0, "top", "--remote-python", "no python")
    assert done.returncode == 127
    assert done.stderr.strip() == (
        "phalanx: no python: not found on this host. Name the Python that has Phalanx: --remote-python"
    )


@pytest.mark.slow(but=("bash",))
@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "fish", "tcsh"])
def test_a_name_arrives_as_it_was_typed_whatever_the_login_shell(tmp_path: Path, shell: str) -> None:
    path = next((f"{place}/{shell}" for place in ("/bin", "/usr/bin") if os.path.exists(f"{place}/{shell}")), None)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    name = "it's a \"job\" of $HOME !! `x` \\'\\ 100% ~ * #ö"
    with ssh_hosts(1, tmp_path, shell=path) as cluster:
        done = look(cluster, 0, "stacks", name)
    assert done.returncode == 2, done.stderr
    assert f"is called {name}." in done.stderr


@pytest.mark.slow
def test_without_a_terminal_standard_input_is_left_to_who_has_it(two: SshHosts) -> None:
    """In `while read host`, ssh swallowed the other hosts."""
    line = f"{shlex.join(words_on(two, 0, 'top'))} 2>/dev/null; cat"
    done = subprocess.run(["sh", "-c", line], input="the rest\n", capture_output=True, text=True, check=True)
    assert done.stdout == "the rest\n"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["q", "\x03", "cut"])
def test_on_a_terminal_it_is_drawn_anew_until_a_key_or_the_end_of_the_connection(
    two: SshHosts, tmp_path: Path, end: str
) -> None:
    with job(two, tmp_path, _WAITS, 2, "up"):
        before = two.left()
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 91, 0, 0))  # tcsetwinsize: from 3.11 on
        command = words_on(two, 0, "top", "--interval", "0.1")
        view = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        with view:
            shown = b""
            while len(re.findall(rb"2 of 2 ranks running", shown)) < 3:
                shown += os.read(ours, 4096)
            if end == "cut":
                view.kill()
            else:
                os.write(ours, end.encode())
            with contextlib.suppress(OSError):  # EIO: it has ended
                while data := os.read(ours, 4096):
                    shown += data
        os.close(ours)
        assert view.returncode == (-signal.SIGKILL if end == "cut" else 0), shown
        assert Deadline.after(_GONE_S).wait_until(lambda: two.left() == before, 0.02)


@pytest.mark.slow
def test_it_goes_over_the_control_socket_of_the_job(two: SshHosts, tmp_path: Path) -> None:
    """The configuration of the one that looks has no key: it gets in over the job's connection, or not at all."""
    script = write_script(tmp_path, _WAITS)
    lines = (two.folder / "config").read_text().splitlines()
    shared, keyless = tmp_path / "shared", tmp_path / "keyless"
    own = f"ControlMaster auto\nControlPath {tmp_path}/%h\nControlPersist yes\n"
    shared.write_text(own + "\n".join(lines))
    keyless.write_text(own + "\n".join(line for line in lines if "IdentityFile" not in line))
    words = ("--hosts", two.names, "--nproc-per-node", "1", "--no-preload", "--shutdown-timeout", "1")
    place = ("--ssh", f"ssh -F {shared}", "--remote-dir", str(tmp_path))
    try:
        with start("run", *words, *place, script, before=two.terminal.command) as running:
            running.read_until_all("up", 2)
            done = look(two, 0, "top", "--ssh", f"ssh -F {keyless}", "--once")
            assert done.returncode == 0, done.stderr
            assert "2 of 2 ranks running" in done.stdout
            running.process.send_signal(signal.SIGTERM)
            running.finish()
    finally:
        for host in two.hosts:
            leave = ["ssh", "-F", str(shared), "-O", "exit", host.address]
            subprocess.run([*two.terminal.command, *leave], capture_output=True, check=True)
    assert look(two, 0, "top", "--ssh", f"ssh -F {keyless}", "--once").returncode == 255


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--host", "a:2222"), "phalanx top: --host a:2222: it has no number of ranks. For the port of sshd: --ssh"),
        (("--host", "a,b"), "phalanx top: --host: 'a,b': must be HOST"),
        (("--host", "-oProxyCommand=x"), "phalanx top: --host: '-oProxyCommand=x': must be HOST"),
        (("--host", "a", "--ssh", "no-such-ssh"), "phalanx top: --ssh 'no-such-ssh': no such command here"),
        (("--host", "a", "--remote-python", "~/python"), "phalanx top: --remote-python '~/python': must be"),
        (("--ssh", "ssh -p 3"), "Give --host, too"),
        pytest.param(
            ("--host", "a", "--web"),
            "ssh -t -L 8000:127.0.0.1:8000 a phalanx top --web --port 8000",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_is_refused_with_advice(words: tuple[str, ...], expected: str) -> None:
    command = [sys.executable, "-m", "phalanx.cli", "top", *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert expected in done.stderr
