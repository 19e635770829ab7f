"""`phalanx run --hosts`: real sshd's in network namespaces, started from a host that is none of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.system.phalanx_command import Finished, Running, run, start, write_script
from tests.system.sshd import SshHosts, ssh_hosts, why_no_sshd

import phalanx
from phalanx._base.deadline import Deadline
from phalanx._comm.control.key import Key

pytestmark = pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd())

_TELLS = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MINE", "OTHER", "NCCL_DEBUG", "PHALANX_KEY")
told = {name: os.environ.get(name) for name in names}
print(json.dumps({"arguments": sys.argv[1:], "folder": os.getcwd(), **told}), flush=True)
print("on stderr", file=sys.stderr, flush=True)
"""
_WAITS = """
import os, sys, time
print("up", flush=True)
while True:
    time.sleep(0.02)
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
    open(f'with-{dist.get_world_size()}-{os.getpid()}', 'w').close()
    while True:
        over = torch.tensor(float(os.path.exists('enough')))
        dist.all_reduce(over)
        state.commit()
        time.sleep(0.01)
        if over:
            return
train()
"""
_RANKS = ("--nproc-per-node", "2", "--no-preload")
_SHORT = ("--shutdown-timeout", "1")
_GONE_S = 30.0


def told(out: str) -> list[dict[str, object]]:
    """What the ranks of `_TELLS` said, by rank."""
    said = [json.loads(line.partition("] ")[2]) for line in out.splitlines() if line.endswith("}")]
    return sorted(said, key=lambda each: int(each["RANK"]))


def wait_for_files(folder: Path, pattern: str, count: int) -> None:
    while len(list(folder.glob(pattern))) < count:
        time.sleep(0.02)


def assert_nothing_is_left(cluster: SshHosts, running: Running) -> None:
    assert Deadline.after(_GONE_S).wait_until(lambda: not any(cluster.left()), 0.02), cluster.left()
    assert running.survivors() == []


def on(cluster: SshHosts, *words: str, env: dict[str, str] | None = None, hosts: str = "") -> tuple[int, str, str]:
    """How a job on all hosts ended, started from the terminal; nothing of it is left."""
    with start(*cluster.words(*words, hosts=hosts), before=cluster.terminal.command, env=env) as running:
        finished = running.finish()
        assert_nothing_is_left(cluster, running)
    return finished.code, finished.out, finished.err


def test_one_command_starts_the_ranks_of_two_hosts_and_shows_what_they_print(two: SshHosts, folder: Path) -> None:
    write_script(folder, _TELLS, "tells.py")
    env = {"NCCL_DEBUG": "WARN", "OTHER": "2", "SECRET": "x"}
    code, out, err = on(two, *_RANKS, "--env", "MINE=it's 1", "--env", "OTHER", "tells.py", "a b", "--lr=1", env=env)
    assert code == 0, err
    said = told(out)
    assert [(each["RANK"], each["LOCAL_RANK"], each["GROUP_RANK"]) for each in said] == [
        ("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"),
    ]  # fmt: skip
    for each in said:
        assert each["arguments"] == ["a b", "--lr=1"]
        assert each["folder"] == str(folder)
        assert (each["WORLD_SIZE"], each["NCCL_DEBUG"]) == ("4", "WARN")
        assert (each["MINE"], each["OTHER"], each["PHALANX_KEY"]) == ("it's 1", "2", None)
    assert "on stderr" in err
    assert "on stderr" not in out
    assert f"2 hosts over ssh; rendezvous at {two.hosts[0].address} (eth0 of {two.hosts[0].address})" in err


@pytest.mark.slow
def test_a_host_has_the_number_of_ranks_that_the_list_gives_it(two: SshHosts, folder: Path) -> None:
    script = write_script(folder, _TELLS)
    (folder / "hosts.txt").write_text(f"# mine\n{two.hosts[0].address} slots=1\n{two.hosts[1].address} slots=3\n")
    words = ("run", "--hostfile", "hosts.txt", "--ssh", two.ssh, *_RANKS, script)
    finished = run(*words[1:], before=two.terminal.command)
    assert finished.code == 0, finished.err
    assert [each["GROUP_RANK"] for each in told(finished.out)] == ["0", "1", "1", "1"]


def test_ranks_of_two_hosts_train_together(two: SshHosts, folder: Path) -> None:
    script = write_script(
        folder,
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx')\n"
        "x = torch.ones(3) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\nprint('sum', x.tolist(), flush=True)\ndist.destroy_process_group()\n",
    )
    code, out, err = on(two, "--nproc-per-node", "1", script)
    assert code == 0, err
    assert "sum [3.0, 3.0, 3.0]" in out


def test_the_key_is_in_no_command_line_and_in_no_environment(two: SshHosts, folder: Path) -> None:
    script = write_script(folder, _WAITS)
    key = Key(bytes(range(32)))
    (folder / "key").write_text(f"{key}\n")
    (folder / "key").chmod(0o600)
    words = two.words(*_RANKS, *_SHORT, "--key-file", str(folder / "key"), script)
    with start(*words, before=two.terminal.command) as running:
        running.read_until_all("up", 4)
        shown = b""
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            for name in ("cmdline", "environ"):
                try:
                    shown += Path(f"/proc/{entry}/{name}").read_bytes()
                except OSError:
                    continue  # it has ended
        assert b"phalanx._job.ssh" in shown
        assert str(key).encode() not in shown
        running.process.send_signal(signal.SIGINT)
        assert running.finish().code == 130


@pytest.mark.slow(but=("SIGINT",))
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_signal_at_the_terminal_ends_the_job_on_all_hosts(two: SshHosts, folder: Path, name: str) -> None:
    script = write_script(folder, _WAITS)
    number = signal.Signals[name]
    with start(*two.words(*_RANKS, *_SHORT, script), before=two.terminal.command) as running:
        running.read_until_all("up", 4)
        running.process.send_signal(number)
        finished = running.finish()
        assert finished.code == (128 + number if name != "SIGKILL" else -number), finished.err
        assert_nothing_is_left(two, running)


@pytest.mark.slow(but=("here",))
@pytest.mark.parametrize("end", ["here", "there"])
def test_a_broken_connection_ends_the_job_on_all_hosts(two: SshHosts, folder: Path, end: str) -> None:
    script = write_script(folder, _WAITS)
    with start(*two.words(*_RANKS, *_SHORT, script), before=two.terminal.command) as running:
        running.read_until_all("up", 4)
        if end == "here":
            children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
            broken = [pid for pid in children if two.names.split(",")[1].encode() in read_command(pid)]
        else:
            broken = [str(pid) for pid in two.hosts[1].sessions()]
        for pid in broken:
            os.kill(int(pid), signal.SIGKILL)
        finished = running.finish()
        assert finished.code == 1, finished.err
        assert f"phalanx run: the connection to {two.hosts[1].address} is lost: " in finished.err
        assert_nothing_is_left(two, running)


def read_command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_the_loss_of_the_terminals_machine_ends_the_job(two: SshHosts, folder: Path) -> None:
    """No kernel says so: its cable is pulled, and it stays silent."""
    script = write_script(folder, _WAITS)
    words = two.words(*_RANKS, *_SHORT, "--host-timeout", "2", script)
    with start(*words, before=two.terminal.command) as running:
        running.read_until_all("up", 4)
        two.terminal.cut_off()
        try:
            finished = running.finish()
            assert finished.code == 1, finished.err
            assert f"the connection to {two.hosts[0].address} is lost" in finished.err
            assert_nothing_is_left(two, running)
        finally:
            two.terminal.plug_in()


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_the_job_on_all_hosts(two: SshHosts, folder: Path) -> None:
    script = write_script(folder, _WAITS)
    words = two.words(*_RANKS, *_SHORT, "--host-timeout", "2", script)
    with start(*words, before=two.terminal.command) as running:
        running.read_until_all("up", 4)
        two.hosts[1].machine.cut_off()
        try:
            finished = running.finish()
            assert finished.code == 1, finished.err
            assert_nothing_is_left(two, running)
        finally:
            two.hosts[1].machine.plug_in()


@pytest.mark.slow
def test_a_terminal_here_is_a_terminal_for_the_job(two: SshHosts, folder: Path) -> None:
    """The progress of the ranks is drawn in place, as wide as the screen is; Ctrl-C at it ends the job."""
    script = write_script(
        folder,
        "import os, sys, time\n"
        "print('columns', os.environ['COLUMNS'], flush=True)\n"
        "while True:\n    sys.stdout.write('\\rstep 7')\n    sys.stdout.flush()\n    time.sleep(0.05)\n",
    )
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 91, 0, 0))  # tcsetwinsize: from 3.11 on
    words = [*two.terminal.command, sys.executable, "-m", "phalanx.cli", *two.words(*_RANKS, *_SHORT, script)]
    command = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    with command:
        shown = b""
        while shown.count(b"step 7") < 2 or b"columns 86" not in shown:
            shown += os.read(ours, 4096)
        assert b"\x1b[" in shown  # the line is drawn again
        command.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: all of them have ended
            while data := os.read(ours, 4096):
                shown += data
    os.close(ours)
    assert command.returncode == 130, shown
    assert b"stopped by SIGINT" in shown
    assert Deadline.after(_GONE_S).wait_until(lambda: not any(two.left()), 0.02)


@pytest.mark.slow
def test_output_that_nobody_reads_yet_is_kept_and_comes_whole(two: SshHosts, folder: Path) -> None:
    """A pager that stands still for longer than the timeout of a silent host ends nothing."""
    script = write_script(
        folder,
        "import os\n"
        "for number in range(20000):\n    print(os.environ['RANK'], number, 'x' * 100)\n"
        "open('done-' + os.environ['RANK'], 'w')\n",
    )
    words = two.words("--nproc-per-node", "1", "--no-preload", "--host-timeout", "3", script)
    with start(*words, before=two.terminal.command) as running:
        assert running.process.stdout is not None
        select.select([running.process.stdout], [], [])
        assert not Deadline.after(6.0).wait_until(lambda: running.process.poll() is not None, 0.1)
        finished = running.finish()
    assert finished.code == 0, finished.err
    expected = {f"{rank} {number} {'x' * 100}" for rank in range(2) for number in range(20000)}
    assert len(finished.lines) == len(expected)
    assert {line.partition("] ")[2] for line in finished.lines} == expected


@pytest.mark.slow
def test_a_full_disk_on_a_host_is_told_and_the_job_goes_on(folder: Path, tmp_path: Path) -> None:
    logs = folder / "logs"
    logs.mkdir()
    full = f"mount -t tmpfs -o size=4k none {logs}; head -c 100000 /dev/zero > {logs}/full 2>/dev/null || true"
    script = write_script(folder, _TELLS)
    with ssh_hosts(2, tmp_path, mounts={1: full}) as cluster:
        code, out, err = on(cluster, *_RANKS, "--log-dir", "logs", script)
    assert code == 0, err
    assert len(told(out)) == 4
    assert "No space left on device" in err


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_rank_that_failed_first(two: SshHosts, folder: Path) -> None:
    script = write_script(
        folder,
        "import os, sys, time\nif os.environ['RANK'] == '3':\n    print('bye', file=sys.stderr)\n    sys.exit(7)\n"
        "while True:\n    time.sleep(0.02)\n",
    )
    code, _, err = on(two, *_RANKS, *_SHORT, script)
    assert code == 7
    assert "rank 3 of 4" in err
    assert "bye" in err
    assert err.count("First failure") == 1


@pytest.mark.slow
def test_all_problems_of_all_hosts_come_in_one_table_and_nothing_is_started(folder: Path, tmp_path: Path) -> None:
    work = folder / "work"
    work.mkdir()
    (folder / "old").mkdir()
    os.chdir(work)
    write_script(work, f"open({str(folder / 'started')!r}, 'w')", "train.py")
    write_script(folder / "old", "print('old')", "train.py")
    mounts = {
        1: f"mount -t tmpfs none {work}",
        2: f"mount --bind {folder}/old {work}",
        5: f"mount -t tmpfs none {shlex.quote(str(Path(sys.executable).parent))}",
    }
    with ssh_hosts(6, tmp_path, mounts=mounts) as cluster:
        known = cluster.folder / "known"
        keys = [(host.folder / "key.pub").read_text() for host in cluster.hosts]
        known.write_text(known.read_text().replace(keys[3], keys[2]).replace("[10.77.0.5]", "[10.77.0.99]"))
        hosts = f"{cluster.names},10.77.0.77,nowhere.invalid"
        code, out, err = on(cluster, "--no-preload", "train.py", hosts=hosts)
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == "phalanx run: nothing was started: 7 of 8 hosts cannot run this job"
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in err.splitlines()[1:] if line[2:3].strip()}
    assert rows == {
        "10.77.0.2": f"script 'train.py': no such file in {work}.",
        "10.77.0.3": "its script is not the same as on 10.77.0.1",
        "10.77.0.4": "its host key has changed",
        "10.77.0.5": "ssh does not know its host key",
        "10.77.0.6": f"{sys.executable} is missing there",
        "10.77.0.77": "no route to it",
        "nowhere.invalid": "its name does not resolve",
    }
    assert f"Copy one of them: rsync -a {work}/ 10.77.0.3:{work}/" in err
    assert not (folder / "started").exists()


@pytest.mark.slow
def test_a_password_is_not_asked_for(two: SshHosts, folder: Path) -> None:
    """It hung at a prompt that nobody saw."""
    script = write_script(folder, "print('never')")
    config = folder / "config"
    lines = (two.folder / "config").read_text().splitlines()
    config.write_text("\n".join(line for line in lines if "IdentityFile" not in line))
    words = ("--hosts", two.names, "--ssh", f"ssh -F {config}", script)
    finished = run(*words, before=two.terminal.command)
    assert finished.code == 2
    assert finished.err.count("ssh needs a password") == 2
    assert "ssh-copy-id" in finished.err


@pytest.mark.slow
def test_a_host_whose_sshd_is_silent_is_in_the_table_after_ten_seconds(folder: Path, tmp_path: Path) -> None:
    script = write_script(folder, "print('never')")
    with ssh_hosts(2, tmp_path) as cluster:
        cluster.hosts[1].server.send_signal(signal.SIGSTOP)
        try:
            code, _, err = on(cluster, script)
        finally:
            cluster.hosts[1].server.send_signal(signal.SIGCONT)
    assert code == 2
    assert err.splitlines()[1:] == [
        "  10.77.0.2  it does not answer",
        "             Is it switched on? Does ssh 10.77.0.2 work?",
    ]


@pytest.mark.slow
def test_a_folder_that_a_host_lacks_is_named(two: SshHosts, folder: Path) -> None:
    write_script(folder, "print('never')", "train.py")
    code, _, err = on(two, "--remote-dir", "/no/such/folder", "train.py")
    assert code == 2
    assert err.count("the folder /no/such/folder cannot be entered: No such file or directory") == 2


@pytest.mark.slow
def test_a_script_that_is_newer_here_is_noticed(folder: Path, tmp_path: Path) -> None:
    (folder / "old").mkdir()
    (folder / "work").mkdir()
    os.chdir(folder / "work")
    write_script(folder / "old", "print('old')", "train.py")
    write_script(folder / "work", "print('new')", "train.py")
    with ssh_hosts(1, tmp_path, mounts={0: f"mount --bind {folder}/old {folder}/work"}) as cluster:
        code, out, err = on(cluster, *_RANKS, "train.py")
    assert (code, "old" in out) == (0, True)
    assert "the hosts run their own copy of train.py, which differs from the one here. To copy it: rsync -a" in err


@pytest.mark.slow
def test_a_script_here_does_not_count_where_another_folder_was_chosen(two: SshHosts, folder: Path) -> None:
    other = folder / "there"
    other.mkdir()
    write_script(other, "print('old')", "train.py")
    write_script(folder, "print('new')", "train.py")
    code, out, err = on(two, *_RANKS, "--remote-dir", str(other), "train.py")
    assert (code, "old" in out, "differs" in err) == (0, True, False)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "fish", "tcsh"])
def test_what_a_script_receives_is_what_was_typed_whatever_the_login_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, shell: str
) -> None:
    """Blanks and quotes were lost between two shells; banners and what a .bashrc prints got between the messages."""
    path = next((f"{place}/{shell}" for place in ("/bin", "/usr/bin") if os.path.exists(f"{place}/{shell}")), None)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    draw = random.Random(request.config.getoption("--seed"))
    letters = "ab ~*?$`'\"\\!#&|;<>(){}[]=%\n\tö€"
    arguments = ["".join(draw.choices(letters, k=draw.randrange(9))) for _ in range(12)]
    work = tmp_path / "a 'b' \"c\" $HOME !x; ö"
    work.mkdir()
    monkeypatch.chdir(work)
    write_script(work, _TELLS, "it's a script.py")
    noise = "echo this is noise\necho and this >&2\n"
    home = {".bashrc": noise, ".zshenv": noise, ".tcshrc": "echo this is noise\n", ".config/fish/config.fish": noise}
    with ssh_hosts(1, tmp_path, shell=path, home=home, banner="no noise here\n") as cluster:
        words = ("--nproc-per-node", "1", "--no-preload", "--env", "MINE=" + arguments[0], "it's a script.py")
        code, out, err = on(cluster, *words, *arguments)
    assert code == 0, err
    (said,) = told(out)
    assert said["arguments"] == arguments
    assert said["folder"] == str(work)
    assert said["MINE"] == arguments[0]
    assert "noise" not in out + err


@pytest.mark.slow
def test_a_python_by_name_is_the_one_that_the_login_shell_finds(folder: Path, tmp_path: Path) -> None:
    script = write_script(folder, _TELLS)
    own = folder / "bin"
    own.mkdir()
    (own / "my-python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (own / "my-python").chmod(0o755)
    with ssh_hosts(1, tmp_path, home={".bashrc": f"export PATH={own}:$PATH\n"}) as cluster:
        code, out, err = on(cluster, *_RANKS, "--remote-python", "my-python", script)
        assert code == 0, err
        assert len(told(out)) == 2
        code, _, err = on(cluster, *_RANKS, "--remote-python", "no-python", script)
    assert code == 2
    assert "10.77.0.1  no-python is missing there" in err


def open_ways_to(paths: Sequence[str], spare: str) -> str:
    """Commands of sh by which every user may go to `paths`: folders on the way that only root enters are covered."""
    covered: dict[Path, set[Path]] = {}
    for path in map(Path, paths):
        for folder in path.parents:
            if not folder.stat().st_mode & 0o001:
                covered.setdefault(folder, set()).add(folder / path.relative_to(folder).parts[0])
    lines = []
    for number, folder in enumerate(sorted(covered)):  # a folder comes before those in it
        kept = [(child, f"{spare}/{number}/{child.name}") for child in sorted(covered[folder])]
        for child, there in kept:
            lines += [f"mkdir -p {shlex.quote(there)}", f"mount --rbind {shlex.quote(str(child))} {shlex.quote(there)}"]
        lines.append(f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}")
        for child, there in kept:
            lines += [
                f"mkdir {shlex.quote(str(child))}",
                f"mount --rbind {shlex.quote(there)} {shlex.quote(str(child))}",
            ]
    return "; ".join(lines) or "true"


@pytest.mark.slow
def test_a_user_who_is_not_root_runs_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's folder is its user's alone
        os.chmod(name, 0o755)
        monkeypatch.chdir(name)
        write_script(Path(name), "import os\nprint('uid', os.getuid(), flush=True)", "script.py")
        way = open_ways_to([sys.executable, os.path.realpath(sys.executable), phalanx.__file__], f"{name}/spare")
        with ssh_hosts(2, Path(name), uid=54321, mounts={0: way, 1: way}) as cluster:
            finished = Finished(*on(cluster, *_RANKS, "script.py"))
    assert finished.code == 0, finished.err
    assert finished.by_rank == [(rank, "uid 54321") for rank in range(4)]


@pytest.mark.slow
def test_hosts_meet_at_an_address_that_leads_to_the_first(folder: Path, tmp_path: Path) -> None:
    """Every host has a second interface, of one network, whose cable leads nowhere."""
    script = write_script(folder, _TELLS)
    with ssh_hosts(2, tmp_path, dead_end=True) as cluster:
        code, out, err = on(cluster, *_RANKS, script)
        assert code == 0, err
        assert len(told(out)) == 4
        assert "rendezvous at 10.77.0.1 (eth0 of 10.77.0.1)" in err
        code, _, err = on(cluster, *_RANKS, "--master-addr", "192.168.77.1", script)
    assert code == 2
    assert "10.77.0.2  it does not reach 10.77.0.1: 192.168.77.1:" in err
    assert "--master-addr" in err


@pytest.mark.slow
def test_the_first_host_may_be_the_one_where_the_command_is_typed(two: SshHosts, folder: Path) -> None:
    script = write_script(folder, _TELLS)
    for name in (two.hosts[0].address, "localhost"):
        words = two.words(*_RANKS, script, hosts=f"{name},{two.hosts[1].address}")
        with start(*words, before=two.hosts[0].machine.command) as running:
            finished = running.finish()
        assert finished.code == 0, finished.err
        assert [each["GROUP_RANK"] for each in told(finished.out)] == ["0", "0", "1", "1"]


@pytest.mark.slow
def test_one_machine_under_two_names_is_refused(two: SshHosts, folder: Path) -> None:
    script = write_script(folder, "print('never')")
    words = two.words(script, hosts=f"{two.hosts[0].address},localhost")
    with start(*words, before=two.hosts[0].machine.command) as running:
        finished = running.finish()
    assert finished.code == 2
    assert f"localhost  it is the same machine as {two.hosts[0].address}" in finished.err


@pytest.mark.slow
def test_a_control_socket_of_the_users_is_used_and_left_alone(two: SshHosts, folder: Path) -> None:
    """ssh leaves a master behind that has the pipe for errors open: a starter that waits for its end hangs."""
    script = write_script(folder, _TELLS)
    config = folder / "config"
    own = f"ControlMaster auto\nControlPath {folder}/%h\nControlPersist yes\n"
    config.write_text(own + (two.folder / "config").read_text())
    words = ("--hosts", two.names, "--ssh", f"ssh -F {config}", *_RANKS, script)
    try:
        with start("run", *words, before=two.terminal.command) as running:
            finished = running.finish()
        assert finished.code == 0, finished.err
        assert len(told(finished.out)) == 4
    finally:
        ends = [
            subprocess.run(
                [*two.terminal.command, "ssh", "-F", str(config), "-O", "exit", host.address],
                capture_output=True,
                check=False,
            ).returncode
            for host in two.hosts
        ]
    assert ends == [0, 0]


@pytest.mark.slow
def test_a_host_of_an_elastic_job_that_was_lost_is_started_again_over_ssh(folder: Path, tmp_path: Path) -> None:
    script = write_script(folder, _ELASTIC)
    words = ("--nproc-per-node", "1", "--nnodes", "2:3", *_SHORT, script)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(ssh_hosts(3, tmp_path))
        command = start(*cluster.words(*words), before=cluster.terminal.command, stderr=subprocess.STDOUT)
        with command as running:
            running.read_until("trains with 3")
            for pid in cluster.hosts[2].sessions():
                os.kill(pid, signal.SIGKILL)
            running.read_until(f"the connection to {cluster.hosts[2].address} is lost")
            running.read_until(f"{cluster.hosts[2].address} answers again; its ranks start again")
            running.read_until("accepted; 3 ranks on 3 hosts continue")
            (folder / "enough").touch()
            finished = running.finish()
            assert finished.code == 0, finished.out
            assert_nothing_is_left(cluster, running)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "a broken connection", "cut off"])
def test_an_elastic_job_goes_on_without_its_first_host_which_comes_back_over_ssh(
    folder: Path, tmp_path: Path, how: str
) -> None:
    """Afterwards another host speaks for all, although the first one answers again."""
    script = write_script(folder, _ELASTIC)
    words = ("--nproc-per-node", "1", "--nnodes", "2:3", "--host-timeout", "3", *_SHORT, script)
    with ssh_hosts(3, tmp_path) as cluster:
        first = cluster.hosts[0]
        command = start(*cluster.words(*words), before=cluster.terminal.command, stderr=subprocess.STDOUT)
        with command as running:
            running.read_until("would lead the job")
            wait_for_files(folder, "with-3-*", 3)
            if how == "cut off":
                first.machine.cut_off()
            else:
                for pid in [*first.sessions(), *(first.pids() if how == "killed" else ())]:
                    with contextlib.suppress(ProcessLookupError):  # it has died with another one
                        os.kill(pid, signal.SIGKILL)
            waiting = {
                "this host leads the job now",
                f"the connection to {first.address} is lost",
                f"{first.address} answers again; its ranks start again",
            }
            while waiting:  # they come in any order
                line = running.read_until("")
                waiting = {text for text in waiting if text not in line}
                if "this host leads" in line:
                    first.machine.plug_in()
            wait_for_files(folder, "with-3-*", 4)
            (folder / "enough").touch()
            finished = running.finish()
            assert finished.code == 0, finished.out
            # told to end by its session, it leaves in order
            assert ("1 rank was lost during the run" in finished.out) == (how != "a broken connection")
            assert_nothing_is_left(cluster, running)


@pytest.mark.slow
def test_a_host_may_join_an_elastic_job_by_hand_with_the_line_that_is_printed(two: SshHosts, folder: Path) -> None:
    """The third host is the terminal: it takes no part until somebody types the line there."""
    script = write_script(folder, _ELASTIC)
    (folder / "key").write_text(f"{Key(bytes(32))}\n")
    (folder / "key").chmod(0o600)
    key = ("--key-file", str(folder / "key"))
    words = two.words("--nproc-per-node", "1", "--nnodes", "2:3", *_SHORT, *key, script)
    with start(*words, before=two.terminal.command, stderr=subprocess.STDOUT) as running:
        endpoint = running.read_until("may join by hand: phalanx join ").split()[-1]
        with start("join", endpoint, *key, before=two.terminal.command, stderr=subprocess.STDOUT) as joined:
            running.read_until("trains with 3")
            (folder / "enough").touch()
            assert [running.finish().code, joined.finish().code] == [0, 0]


@pytest.mark.slow
def test_a_signal_for_the_ranks_reaches_those_of_all_hosts(two: SshHosts, folder: Path) -> None:
    script = write_script(
        folder,
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('asked', flush=True), os._exit(0)))\n"
        "print('up', flush=True)\nwhile True:\n    time.sleep(0.02)\n",
    )
    with start(*two.words(*_RANKS, script), before=two.terminal.command) as running:
        running.read_until_all("up", 4)
        running.process.send_signal(signal.SIGUSR1)
        finished = running.finish()
    assert finished.code == 0, finished.err
    assert finished.by_rank == [(rank, "asked") for rank in range(4)]


@pytest.mark.slow
def test_the_doctor_measures_the_links_between_hosts_and_marks_the_slow_ones(tmp_path: Path) -> None:
    slow = "tc qdisc replace dev eth0 root tbf rate 200mbit burst 256kb latency 50ms"
    with ssh_hosts(3, tmp_path, mounts={2: slow}) as cluster:
        words = ("doctor", "--hosts", cluster.names, "--ssh", cluster.ssh)
        with start(*words, before=cluster.terminal.command) as running:
            finished = running.finish()
            assert finished.code == 0, finished.err
            assert_nothing_is_left(cluster, running)
    links = [line for line in finished.lines if " <-> " in line]
    assert len(links) == 3
    assert [("10.77.0.3" in line, "<-- slow" in line) for line in links] == [
        ("10.77.0.3" in line, "10.77.0.3" in line) for line in links
    ]


@pytest.mark.slow
def test_the_doctor_says_what_is_wrong_with_hosts(two: SshHosts) -> None:
    words = ("doctor", "--hosts", f"{two.names},nowhere.invalid", "--ssh", two.ssh)
    with start(*words, before=two.terminal.command) as running:
        finished = running.finish()
    assert finished.code == 2
    assert "nowhere.invalid  its name does not resolve" in finished.err


@pytest.fixture
def many_neighbors() -> Iterator[None]:
    """Namespaces share the kernel's table of neighbors: of 64 hosts some got no answer ("neighbor table overflow!")."""
    name = "net.ipv4.neigh.default.gc_thresh3"

    def sysctl(*words: str) -> str:
        """Run it where pytest was started: only there is this setting, and a worker has a network of its own."""
        command = ["nsenter", "--net", f"--target={os.getppid()}", "sysctl", "-n", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    before = sysctl(name)
    sysctl("-w", f"{name}=65536")
    yield
    sysctl("-w", f"{name}={before}")


@pytest.mark.slow
@pytest.mark.usefixtures("many_neighbors")
def test_sixty_four_hosts_start_as_one_does(folder: Path, tmp_path: Path) -> None:
    script = write_script(folder, "import os\nprint('rank', os.environ['RANK'], flush=True)")
    with ssh_hosts(64, tmp_path) as cluster:
        code, out, err = on(cluster, "--nproc-per-node", "1", "--no-preload", script)
    assert code == 0, err
    assert sorted(int(line.split()[-1]) for line in out.splitlines()) == list(range(64))
