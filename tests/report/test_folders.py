"""A report's folder is the user's: what others have there stays, two runs never mix, and no report ends a job."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from tests.report.left_records import HOST, leave_record
from tests.system.phalanx_command import run, write_script

from phalanx._comm.diagnostics.step_file import FILE_BYTES, StepFile
from phalanx._comm.diagnostics.step_recorder import StepRecorder
from phalanx._job.report.compare import load
from phalanx._job.report.job_record import JobRecord
from phalanx._job.report.measurements import Measurements
from phalanx._job.report.records import find_other_run, is_alive, list_records, remove_old_records
from phalanx._job.report.transfer import pack_files, unpack_file

STEPS = """
import os, sys, phalanx
phalanx.report.begin(sys.argv[1])
for _ in range(5):
    phalanx.report.step(samples=1)
"""


def python(folder, script, *arguments, code=0):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PHALANX", "TORCHELASTIC"))}
    words = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def read(folder):
    return Measurements.from_json((folder / "report.json").read_text())


@pytest.mark.slow
def test_a_users_folder_named_ranks_stays_and_no_text_ends_a_job(tmp_path):
    """`--report DIR` deleted DIR/ranks, whoever had made it; an argument that is no UTF-8 ended the job with exit code
    1 and the launcher's own traceback, when it had succeeded.
    """
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "data.csv").write_text("1,2")
    (tmp_path / "ranks" / "mine.steps").write_text("1,2")
    done = run("--nproc-per-node", "1", "--report", str(tmp_path), write_script(tmp_path, "import sys\n"), b"\xff\xfe")
    assert done.code == 0, done.err
    assert sorted(os.listdir(tmp_path / "ranks")) == ["data.csv", "mine.steps"]
    assert "report is in" in done.err
    assert r"\udcff" in (tmp_path / "report.html").read_text()
    read(tmp_path)


def test_a_folder_that_no_run_has_written_to_is_none(tmp_path):
    """`phalanx report DIR` wrote a page of no run where DIR had a folder `ranks` of the user's."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "data.csv").write_text("1,2")
    with pytest.raises(ValueError, match="no report of a run"):
        load(str(tmp_path))
    assert os.listdir(tmp_path) == ["ranks"]


def test_a_report_without_a_name_is_refused():
    """An empty name was the working directory: `--report "$UNSET"` wrote there, and deleted."""
    done = run("--nproc-per-node", "1", "--report", "", "x.py")
    assert done.code == 2
    assert "--report: must be a directory" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ZeroDivisionError", "KeyboardInterrupt"])
def test_what_comes_up_while_recording_ends_takes_no_report_with_it(tmp_path, fault):
    """`close` raised what had gone wrong once more, and whoever was to write the report behind it never did."""
    script = STEPS + (
        f"def fail(*given): raise {fault}\n"
        "recorder = sys.modules['phalanx._job.report.recording'].current()\n"
        "recorder._save_state = fail\n"
    )
    python(tmp_path, script, "out")
    found = read(tmp_path / "out")
    assert [rank.steps for rank in found.ranks] == [5]


def test_the_file_of_a_rank_has_all_its_blocks(tmp_path):
    """On a disk that was full every rank died of SIGBUS: the file had a size, and no blocks to store to."""
    StepFile(tmp_path / "a.steps", 0.0, 0.0).close()
    assert (tmp_path / "a.steps").stat().st_size == FILE_BYTES
    assert (tmp_path / "a.steps").stat().st_blocks * 512 >= FILE_BYTES


@pytest.mark.slow
def test_a_launcher_that_cannot_write_a_report_that_the_program_asked_for_goes_on(tmp_path):
    """A job that had succeeded ended with 2; one that had failed lost its restarts and its summary."""
    script = STEPS + "os.rename(sys.argv[1], sys.argv[1] + '2'); open(sys.argv[1], 'w').close()\n"
    done = run("--nproc-per-node", "1", write_script(tmp_path, script), str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert done.err.count("cannot write") == 1


def test_a_loss_is_not_waited_for_while_a_graph_is_captured(tmp_path, monkeypatch):
    """`float(loss)` in the backward that a CUDA graph captures ended the capture with an error in the user's code."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recorder = StepRecorder(str(tmp_path / "0.steps"), {})
    loss = SimpleNamespace(is_cuda=True, is_cpu=False, item=lambda: 1.0)
    assert recorder.read_loss(loss) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert recorder.read_loss(loss) == 1.0
    recorder.close(ended=False)


def test_only_the_records_of_one_run_of_this_host_are_sent(tmp_path):
    """A host that was not the first kept its records, and sent those of the run before with the next ones."""
    mine = leave_record(tmp_path, "a.steps", run="a")
    leave_record(tmp_path, "b.steps", run="b")
    leave_record(tmp_path, "c.steps", run="a", host="another")
    leave_record(tmp_path, "d.steps", run="a", ago_s=30.0)
    ((name, text),) = pack_files(str(tmp_path), "a", mine - 10)
    assert name == "a.steps"
    unpack_file(str(tmp_path), name, text)  # the hosts share the folder: whoever sent it may remove it
    assert not (tmp_path / "ranks" / "a.steps").exists()
    assert [file.facts["run"] for _, file in list_records(str(tmp_path))] == ["b", "a", "a", "a"]


@pytest.mark.slow
def test_records_of_runs_that_are_over_go_and_those_of_one_that_runs_stay(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        leave_record(tmp_path, "lives.steps", run="b", pid=other.pid)
        leave_record(tmp_path, "killed.steps", run="c", pid=2**22 + 1)
        leave_record(tmp_path, "far.steps", run="d", host="another")
        leave_record(tmp_path, "own.steps", run="e", pid=2**22 + 1)
        JobRecord("b.py", "", 0.0, time.time(), 1, pid=other.pid, host=HOST, run="b").write(tmp_path)
        remove_old_records(str(tmp_path), "e")
        assert sorted(os.listdir(tmp_path / "ranks")) == ["far.steps", "lives.steps", "own.steps"]
        assert find_other_run(str(tmp_path)).name == "b.py"
        refused = run("--nproc-per-node", "1", "--report", str(tmp_path), write_script(tmp_path, "pass"))
        assert refused.code == 2
        assert f"another job, b.py (pid {other.pid}), is running" in refused.err
        refused = python(tmp_path, STEPS, str(tmp_path), code=1)
        assert f"another process, b.py (pid {other.pid}), is recording" in refused.stderr
        other.communicate(b"\n")
    assert not is_alive(other.pid, time.time())
    assert not is_alive(os.getpid(), time.time() - 1e6)  # the number is another's by now
    assert find_other_run(str(tmp_path)) is None


@pytest.mark.slow
def test_a_run_again_after_a_kill_is_not_mixed_with_the_one_that_was_killed(tmp_path):
    """Within a minute of each other, two runs without a launcher were told apart by the clock, and so not at all."""
    python(tmp_path, STEPS + "os.kill(os.getpid(), 9)", "out", code=-signal.SIGKILL)
    leave_record(tmp_path / "out", "z.steps", run="another")
    python(tmp_path, STEPS, "out")
    (rank,) = read(tmp_path / "out").ranks
    assert (rank.steps, rank.ended) == (5, True)


@pytest.mark.slow
def test_the_launchers_folder_is_the_one_for_a_program_that_it_starts(tmp_path):
    """Under `--no-python` the program's own folder was taken in place of `--report`'s, and never read."""
    script = write_script(tmp_path, STEPS)
    words = ["--no-python", sys.executable, script, str(tmp_path / "mine")]
    done = run("--nproc-per-node", "1", "--report", str(tmp_path / "out"), *words)
    assert done.code == 0, done.err
    assert read(tmp_path / "out").steps == 5
    assert not (tmp_path / "mine").exists()
