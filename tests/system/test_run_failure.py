"""The first failure is told last, and decides the exit code."""

import os
import signal
from pathlib import Path

import pytest
from tests.system.phalanx_command import WAIT, run, start, write_script

import phalanx

PACKAGE = str(Path(phalanx.__file__).parent)

FAIL = """
import ctypes, os, signal, sys, time
rank, how = int(os.environ["RANK"]), sys.argv[1]

def fail():
    if how == "raise":
        raise ValueError("the data is wrong")
    if how == "exit":
        sys.exit(7)
    if how == "message":
        sys.exit("no data here")
    if how == "_exit":
        os._exit(9)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupt":
        raise KeyboardInterrupt

if rank == 1:
    fail()
time.sleep(600)
"""


@pytest.mark.slow(but=("kill-137-words5", "raise-1-words0"))
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, ["ValueError: the data is wrong at script.py:7 (exit code 1)", "in fail\n    raise ValueError("]),
        ("exit", 7, ["sys.exit(7) at script.py:9 (exit code 7)"]),
        ("message", 1, ["sys.exit('no data here') at script.py:11 (exit code 1)"]),
        ("_exit", 9, ["exit code 9"]),
        ("segfault", 128 + signal.SIGSEGV, ["SIGSEGV (segmentation fault)", 'script.py", line 15 in fail']),
        ("kill", 128 + signal.SIGKILL, ["SIGKILL (killed; out of memory?"]),
        ("interrupt", 128 + signal.SIGINT, ["KeyboardInterrupt at script.py:19 (SIGINT (interrupted))"]),
    ],
)
def test_a_failing_rank_stops_the_others_and_is_told_last(
    tmp_path: Path, how: str, code: int, words: list[str]
) -> None:
    script = write_script(tmp_path, FAIL)
    finished = run("--no-preload", "--nproc-per-node", "3", script, how)
    assert finished.code == code
    before, separator, last = finished.err.partition("First failure: rank 1 of 3 on ")
    assert separator
    assert "ranks 0, 2: stopped by phalanx run" in before
    for word in words:
        assert word in last
    assert PACKAGE not in finished.err


def test_an_exception_is_also_printed_by_the_rank_itself_through_the_scripts_own_hook(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import sys\n"
        "sys.excepthook = lambda kind, error, trace: print('hook', error, trace.tb_frame.f_code.co_name)\n"
        "raise OSError('own')\n",
    )
    finished = run("--no-preload", "--nproc-per-node", "1", script)
    assert finished.lines == ["[0] hook own <module>"]
    assert "Traceback" in finished.err.partition("First failure")[2]


def test_the_cause_is_told_even_when_a_peer_raises_because_of_it(tmp_path: Path) -> None:
    # rank 1 dies in silence; rank 0 sees its connection close and raises, often before its parent learns of the death
    script = write_script(
        tmp_path,
        "import os, socket, sys\n"
        "path = sys.argv[1]\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "if os.environ['RANK'] == '0':\n"
        "    sock.bind(path); sock.listen(); os.rename(path, path + '.ready')\n"
        "    peer, _ = sock.accept()\n"
        "    if not peer.recv(1):\n"
        "        raise ConnectionError('peer has gone')\n"
        "while not os.path.exists(path + '.ready'): pass\n"
        "sock.connect(path + '.ready')\n"
        "os._exit(5)\n",
    )
    finished = run("--no-preload", "--nproc-per-node", "2", script, str(tmp_path / "s"))
    assert finished.code == 5
    assert "First failure: rank 1 of 2" in finished.err
    assert "rank 0: ConnectionError: peer has gone at script.py:8 (exit code 1)" in finished.err


def test_a_rank_that_hangs_after_its_exception_does_not_hang_the_job(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, threading\n"
        "if os.environ['RANK'] == '0':\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        "    raise ValueError('then hang')\n",
    )
    finished = run("--no-preload", "--shutdown-timeout", "0.3", "--nproc-per-node", "2", script)
    assert finished.code == 1
    assert "ValueError: then hang at script.py:4 (did not exit by itself and was killed)" in finished.err


@pytest.mark.slow
def test_a_child_that_the_script_forked_does_not_speak_for_its_rank(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    raise ValueError('in a child')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n",
    )
    finished = run("--no-preload", "--nproc-per-node", "1", script)
    assert finished.code == 0
    assert finished.lines == ["[0] 1"]
    assert "ValueError: in a child" in finished.err


@pytest.mark.slow
def test_all_ranks_start_again_until_the_restarts_are_used_up(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, sys\n"
        "count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('attempt', count, 'of', os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
        "sys.exit(3 if count < int(sys.argv[1]) else 0)\n",
    )
    works = run("--no-preload", "--max-restarts", "2", "--nproc-per-node", "2", script, "2")
    assert works.code == 0
    assert works.by_rank == [(rank, f"attempt {count} of 2") for rank in range(2) for count in range(3)]
    assert "starting all 2 ranks again (up to 2 more times)" in works.err
    fails = run("--no-preload", "--max-restarts", "1", "--nproc-per-node", "2", script, "9")
    assert fails.code == 3
    assert fails.by_rank == [(rank, f"attempt {count} of 1") for rank in range(2) for count in range(2)]


@pytest.mark.slow
def test_all_ranks_start_again_also_where_the_zygote_did_not_end_them_in_time(tmp_path: Path) -> None:
    """The job ended with the failed rank's exit code, and not a word about the restart that it was to have."""
    script = write_script(
        tmp_path,
        "import os, subprocess, sys\n"
        "count, path = os.environ['TORCHELASTIC_RESTART_COUNT'], sys.argv[1]\n"
        "if count == '0': open(path, 'w').write(str(subprocess.Popen(['sleep', '600'], start_new_session=True).pid))\n"
        "print('attempt', count, os.path.exists('/proc/' + open(path).read()))\n"
        "sys.exit(3)\n",
    )
    hasty = "from phalanx._job.agent import host_ranks; host_ranks.SWEEP_S = -1.0"
    words = ("run", "--no-preload", "--max-restarts", "1", "--nproc-per-node", "1", script, str(tmp_path / "pid"))
    with start(*words, python=("-c", f"{hasty}; from phalanx.cli.__main__ import main; main()")) as running:
        finished = running.finish()
        assert running.survivors() == []
    assert (finished.code, finished.lines) == (3, ["[0] attempt 0 True", "[0] attempt 1 False"])
    assert "starting all 1 ranks again (once more)" in finished.err


@pytest.mark.slow
def test_every_attempt_has_a_store_of_its_own(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, sys\n"
        "with open(os.environ['PHALANX_STORE'], 'r+') as store:\n"
        "    print('found', repr(store.read()))\n"
        "    store.write('used')\n"
        "sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT']) == 0)\n",
    )
    finished = run("--no-preload", "--max-restarts", "1", "--nproc-per-node", "1", script)
    assert finished.lines == ["[0] found ''", "[0] found ''"]


def test_a_program_that_cannot_be_run_says_so(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/nowhere/interpreter\n")
    program.chmod(0o755)
    finished = run("--nproc-per-node", "1", "--no-python", str(program))
    assert finished.code == 126
    assert "No such file or directory" in finished.err


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (["nowhere.py"], {}, "script 'nowhere.py': no such file"),
        (["--nproc-per-node", "0", "x.py"], {}, "must be at least 1, got 0"),
        (["--nproc-per-node", "99999", "--no-python", "true"], {}, "more than 64 ranks for each"),
        (["--nproc-per-node", "gpu", "--no-python", "true"], {"CUDA_VISIBLE_DEVICES": ""}, "has no GPU for CUDA"),
        (["--nproc-per-node", "2", "--no-python", "true"], {"WORLD_SIZE": "8"}, "WORLD_SIZE=8 in the environment"),
        (["--nproc-per-node", "2", "--no-python", "true"], {"RANK": "0"}, "already a rank of another launcher"),
        (["--nporc-per-node", "2", "x.py"], {}, "Did you mean --nproc-per-node?"),
        (["--no-python", "--log-dir", "/dev/null/logs", "true"], {}, "--log-dir /dev/null/logs: cannot write"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(words: list[str], env: dict[str, str], message: str) -> None:
    finished = run(*words, env=env)
    assert finished.code == 2
    assert message in finished.err
    assert "Traceback" not in finished.err
    assert finished.out == ""


@pytest.mark.slow
def test_text_that_is_no_text_is_told_all_the_same_and_the_ranks_start_again(tmp_path: Path) -> None:
    # Half a surrogate pair in a message, or a file name that is not UTF-8, ended the agent with a UnicodeEncodeError:
    # no first failure was told and nothing was started again.
    name = os.fsdecode(b"caf\xe9.py")
    script = write_script(
        tmp_path, "raise ValueError('no \\ud800 text' if __import__('os').environ['RANK'] == '0' else '')", name
    )
    finished = run("--no-preload", "--max-restarts", "1", "--nproc-per-node", "1", script)
    assert finished.code == 1
    told = "ValueError: no \\ud800 text at caf\\udce9.py:1 (exit code 1)"
    assert finished.err.count("First failure") == finished.err.count(told) == 2
    assert "starting all 1 ranks again" in finished.err


@pytest.mark.slow
def test_what_is_no_report_is_ignored(tmp_path: Path) -> None:
    # Deeply nested JSON on the descriptor for reports, or at the agent's socket, ended the job with a RecursionError.
    script = write_script(
        tmp_path,
        "import json, os, socket, struct, sys\n"
        "reports = next(fd for fd in range(3, 1024) if os.path.exists(f'/proc/self/fd/{fd}')\n"
        "               and os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'))\n"
        "name = os.environ['PHALANX_AGENT'].partition(':')[0]\n"
        "whole = {'rank': 0, 'pid': os.getpid(), 'at': 1.0, 'types': [], 'summary': '', 'place': '', 'traceback': ''}\n"
        "wrong = [{}, [], 3, None, 'x', {**whole, 'rank': 7}, {**whole, 'rank': -1}, {**whole, 'rank': 'x'},\n"
        "         {**whole, 'pid': 1}, {**whole, 'at': None}, {**whole, 'types': 3}, {**whole, 'types': [3]},\n"
        "         {**whole, 'summary': 3}, {**whole, 'at': float('nan')}, {**whole, 'more': 1}]\n"
        "token = os.environ['PHALANX_AGENT'].partition(':')[2]\n"
        "group = {'kind': 'group', 'token': token, 'name': 'g', 'world_size': 1e999, 'ranks': [0], 'pids': [1]}\n"
        "packets = [b'[' * 100_000, b'{\"a\":' * 10_000, b'\\xff', b'', b'{', b'1' * 5000]\n"
        "packets += [json.dumps(it).encode() for it in wrong]\n"
        "for packet in packets:\n"
        "    if packet: os.write(reports, packet)\n"
        "held = []\n"
        "packets += [json.dumps(group).encode(), b'x' * 150_000]\n"
        "packets += [struct.pack('!I', len(packet)) + packet for packet in packets]\n"
        "for packet in [*packets, *[None] * 200]:\n"
        "    sock = socket.socket(socket.AF_UNIX)\n"
        "    sock.connect('\\0' + name)\n"
        "    if packet is not None: sock.send(packet)\n"
        "    held.append(sock)\n"  # half-open: more of them than the agent lets in
        "from phalanx._base.ipc.agent import request\n"
        "print('descriptors', len(request(os.environ['PHALANX_AGENT'], 'store', 60.0)))\n"
        "sys.exit(5)\n",
    )
    finished = run("--no-preload", "--nproc-per-node", "1", script)
    assert finished.lines == ["[0] descriptors 1"], finished.err
    assert finished.code == 5
    assert "First failure: rank 0 of 1" in finished.err
    assert "sys.exit(5)" in finished.err


@pytest.mark.slow
def test_a_report_never_goes_into_a_file_of_the_user(tmp_path: Path) -> None:
    # A script that closes what it has not opened, as daemons do, got the report of its failure into its own file.
    for number in ("64", "os.sysconf('SC_OPEN_MAX')"):
        script = write_script(
            tmp_path,
            "import ctypes, os\n"
            f"os.closerange(3, {number})\n"
            # An ordinary user may open 1024 files until he asks for more.
            "import resource\n"
            "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2000)), hard))\n"
            f"files = [open(os.path.join({str(tmp_path)!r}, f'mine_{{i}}'), 'w') for i in range(1100)]\n"
            "raise ValueError('boom')\n",
        )
        finished = run("--no-preload", "--nproc-per-node", "1", script)
        assert finished.code == 1
        assert "First failure: rank 0 of 1" in finished.err
        assert ("ValueError: boom" in finished.err.partition("First failure")[2]) == (number == "64")
        mine = list(tmp_path.glob("mine_*"))
        assert mine
        assert not any(path.stat().st_size for path in mine)


@pytest.mark.slow
def test_exit_code_256_is_a_success_and_said_to_be_one(tmp_path: Path) -> None:
    # sys.exit(256), of a script that passes on what os.system returned, was a failure "with exit code 0".
    finished = run("--no-preload", "--nproc-per-node", "1", write_script(tmp_path, "import sys; sys.exit(256)"))
    assert finished.code == 0
    assert "First failure" not in finished.err
    assert "sys.exit(256) counts as success" in finished.err


def test_a_rank_that_failed_and_ends_with_0_has_failed(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\nraise ValueError('x')\n")
    finished = run("--no-preload", "--nproc-per-node", "1", script)
    assert finished.code == 1
    assert "ValueError: x at script.py:3 (exit code 0)" in finished.err


@pytest.mark.slow
def test_a_syntax_error_in_an_imported_file_is_placed_there(tmp_path: Path) -> None:
    # The failure was placed at the import.
    (tmp_path / "broken.py").write_text("def f():\n    x = 1\n  y = 2\n")
    finished = run("--no-preload", "--nproc-per-node", "1", write_script(tmp_path, "\nimport broken\n"))
    assert "IndentationError: unindent does not match any outer indentation level at broken.py:3" in finished.err
    finished = run(
        "--no-preload", "--nproc-per-node", "1", write_script(tmp_path, "\ncompile('a b', '<text>', 'exec')")
    )
    assert "SyntaxError: invalid syntax at script.py:2 (exit code 1)" in finished.err


def test_breakpoint_says_how_to_debug_a_rank(tmp_path: Path) -> None:
    # A bare BdbQuit told nobody that a rank's standard input is empty.
    finished = run("--no-preload", "--nproc-per-node", "2", write_script(tmp_path, "breakpoint()\nprint('on')\n"))
    assert finished.code == 1
    assert "ranks have no terminal" in finished.err.partition("First failure")[2]
    assert "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1" in finished.err


@pytest.mark.parametrize("late", ["", "2"])
def test_no_traceback_is_told_twice(tmp_path: Path, late: str) -> None:
    # The first failure's stood there as its rank had printed it, and again at the end; an error of all ranks, once more
    # for each of them that was not in step, or that came to it when the others had been stopped.
    script = write_script(
        tmp_path,
        "import os, signal, sys\n"
        "print('before', file=sys.stderr)\n"
        "print('\\r50%', end='', file=sys.stderr)\n"
        "open(sys.argv[1] + os.environ['RANK'], 'w').close()\n"
        "while not all(os.path.exists(sys.argv[1] + rank) for rank in '012'): pass\n"  # who fails later is told as well
        f"late = os.environ['RANK'] == {late!r}\n"
        "if late: signal.signal(signal.SIGTERM, lambda *_: None), signal.pause()\n"
        "raise ValueError('all of us')\n",
    )
    logs = tmp_path / "logs"
    finished = run("--no-preload", "--log-dir", str(logs), "--nproc-per-node", "3", script, str(tmp_path / "f"))
    assert finished.code == 1
    assert finished.err.count("Traceback") == finished.err.partition("First failure")[2].count("Traceback") == 1
    assert "] before\n" in finished.err
    assert any("raise ValueError" in path.read_text() for path in logs.iterdir())


@pytest.mark.slow
def test_who_waits_for_the_others_to_end_hears_of_the_failure_and_other_tracebacks_are_shown(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, signal, sys\n"
        "def clean_up(*_):\n    raise KeyError('consequence')\n"
        "signal.signal(signal.SIGTERM, clean_up)\n"
        "os.mkfifo(sys.argv[1] + os.environ['RANK'])\n"
        "other = sys.argv[1] + '01'[os.environ['RANK'] == '0']\n"
        "while not os.path.exists(other): pass\n"
        "if os.environ['RANK'] == '0': raise ValueError('cause')\n"
        f"try:\n    {WAIT}\n"
        "finally:\n    open(other).read()\n",
    )
    with start(
        "run", "--no-preload", "--shutdown-timeout", "600", "--nproc-per-node", "2", script, str(tmp_path / "f")
    ) as running:
        assert running.process.stderr is not None
        said = running.process.stderr.readline()
        assert said.startswith("phalanx run: rank 0 has failed: ValueError: cause at script.py:8 (")
        assert "The report follows when all have exited: 1 rank may take up to 600 s" in said
        (tmp_path / "f0").open("w").close()
        finished = running.finish()
    before, _, last = finished.err.partition("First failure: rank 0")
    assert "[1] KeyError: 'consequence'" in before
    assert "ValueError: cause" in last
    assert finished.err.count("Traceback") == 2


@pytest.mark.slow
def test_too_little_address_space_is_told_with_the_limit(tmp_path: Path) -> None:
    """It was a bare MemoryError, or a library that could not be mapped."""
    script = write_script(tmp_path, "import torch")
    finished = run("--no-preload", "--nproc-per-node", "1", script, before=("prlimit", f"--as={300 << 20}"))
    assert finished.code == 1
    advice = f"This process may use {300 << 10} KiB of address space (RLIMIT_AS). Raise the limit (ulimit -v)."
    assert finished.err.rstrip().endswith(advice), finished.err
