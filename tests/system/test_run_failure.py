"""The first failure is told last, and decides the exit code."""

import signal
from pathlib import Path

import pytest
from tests.system.phalanx_command import run, write_script

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
    assert "ranks 0,2: stopped by phalanx run" in before
    for word in words:
        assert word in last
    assert "phalanx/launch" not in finished.err


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
    finished = run("--no-preload", "--grace", "0.3", "--nproc-per-node", "2", script)
    assert finished.code == 1
    assert "ValueError: then hang at script.py:4 (did not end by itself afterwards and was killed)" in finished.err


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
    assert works.lines == ["[0-1] attempt 0 of 2", "[0-1] attempt 1 of 2", "[0-1] attempt 2 of 2"]
    assert "starting all 2 ranks again (up to 2 times more)" in works.err
    fails = run("--no-preload", "--max-restarts", "1", "--nproc-per-node", "2", script, "9")
    assert fails.code == 3
    assert fails.lines == ["[0-1] attempt 0 of 1", "[0-1] attempt 1 of 1"]


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
        (["--nproc-per-node", "gpu", "--no-python", "true"], {"CUDA_VISIBLE_DEVICES": ""}, "has no GPU that CUDA"),
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
