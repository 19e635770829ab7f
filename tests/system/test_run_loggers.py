"""Loggers in whole jobs: one rank writes, and the report is handed to them."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.loggers.logged_runs import rows_of
from tests.system.phalanx_command import run, write_script

TRAINER = """
import os, signal, sys, torch, phalanx
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from phalanx.loggers import CSVLogger
from phalanx.trainer import LambdaCallback


def kill(trainer, loss):
    if trainer.step == 5 and trainer.strategy.is_main and len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
        open(sys.argv[2], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
inputs = torch.randn(32, 3)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Linear(3, 1)
trainer = phalanx.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, max_epochs=3, log_every=1,
                          logger=CSVLogger(sys.argv[1]), show_progress=False,
                          callbacks=LambdaCallback(on_step_end=kill))
trainer.fit(DataLoader(data, batch_size=8))
"""

LOOP = """
import sys, torch, phalanx
from phalanx.loggers import CSVLogger

phalanx.report.begin(sys.argv[1] + "/report", logger=CSVLogger(sys.argv[1] + "/logs"), hyperparameters={"lr": 0.5})
for step in range(1, 6):
    phalanx.report.step(samples=4, loss=1.0 / step)
    if step == 3:
        phalanx.report.log({"accuracy": 0.5})
if len(sys.argv) > 2:
    raise ArithmeticError("the data is wrong")
"""


@pytest.mark.slow
def test_a_job_with_a_report_hands_it_to_the_loggers_of_one_rank(tmp_path: Path) -> None:
    logs, report = tmp_path / "logs", tmp_path / "report"
    finished = run("--nproc-per-node", "2", "--report", str(report), write_script(tmp_path, TRAINER), str(logs))
    assert finished.code == 0, finished.err
    assert [int(row["step"]) for row in rows_of(logs)] == list(range(1, 13))
    page = (logs / "report.html").read_text()
    assert "script.py" in page
    assert "2 ranks" in page
    assert sorted(path.name for path in logs.iterdir()) == ["hyperparameters.json", "metrics.csv", "report.html"]


@pytest.mark.slow
def test_when_the_rank_that_writes_is_lost_another_goes_on_in_the_same_table(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    finished = run("--nproc-per-node", "2", write_script(tmp_path, TRAINER), str(logs), str(tmp_path / "killed"))
    assert finished.code == 0, finished.err
    assert "1 rank was lost during the run" in finished.err
    assert [int(row["step"]) for row in rows_of(logs)] == list(range(1, 13))
    assert sorted(path.name for path in logs.iterdir()) == ["hyperparameters.json", "metrics.csv"]


SWEEP = """
import sys, phalanx
from phalanx.loggers import CSVLogger

for name, loss in (("a", 1.0), ("b", 2.0)):
    folder = f"{sys.argv[1]}/{name}"
    phalanx.report.begin(folder + "/report", logger=CSVLogger(folder + "/logs"), hyperparameters={"run": name})
    phalanx.report.step(samples=4, loss=loss)
    phalanx.report.log({"twice": 2 * loss})
"""


def test_each_report_of_a_process_has_its_own_loggers(tmp_path: Path) -> None:
    """All runs of a sweep were logged into the table of the first."""
    done = subprocess.run(
        [sys.executable, write_script(tmp_path, SWEEP), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name, loss in (("a", 1.0), ("b", 2.0)):
        logs = tmp_path / name / "logs"
        values = [(row["twice"], row["train/loss"]) for row in rows_of(logs)]
        assert values == [(f"{2 * loss}", ""), ("", f"{loss}")]
        assert (logs / "report.html").exists()


@pytest.mark.slow
def test_a_loop_of_ones_own_logs_its_metrics_its_losses_and_its_report(tmp_path: Path) -> None:
    script = write_script(tmp_path, LOOP)
    for words, code in (((), 0), (("fail",), 1)):
        folder = tmp_path / f"ended-{code}"
        done = subprocess.run(
            [sys.executable, script, str(folder), *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        rows = rows_of(folder / "logs")
        assert [(row["step"], row["accuracy"]) for row in rows if row["accuracy"]] == [("3", "0.5")]
        assert [(int(row["step"]), float(row["train/loss"])) for row in rows if row.get("train/loss")] == [
            (step, 1.0 / step) for step in range(1, 6)
        ]
        assert "script.py" in (folder / "logs" / "report.html").read_text()
        assert (folder / "report" / "report.html").exists()  # the launcher's own, afterwards
