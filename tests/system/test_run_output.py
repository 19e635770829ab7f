"""What the ranks print arrives: whole, in order, with the rank in front."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.system.phalanx_command import WAIT, run, start, write_script

from phalanx._comm.control.key import Key


def together(folder: Path, num_ranks: int) -> str:
    """The first lines of a script whose ranks print at the same time, however late the machine has started one."""
    return (
        f"import os\nfolder = {str(folder)!r}\nopen(os.path.join(folder, 'here_' + os.environ['RANK']), 'x').close()\n"
        f"while sum(name.startswith('here_') for name in os.listdir(folder)) < {num_ranks}: pass\n"
    )


def test_each_line_carries_its_ranks(tmp_path: Path) -> None:
    script = write_script(tmp_path, together(tmp_path, 3) + "print('same'); print('rank', os.environ['RANK'])")
    finished = run("--no-preload", "--nproc-per-node", "3", script)
    # Equal lines are one, unless a busy machine held one of the ranks up for longer than folding waits.
    assert finished.by_rank == sorted((rank, text) for rank in range(3) for text in ("same", f"rank {rank}"))


def test_stdout_and_stderr_stay_apart(tmp_path: Path) -> None:
    script = write_script(tmp_path, together(tmp_path, 2) + "import sys; print('out'); print('err', file=sys.stderr)")
    finished = run("--no-preload", "--nproc-per-node", "2", script)
    # Folded into one line, unless a busy machine held one of the ranks up for longer than folding waits.
    assert sorted(finished.out.splitlines()) in (["[0-1] out"], ["[0] out", "[1] out"])
    assert sorted(finished.err.splitlines()) in (["[0-1] err"], ["[0] err", "[1] err"])


def test_output_is_live(tmp_path: Path) -> None:
    script = write_script(tmp_path, together(tmp_path, 2) + "import signal; print('here'); signal.pause()")
    with start("run", "--no-preload", "--nproc-per-node", "2", script) as running:
        assert running.read_until("here") in ("[0-1] here\n", "[0] here\n", "[1] here\n")
        running.process.send_signal(signal.SIGTERM)
        assert running.finish().code == 143


@pytest.mark.slow
def test_a_flood_arrives_whole_and_in_order(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "import os\nfor i in range(20_000): print(os.environ['RANK'], i, 'x' * (i % 100), sep=',')"
    )
    finished = run("--no-preload", "--nproc-per-node", "2", script)
    for rank in "01":
        mine = [line.split(",") for line in finished.lines if line.startswith(f"[{rank}]")]
        assert [int(fields[1]) for fields in mine] == list(range(20_000))
        assert all(len(fields[2]) == int(fields[1]) % 100 for fields in mine)


@pytest.mark.slow
def test_a_slow_reader_loses_nothing(tmp_path: Path) -> None:
    script = write_script(tmp_path, "for i in range(60_000): print(i, 'x' * 60)")
    with start("run", "--no-preload", "--nproc-per-node", "1", script) as running:
        running.read_until(" 100 ")  # and nothing for as long as the ranks can write
        finished = running.finish()
    assert finished.code == 0
    assert finished.lines[-1].startswith("[0] 59999 ")


@pytest.mark.slow
def test_ctrl_c_works_while_nobody_reads_the_output(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('start')\nwhile True: print('x' * 1000)")
    with start("run", "--no-preload", "--shutdown-timeout", "0.2", "--nproc-per-node", "1", script) as running:
        running.read_until("start")
        running.process.send_signal(signal.SIGINT)
        running.process.send_signal(signal.SIGINT)
        assert running.finish().code == 130
        assert running.survivors() == []


def test_a_reader_that_goes_away_ends_the_job_quietly(tmp_path: Path) -> None:
    script = write_script(tmp_path, "while True: print('x' * 1000)")
    with start("run", "--no-preload", "--nproc-per-node", "2", script) as running:
        assert running.process.stdout is not None
        running.process.stdout.close()
        assert running.process.stderr is not None
        running.process.wait()
        said = running.process.stderr.read()
        assert "phalanx run: stdout was closed by its reader: stopping 2 ranks" in said
        assert "Traceback" not in said.replace("BrokenPipe", "")
        assert running.process.returncode == 141
        assert running.survivors() == []


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_descriptor_is_as_good_as_dev_null(tmp_path: Path, closed: int) -> None:
    script = write_script(tmp_path, "print('out')")
    words = [sys.executable, "-m", "phalanx.cli", "run", "--no-preload", "--nproc-per-node", "1", script]
    # a closed stdout once gave its number to one of the agent's own pipes, and the command never ended
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *words], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if closed == 1 else "[0] out\n")


def test_a_progress_bar_in_a_pipe_leaves_its_final_state(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, sys\n"
        "assert 'PHALANX_TTY' not in os.environ\n"
        "for i in range(100): print(f'\\r{i + 1}%', end='', file=sys.stderr, flush=True)\n"
        "print(file=sys.stderr)\n",
    )
    assert run("--no-preload", "--nproc-per-node", "1", script).err == "[0] 100%\n"


def test_a_process_that_keeps_the_pipe_open_does_not_keep_the_command(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('done')\n",
    )
    finished = run("--no-preload", "--nproc-per-node", "1", script)
    assert (finished.code, finished.out) == (0, "[0] done\n")


def test_log_dir_keeps_a_file_for_each_rank(tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    script = write_script(tmp_path, "import os; print('same'); print('a\\rb'); print(os.environ['RANK'], end='')")
    run("--no-preload", "--nproc-per-node", "2", "--log-dir", str(logs), script)
    assert sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log"]
    for rank in "01":
        assert (logs / f"rank_{rank}.log").read_text() == f"same\nb\n{rank}\n"


def on_terminal(tmp_path: Path, script: str, *, at: bytes, do: Callable[[int], object]) -> tuple[int, bytes]:
    """Run `script` with 2 ranks on a terminal of 60 columns, and `do` something with it when it has shown `at`.

    Returns the exit code and all that the terminal received.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    words = ["run", "--no-preload", "--nproc-per-node", "2", write_script(tmp_path, script)]
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
         "from phalanx._job.output import display; "
         "display.LineFolder.__init__.__defaults__ = (60.0,); "  # for slow ranks
         "from phalanx.cli.__main__ import main; main()", *words],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**environment, "TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    os.close(theirs)
    received, done = b"", False
    try:
        while chunk := os.read(ours, 65536):
            received += chunk
            if not done and at in received:
                do(ours)
                done = True
    except OSError:
        pass  # EIO: all who held the terminal have gone
    finally:
        os.close(ours)
    return process.wait(), received


def test_a_terminal_shows_colours_and_redraws_the_status_below_the_lines(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code, received = on_terminal(
        tmp_path,
        "import os\n"
        "assert os.environ['PHALANX_TTY'] == '1'\n"
        "print('width', os.environ['COLUMNS'])\n"
        "print('\\r50%', end='', flush=True)\n"
        f"while not os.path.exists({str(seen)!r}): pass\n"
        "print('\\rend')\n",
        at=b"50%",
        do=lambda terminal: seen.touch(),
    )
    assert code == 0
    assert b"\x1b[2m[0-1]\x1b[0m width 55\r\n" in received
    assert b"\x1b[0m 50%" in received  # of one rank or of both: that is up to the moment
    after_status = received.partition(b"50%")[2]
    assert b"\r\x1b[J" in after_status.partition(b"end")[0]
    assert received.endswith(b"end\r\n")


def test_ctrl_c_on_a_terminal_reaches_each_rank_once(tmp_path: Path) -> None:
    code, received = on_terminal(
        tmp_path,
        "import os, signal\n"
        "def note(number, frame):\n"
        "    os.write(1, b'noted\\n')\n"
        "    signal.signal(signal.SIGINT, lambda *_: os.write(1, b'twice\\n'))\n"
        "    raise SystemExit(0)\n"
        "signal.signal(signal.SIGINT, note)\n"
        "print('ready')\n"
        f"{WAIT}\n",
        at=b"[0-1]\x1b[0m ready",
        do=lambda terminal: os.write(terminal, b"\x03"),
    )
    assert code == 0
    assert received.count(b"noted") == 1  # folded: both ranks said it
    assert b"[0-1]\x1b[0m noted" in received
    assert b"twice" not in received
    assert b"stopping 2 ranks" in received


def test_a_log_that_cannot_be_written_is_said_once_and_the_job_goes_on(tmp_path: Path) -> None:
    # A full disk under --log-dir ended a running job with the agent's own traceback, and without a restart.
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank_0.log").symlink_to("/dev/full")
    script = write_script(tmp_path, "import time\nfor i in range(3): print(i); time.sleep(0.01)")
    finished = run("--no-preload", "--nproc-per-node", "2", "--log-dir", str(logs), script)
    assert finished.code == 0
    assert finished.err.count("phalanx run:") == 1
    assert f"cannot write {logs}/rank_0.log: No space left on device. The job continues" in finished.err
    assert (logs / "rank_1.log").read_text() == "0\n1\n2\n"


def test_a_full_disk_under_stdout_is_said_and_the_job_goes_on(tmp_path: Path) -> None:
    # It ended the job with exit code 141 and not a word.
    script = write_script(
        tmp_path, f"import time\nprint('a'); time.sleep(0.5); print('b')\nopen({str(tmp_path / 'done')!r}, 'w')"
    )
    words = [sys.executable, "-m", "phalanx.cli", "run", "--no-preload", "--nproc-per-node", "1", script]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 120  # as `python script.py`, whose output cannot be written
    assert done.stderr.count("phalanx run:") == 1
    assert "stdout cannot be written: No space left on device. The job continues" in done.stderr
    assert (tmp_path / "done").exists()


_ENV = {"PHALANX_KEY": str(Key(bytes(32)))}
_GROWS = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=0", "--rdzv-backend", "c10d", "--rdzv-endpoint")


@pytest.mark.slow
def test_an_elastic_job_that_begins_with_one_host_writes_its_logs(tmp_path: Path) -> None:
    # Neither the screen nor the disk had what its ranks printed.
    logs = tmp_path / "logs"
    words = ("--no-preload", "--nproc-per-node", "1", *_GROWS, "localhost:0", "--log-dir", str(logs))
    finished = run(*words, "--redirects", "1", write_script(tmp_path, "print('hi')"), env=_ENV)
    assert (finished.code, finished.out) == (0, ""), finished.err
    assert (logs / "rank_0.log").read_text() == "hi\n"
    assert [path.read_text() for path in logs.glob("*/attempt_0/0/stdout.log")] == ["hi\n"]


@pytest.mark.slow(but=("hosts0",))
@pytest.mark.parametrize("hosts", [(), (*_GROWS, "localhost:0")])
def test_a_log_that_cannot_be_created_is_refused_before_anything_starts(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    # A job on several hosts ended with the agent's own traceback.
    log = tmp_path / "rank_0.log"
    log.mkdir()
    script = write_script(tmp_path, "print('started')")
    words = ("--no-preload", "--nproc-per-node", "1", *hosts, "--log-dir", str(tmp_path))
    finished = run(*words, script, env=_ENV)
    assert (finished.code, finished.out) == (2, "")
    assert f"--log-dir {tmp_path}: cannot write {log}: Is a directory. Choose a directory" in finished.err
    assert "Traceback" not in finished.err


def test_a_log_that_cannot_be_created_at_a_restart_is_said_once_and_the_job_goes_on(tmp_path: Path) -> None:
    # The restart was announced, and the job ended with the agent's own traceback and another exit code.
    script = write_script(
        tmp_path,
        "import os, pathlib, sys\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if count == '0': (pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).parents[2] / 'attempt_1').touch()\n"
        "print('attempt', count)\n"
        "sys.exit(7)\n",
    )
    words = ("--no-preload", "--nproc-per-node", "1", "--max-restarts", "1", "--log-dir", str(tmp_path), "--tee", "3")
    finished = run(*words, script)
    assert (finished.code, finished.lines) == (7, ["[0] attempt 0", "[0] attempt 1"])
    assert len(re.findall("cannot write .*/attempt_1/0/stdout.log: .*The job continues", finished.err)) == 1
    assert (tmp_path / "rank_0.log").read_text() == "attempt 0\nattempt 1\n"
