"""However the command ends, its ranks hear of it, and no process is left."""

import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from tests.system.phalanx_command import WAIT, Finished, Running, run, said_by, start, write_script

# A rank with all kinds of descendants: a child, a daemon in a session of its own, and one that refuses to go.
FAMILY = """
import os, signal, subprocess, sys
stubborn = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE).stdout.readline()
subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.pause()
    os._exit(0)
os.wait()
print("family", os.getppid())
signal.pause()
"""


@pytest.mark.slow(but=("15",))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_survives_the_end_of_the_agent(tmp_path: Path, number: int) -> None:
    script = write_script(tmp_path, FAMILY)
    with start("run", "--no-preload", "--shutdown-timeout", "5", "--nproc-per-node", "2", script) as running:
        running.read_until_all("family", 2)
        while len(running.survivors()) <= 8:  # a shell is not waited for until it has started its own
            pass
        running.process.send_signal(number)
        running.process.wait()
        if number == signal.SIGKILL:
            running.wait_gone()  # the zygote does it, a moment later
        assert running.survivors() == []
        assert running.process.returncode == (-number if number == signal.SIGKILL else 128 + number)


def test_nothing_survives_the_zygote_and_its_death_is_told(tmp_path: Path) -> None:
    with start("run", "--no-preload", "--nproc-per-node", "2", write_script(tmp_path, FAMILY)) as running:
        zygote = int(running.read_until("family").split()[-1])
        os.kill(zygote, signal.SIGKILL)
        finished = running.finish()
        assert finished.code == 1
        assert f"the zygote (pid {zygote})" in finished.err
        assert "SIGKILL" in finished.err
        assert "--no-preload" in finished.err
        assert running.survivors() == []


def test_nothing_survives_a_rank(tmp_path: Path) -> None:
    script = write_script(tmp_path, FAMILY.removesuffix("signal.pause()\n"))
    assert run("--no-preload", "--nproc-per-node", "2", script).code == 0


@pytest.mark.slow
def test_nothing_survives_an_agent_that_is_killed_while_torch_is_imported(tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("import os, signal\nos.write(2, b'importing\\n')\nsignal.pause()\n")
    script = write_script(tmp_path, "")
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        with start("run", "--nproc-per-node", "2", script, env={"PYTHONPATH": str(tmp_path)}) as running:
            assert running.process.stderr is not None
            assert running.process.stderr.readline() == "importing\n"
            running.process.send_signal(number)
            running.process.wait()
            running.wait_gone()


def interrupt(script: str, *options: str, num_ranks: int = 2) -> Finished:
    """Run a script, send the command SIGINT when all ranks have said that they are ready, and wait for its end."""
    with start("run", "--no-preload", *options, "--nproc-per-node", str(num_ranks), script) as running:
        running.read_until_all("ready", num_ranks)
        running.process.send_signal(signal.SIGINT)
        return running.finish()


def test_keyboard_interrupt_runs_the_scripts_own_clean_up(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        f"try:\n    print('ready')\n    {WAIT}\nexcept KeyboardInterrupt:\n    print('saved')\n",
    )
    finished = interrupt(script)
    assert finished.by_rank == [(0, "saved"), (1, "saved")]
    assert finished.code == 0  # as `python script.py` would return
    assert "stopping 2 ranks, with 30 s to exit by themselves (again: kill at once)" in finished.err


# All in one line: where the signal comes right behind "ready", it is in the same place.
LOOP = """
def train():
    print("ready"), all(__import__("time").sleep(0.02) is None for _ in iter(int, 1))

train()
"""


def test_ctrl_c_is_told_in_a_line_and_not_in_a_traceback_of_each_rank(tmp_path: Path) -> None:
    finished = interrupt(write_script(tmp_path, LOOP), "--log-dir", str(tmp_path))
    assert finished.code == 130
    assert "Traceback" not in finished.err
    assert finished.err.splitlines()[-1] == (
        "phalanx run: stopped by SIGINT (interrupted); ranks 0, 1 at script.py:3 (--traceback shows tracebacks)"
    )
    assert "KeyboardInterrupt" in (tmp_path / "rank_1.log").read_text()  # what was printed is in the log


def test_with_traceback_ctrl_c_shows_where_each_rank_was(tmp_path: Path) -> None:
    finished = interrupt(write_script(tmp_path, LOOP), "--traceback")
    assert finished.code == 130
    said = [line for line in finished.err.splitlines() if line.endswith("] KeyboardInterrupt")]
    assert {rank for line in said for rank in said_by(line)} == {0, 1}
    assert finished.err.splitlines()[-1] == "phalanx run: stopped by SIGINT (interrupted)"


def test_a_failure_after_ctrl_c_is_shown(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        f"try:\n    print('ready')\n    {WAIT}\n"
        "except KeyboardInterrupt:\n    raise OSError('no room to save') from None\n",
    )
    finished = interrupt(script, num_ranks=1)
    assert "OSError: no room to save" in finished.err


def test_a_rank_that_ignores_ctrl_c_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, signal\n"
        "if os.environ['RANK'] == '1': signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('ready')\n"
        "while True: signal.pause()\n",
    )
    finished = interrupt(script, "--shutdown-timeout", "0.2")
    assert finished.code == 130
    killed = r"ranks? (0, )?1 did not exit within 0\.2 s and had to be killed \(--shutdown-timeout sets the time\)"
    assert re.search(killed, finished.err), finished.err  # rank 0 may take longer, too, on a busy machine


def test_the_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        f"import signal\nsignal.signal(signal.SIGINT, lambda *_: print('no'))\nprint('ready')\n{WAIT}\n",
    )
    with start("run", "--no-preload", "--shutdown-timeout", "600", "--nproc-per-node", "2", script) as running:
        running.read_until_all("ready", 2)
        running.process.send_signal(signal.SIGINT)
        running.read_until("no")
        running.process.send_signal(signal.SIGINT)
        finished = running.finish()
    assert finished.code == 130
    assert "SIGINT again: killing 2 ranks" in finished.err


def test_a_failed_job_does_not_wait_for_a_rank_that_ignores_sigterm(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '0': sys.exit(4)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True: signal.pause()\n",
    )
    assert run("--no-preload", "--shutdown-timeout", "0.2", "--nproc-per-node", "2", script).code == 4


def test_sigusr1_is_passed_on_and_ends_nothing(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"  # it may come before we wait for it
        "print('ready'); signal.sigwait([signal.SIGUSR1]); print('heard')\n",
    )
    with start("run", "--no-preload", "--nproc-per-node", "2", script) as running:
        running.read_until_all("ready", 2)
        running.process.send_signal(signal.SIGUSR1)
        assert sorted(running.finish().out.splitlines()) in (["[0-1] heard"], ["[0] heard", "[1] heard"])


def test_ctrl_z_stops_the_ranks_and_fg_lets_them_go_on(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, sys, time\nprint('ready')\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('on')\n",
    )
    flag = tmp_path / "flag"
    with start("run", "--no-preload", "--nproc-per-node", "2", script, str(flag)) as running:
        running.read_until_all("ready", 2)
        running.process.send_signal(signal.SIGTSTP)
        while len(stopped(running)) < 3:
            pass
        flag.touch()
        running.process.send_signal(signal.SIGCONT)
        finished = running.finish()
    assert finished.by_rank == [(0, "on"), (1, "on")]
    assert finished.code == 0


def stopped(running: Running) -> list[int]:
    """The marked processes that are stopped: agent and ranks; the zygote goes on."""
    return [pid for pid in running.survivors() if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1] == "T"]


@pytest.mark.slow(but=("9",))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_zygote_keeps_nothing_alive(tmp_path: Path, number: int) -> None:
    # It was told what to do and could not hear it: two SIGTERMs of the command did nothing, and after its SIGKILL the
    # ranks lived until somebody sent the zygote a SIGCONT.
    with start("run", "--no-preload", "--nproc-per-node", "2", write_script(tmp_path, FAMILY)) as running:
        zygote = int(running.read_until("family").split()[-1])
        os.kill(zygote, signal.SIGSTOP)
        assert running.process.stderr is not None
        told = running.process.stderr.readline()
        assert f"the zygote (pid {zygote}), which forks the ranks, was stopped" in told
        assert f"kill -CONT {zygote}" in told
        running.process.send_signal(number)
        running.process.wait()
        if number == signal.SIGKILL:
            running.wait_gone()
        assert running.survivors() == []
        assert running.process.returncode == (-number if number == signal.SIGKILL else 128 + number)


@pytest.mark.slow
def test_a_stopped_rank_hears_that_the_job_is_to_end(tmp_path: Path) -> None:
    # The signal waited for a SIGCONT that nobody sent; after the grace period the rank was killed without a word.
    script = write_script(
        tmp_path,
        "import os, signal\n"
        "def save(*_):\n    os.write(1, b'saved\\n')  # print() could be at work\n    raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('pid', os.getpid())\n"
        f"{WAIT}\n",
    )
    with start("run", "--no-preload", "--shutdown-timeout", "600", "--nproc-per-node", "1", script) as running:
        os.kill(int(running.read_until("pid").split()[-1]), signal.SIGSTOP)
        running.process.send_signal(signal.SIGTERM)
        finished = running.finish()
    assert (finished.out, finished.code) == ("[0] saved\n", 0), finished.err


@pytest.mark.slow
def test_a_rank_that_is_still_there_is_named_with_its_state_and_stopped_after_the_exit_timeout(tmp_path: Path) -> None:
    # A rank that somebody stopped after its last collective kept the command waiting for ever, and without a word.
    script = write_script(
        tmp_path,
        "import os, signal\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx')\n"
        "pid = torch.tensor(os.getpid() * dist.get_rank())\n"
        "dist.all_reduce(pid)\n"
        "if dist.get_rank() == 1:\n"
        "    print('pid', os.getpid(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while ') T ' not in open(f'/proc/{pid}/stat').read(): pass\n",
    )
    with start("run", "--exit-timeout", "0.2", "--shutdown-timeout", "600", "--nproc-per-node", "2", script) as running:
        pid = running.read_until("pid").split()[-1]
        finished = running.finish()
        assert running.survivors() == []
    assert finished.code == 124
    assert f"  rank 1 (pid {pid}): stopped (SIGSTOP or Ctrl-Z); `kill -CONT {pid}` continues it; " in finished.err
    assert "last finished all_reduce #" in finished.err
    assert "script.py:5)" in finished.err
    assert "rank 1 did not exit within 0.2 s after the first (--exit-timeout), and had to be stopped" in finished.err
    assert "First failure" not in finished.err


@pytest.mark.slow(but=("rank",))
@pytest.mark.parametrize("whom", ["rank", "agent", "agent and zygote"])
def test_no_temporary_folder_of_multiprocessing_is_left(
    tmp_path: Path, whom: str, request: pytest.FixtureRequest
) -> None:
    # Ranks that were killed left their workers' sockets behind, in folders called pymp-…
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path has 108 characters at most
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    script = write_script(
        tmp_path,
        "import multiprocessing, os, signal, tempfile\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('forkserver')\n"
        "    context.Process(target=signal.pause, daemon=True).start()\n"
        "    print('in', tempfile.gettempdir(), flush=True)\n"
        "    print('up', os.getppid(), os.getpid(), flush=True)\n"
        "    signal.pause()\n",
    )
    environment = {"TMPDIR": str(temporary)}
    with start("run", "--no-preload", "--nproc-per-node", "1", script, env=environment) as running:
        said = running.read_until(" up ")  # with blanks: the folder's random name may have "up" in it
        assert f"in {temporary}\n" in said  # TMPDIR itself is the user's
        zygote, rank = map(int, said.split()[-2:])
        (folder,) = temporary.iterdir()
        assert folder.name.startswith("phalanx-")
        (server,) = (path for path in folder.iterdir() if path.is_socket())  # listener-… until Python 3.14, then sock-…
        assert sorted(path.name[:9] for path in folder.iterdir() if path != server) == [".phalanx-", "attempt_0"]
        if whom == "agent and zygote":
            os.kill(running.process.pid, signal.SIGSTOP)  # so that it can't clean up first
            os.kill(zygote, signal.SIGKILL)
        os.kill(rank if whom == "rank" else running.process.pid, signal.SIGKILL)
        running.process.wait()
        if whom == "agent and zygote":
            assert run("--nproc-per-node", "1", "--no-python", "true", env=environment).code == 0
        else:
            running.wait_gone()
    assert list(temporary.iterdir()) == []
