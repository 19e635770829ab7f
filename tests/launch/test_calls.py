"""`phalanx.launch(fn)`: a function of this process in the ranks of a job, and what comes back."""

import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.documents.typed import run
from tests.system.phalanx_command import start

import phalanx
from phalanx.errors import LaunchError

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


class TwoWords(Exception):
    """Pickles, and does not come back."""

    def __init__(self, one, two):
        super().__init__(one)


def rank():
    return int(os.environ["RANK"])


@pytest.mark.slow
def test_what_each_rank_returns_comes_back_by_rank(capsys):
    """From a process with threads, which a fork would lose; with a closure, a lambda and a large tensor."""
    offset, stop = 10, threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()

    def work(scale, *, power):
        with phalanx.init() as job:
            tensor = torch.tensor([float(job.rank)])
            dist.all_reduce(tensor)
            print("summed up")
            print(f"rank {job.rank} is here", file=sys.stderr)
            big = torch.full((1 << 18,), job.rank)
            return job.rank, os.getppid(), offset + scale(tensor.item()) ** power, big, lambda: job.rank

    try:
        results = phalanx.launch(work, (lambda x: 2 * x,), {"power": 2}, nproc_per_node=3)
    finally:
        stop.set()
        thread.join()
    assert [result[0] for result in results] == [0, 1, 2]
    assert os.getpid() not in {result[1] for result in results}
    assert [result[2] for result in results] == [10 + 6.0**2] * 3
    assert [int(result[3].sum()) for result in results] == [0, 1 << 18, 2 << 18]
    assert [result[4]() for result in results] == [0, 1, 2]
    shown = capsys.readouterr()
    assert "[0-2] summed up\n" in shown.out or shown.out.count("summed up") > 1
    assert all(f"[{rank}] rank {rank} is here\n" in shown.err for rank in range(3))


@pytest.mark.slow
def test_the_first_failure_is_raised_with_the_traceback_of_its_rank():
    def work():
        if rank() == 1:
            raise KeyError("nothing there")
        threading.Event().wait()

    with pytest.raises(KeyError, match="nothing there") as caught:
        phalanx.launch(work, nproc_per_node=2)
    told = "".join(traceback.format_exception(caught.value))
    assert "phalanx.launch of test_the_first_failure_is_raised_with_the_traceback_of_its_rank.<locals>.work: " in told
    assert "First failure: rank 1 of 2" in told
    assert 'raise KeyError("nothing there")' in told
    assert "rank 0: stopped by phalanx run" in told
    assert "_job/launch/calls/rank.py" not in told.replace(os.sep, "/"), "our own frames say nothing to a user"


@pytest.mark.slow
def test_what_cannot_be_raised_here_is_told():
    """An exception that does not survive pickling, `sys.exit`, a death, and an end before the function returned."""

    def fail(how):
        if rank() == 1:
            if how == "words":
                raise TwoWords("one", "two")
            if how == "exit":
                sys.exit(3)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "leave":
                os._exit(0)
        return how

    for how, words in {
        "words": "TwoWords: one at test_calls.py",
        "exit": r"rank 1 of 2 on .*: sys.exit\(3\) at test_calls.py",
        "kill": r"rank 1 of 2 on .*: SIGKILL \(killed",
        "leave": "rank 1 of 2 exited with code 0 before its function returned",
    }.items():
        with pytest.raises(LaunchError, match=words) as caught:
            phalanx.launch(fail, (how,), nproc_per_node=2)
        assert "phalanx.launch of " in str(caught.value)


@pytest.mark.slow
def test_an_exception_of_a_module_that_only_the_ranks_can_import_is_told(tmp_path):
    """The caller raised ModuleNotFoundError, and nothing of the rank's failure."""
    (tmp_path / "net.py").write_text("class ShapeError(Exception): pass\n")
    folder = str(tmp_path)

    def work(ends):
        sys.path.insert(0, folder)
        import net

        if ends == "raises":
            raise net.ShapeError("3 is not 4")
        return net.ShapeError("5 is not 6")

    with pytest.raises(LaunchError, match=r"ShapeError: 3 is not 4 at test_calls\.py"):
        phalanx.launch(work, ("raises",), nproc_per_node=1)
    with pytest.raises(LaunchError, match="rank 0 of 1 returned or raised an object that cannot be unpickled"):
        phalanx.launch(work, ("returns",), nproc_per_node=1)


@pytest.mark.slow
def test_a_result_that_cannot_be_pickled_is_named_with_its_rank():
    def work():
        return (word for word in "never") if rank() else "fine"

    with pytest.raises(LaunchError, match="rank 1 of 2 returned a generator, which cannot be pickled"):
        phalanx.launch(work, nproc_per_node=2)


@pytest.mark.slow(but=("a dict",))
@pytest.mark.parametrize("given", [{"ONE": "1", "TWO": "a b"}, ["ONE=1", "TWO=a b"]], ids=["a dict", "words"])
def test_variables_are_given_as_a_dict_or_as_the_command_takes_them(given):
    """A dict and a list were accepted, and set nothing."""

    def work():
        return os.environ.get("ONE"), os.environ.get("TWO")

    assert phalanx.launch(work, nproc_per_node=1, env=given) == [("1", "a b")]
    with pytest.raises(ValueError, match="env=: must be a dict of variables, NAME=VALUE, or a list of those, got 3"):
        phalanx.launch(work, env=3)


def test_what_makes_no_sense_is_refused_before_anything_is_started():
    lock = threading.Lock()

    def work(*args):
        return lock

    with pytest.raises(TypeError, match=r"phalanx.launch: 'lock', a variable around .*work \(a lock\) cannot be sent"):
        phalanx.launch(work)
    with pytest.raises(TypeError, match=r"phalanx.launch: argument 1 \(a generator\) cannot be sent to other"):
        phalanx.launch(print, (1, (word for word in "")))
    with pytest.raises(TypeError, match=r"phalanx.launch: argument 'file' \(a \w+\) cannot be sent to other"):
        phalanx.launch(print, (1,), {"file": lock})
    with pytest.raises(TypeError, match=r"phalanx.launch: needs a function, got a str"):
        phalanx.launch("train.py")
    with pytest.raises(ValueError, match=r"phalanx.launch: nproc_per_node=: must be at least 1, got 0"):
        phalanx.launch(print, nproc_per_node=0)
    with pytest.raises(ValueError, match=r"phalanx.launch: report=: must be a value \(DIR\), got True"):
        phalanx.launch(print, report=True)
    with pytest.raises(ValueError, match=r"phalanx.launch: help=: only for scripts"):
        phalanx.launch(print, help=True)
    with pytest.raises(
        ValueError, match=r"phalanx.launch: nnodes=: phalanx.launch starts ranks only on this host.*--nnodes"
    ):
        phalanx.launch(print, nnodes=2)
    with pytest.raises(ValueError, match=r"phalanx.launch: nprocs=: no such option"):
        phalanx.launch(print, nprocs=2)


def test_a_rank_of_another_launcher_starts_no_job(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(LaunchError, match="RANK=1 in the environment: this process is already a rank"):
        phalanx.launch(print, nproc_per_node=1)


@pytest.mark.slow
def test_a_restart_returns_what_the_last_attempt_returned(capsys):
    def work():
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0 and rank() == 1:
            raise ValueError("the first time it goes wrong")
        return attempt

    assert phalanx.launch(work, nproc_per_node=2, max_restarts=1) == [1, 1]
    assert "the first time it goes wrong" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_every_rank_and_is_raised():
    def work(caller):
        if rank() == 0:
            os.kill(caller, signal.SIGINT)
        threading.Event().wait()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            phalanx.launch(work, (os.getpid(),), nproc_per_node=2)
    finally:
        signal.signal(signal.SIGINT, before)


SCRIPT = """
import dataclasses, os, sys, torch, phalanx
import torch.distributed as dist
from torch.utils.data import DataLoader

@dataclasses.dataclass
class Point:
    x: int

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.tensor(scaled(i))

def scaled(x):
    return x * SCALE

class Refused(Exception):
    pass

def train(fail=False):
    with phalanx.init() as job:
        points = [None] * job.world_size
        dist.all_gather_object(points, Point(job.rank))  # plain pickle, of a class of __main__
        assert [type(point) for point in points] == [Point] * job.world_size
        if fail:
            raise Refused(job.rank)
        loader = DataLoader(Points(), num_workers=1, multiprocessing_context="spawn")
        return Point(sum(int(batch) for batch in loader) + points[-1].x)

SCALE = 10
if __name__ == "__main__":
    SCALE = 100
    assert phalanx.launch(train, nproc_per_node=2) == [Point(61), Point(61)]  # spawned workers read the script anew
    try:
        phalanx.launch(train, (True,), nproc_per_node=2)
    except Refused as error:
        print("Refused by", error)
"""


@pytest.mark.slow
def test_functions_and_classes_of_a_script_are_the_same_in_the_ranks(tmp_path):
    """Its classes come back as the script's own, and are found by plain pickle in the ranks (`all_gather_object`)."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, "Refused by" in ended.stdout) == (0, True), ended.stderr


@pytest.mark.slow
def test_the_ranks_end_with_a_caller_that_is_killed(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(
        "import phalanx, threading\n"
        "phalanx.launch(lambda: (print('waiting'), threading.Event().wait()), nproc_per_node=2)\n"
    )
    with start(python=(str(script),)) as running:
        running.read_until_all("waiting", 2)
        running.process.kill()
        running.wait_gone()


@pytest.mark.slow
def test_the_example_of_the_documentation_runs_as_it_stands(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "from-python.md").read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(block)
    done = run([sys.executable, str(script)], tmp_path)
    assert done.code == 0, done.output
    *trained, returned = sorted(done.output.splitlines(), key=lambda line: line == "[0, 1]")
    assert returned == "[0, 1]"
    assert trained in (["[0-1] trained for 3 steps"], [f"[{rank}] trained for 3 steps" for rank in (0, 1)])
    assert done.warnings == []
