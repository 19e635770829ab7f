"""Each logger, written to and read back by its own package; and what becomes of one that fails."""

import importlib.util
import json
import logging
import random
import re
import subprocess
import sys

import pytest
from tests.loggers.logged_runs import log_a_run, rows_of

from phalanx.loggers import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger
from phalanx.loggers.guarded import GuardedLoggers
from phalanx.loggers.mlflow_logger import plan_names
from phalanx.loggers.resolve import resolve
from phalanx.testing import run_ranks


def test_a_table_has_a_row_for_each_call_and_a_column_for_each_metric(tmp_path):
    log_a_run(CSVLogger(tmp_path / "logs"), tmp_path / "report")
    assert rows_of(tmp_path / "logs") == [
        *({"step": str(step), "train/loss": str(1.0 / step), "val/accuracy": ""} for step in range(1, 4)),
        {"step": "3", "train/loss": "", "val/accuracy": "0.75"},
    ]
    settings = json.loads((tmp_path / "logs" / "hyperparameters.json").read_text())
    assert settings == {"lr": 0.5, "model": "Linear", "betas": "(0.9, 0.999)"}
    assert "The report" in (tmp_path / "logs" / "report.html").read_text()


def test_a_table_that_goes_on_from_a_checkpoint_has_no_row_twice(tmp_path):
    first = CSVLogger(tmp_path)
    for step in range(1, 6):
        first.log_metrics({"loss": float(step)}, step)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("3,0.1")  # a full disk tore a row, to which the next one was appended
        file.write("3,0.25\n")
        file.write("6")  # the kill tore a row
    second = CSVLogger(tmp_path)
    second.begin(again_from=4)  # the step of the checkpoint comes again
    for step in range(4, 7):
        second.log_metrics({"loss": float(step), "lr": 0.1}, step)
    assert [(row["step"], row["lr"]) for row in rows_of(tmp_path)] == [
        *((str(step), "") for step in range(1, 4)),
        *((str(step), "0.1") for step in range(4, 7)),
    ]


@pytest.mark.parametrize("again_from", [None, 0])
def test_a_table_that_is_there_is_kept_when_a_run_begins_anew(tmp_path, again_from):
    for number in range(3):
        logger = CSVLogger(tmp_path)
        logger.begin(again_from)
        logger.log_metrics({"loss": float(number)}, 1)
        logger.begin(again_from)  # a second fit of one process goes on
        logger.log_metrics({"loss": float(number)}, 2)
    for number, name in enumerate(("metrics.1.csv", "metrics.2.csv", "metrics.csv")):
        assert [row["loss"] for row in rows_of(tmp_path, name)] == [str(float(number))] * 2


def test_tensorboard_reads_the_curves_and_forgets_what_is_behind_a_checkpoint(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_a_run(TensorBoardLogger(tmp_path / "logs"), tmp_path / "report")
    again = TensorBoardLogger(tmp_path / "logs")
    again.begin(again_from=3)
    again.log_metrics({"train/loss": 9.0}, 3)
    again.finalize("success")
    reader = accumulator.EventAccumulator(str(tmp_path / "logs"))
    reader.Reload()
    assert [(one.step, one.value) for one in reader.Scalars("train/loss")] == [(1, 1.0), (2, 0.5), (3, 9.0)]
    assert "hyperparameters/text_summary" in reader.Tags()["tensors"]
    assert (tmp_path / "logs" / "report.html").exists()


def test_mlflow_reads_metrics_parameters_the_report_and_the_end(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    logger = MLflowLogger("digits", name="first", tracking_uri=uri)
    log_a_run(logger, tmp_path / "report")
    client = tracking.MlflowClient(tracking_uri=uri)
    run = client.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params == {"lr": "0.5", "model": "Linear", "betas": "(0.9, 0.999)"}
    history = client.get_metric_history(logger.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [one.path for one in client.list_artifacts(logger.run_id)] == ["report.html"]

    again = MLflowLogger("digits", tracking_uri=uri)  # a job that goes on from a checkpoint
    again.load_state_dict(logger.state_dict())
    again.log_hyperparams({"lr": 0.25, "more": 1})
    again.log_metrics({"train/loss": 0.1}, 4)
    again.finalize("failed")
    run = client.get_run(logger.run_id)
    assert (again.run_id, run.info.status) == (logger.run_id, "FAILED")
    assert run.data.params["lr"] == "0.5"  # MLflow takes each once
    assert run.data.metrics["train/loss"] == 0.1


WANDB = """
import sys
from phalanx.loggers import WandbLogger
from tests.loggers.logged_runs import log_a_run
from pathlib import Path

folder = Path(sys.argv[1])
logger = WandbLogger(project="digits", mode="offline", dir=str(folder))
log_a_run(logger, folder / "report")
print("id", logger.state_dict()["id"])
"""


def wandb_records(path):
    """The records in a file of wandb: LevelDB's log format, blocks of 32 KiB behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_wandb(folder):
    """The history of the offline run below `folder`, its config, and with what it ended."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    history, config, exits = [], {}, []
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif kind == "config":
            config |= {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.config.update
            }
        elif kind == "exit":
            exits.append(record.exit.exit_code)
    return history, config, exits


def test_wandb_reads_metrics_config_the_report_and_the_end(tmp_path):
    pytest.importorskip("wandb")
    # In a process of its own: wandb starts another one, and keeps it.
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    history, config, exits = read_wandb(tmp_path)
    points = [(row["step"], row["train/loss"]) for row in history if "train/loss" in row]
    assert points == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [row["step"] for row in history if "val/accuracy" in row] == [3]
    assert (config["lr"], config["model"]) == (0.5, "Linear")
    assert any(key.startswith("report") for row in history for key in row)
    (media,) = tmp_path.glob("wandb/offline-run-*/files/media/html/report*.html")
    assert "The report" in media.read_text()
    assert exits == [0]


class Failing:
    """A logger whose server is gone."""

    def __init__(self):
        self.calls = 0

    def log_metrics(self, metrics, step):
        self.calls += 1
        raise ConnectionError("the server is gone")


def test_a_logger_that_fails_is_told_of_once_and_the_others_go_on(tmp_path, caplog):
    failing, table = Failing(), CSVLogger(tmp_path)
    loggers = GuardedLoggers([failing, table], lambda: True)
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        for step in range(6):
            loggers.log_metrics({"loss": 1.0}, step)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "Failing.log_metrics failed: ConnectionError: the server is gone. Training continues"
    )
    assert failing.calls == 3  # each further call may have been a timeout
    assert len(rows_of(tmp_path)) == 6


def test_who_does_not_write_calls_nothing():
    failing = Failing()
    GuardedLoggers([failing], lambda: False).log_metrics({"loss": 1.0}, 1)
    assert failing.calls == 0


def _log_by_lightning(rank, world_size, folder):
    from lightning.fabric.loggers import CSVLogger as LightningLogger

    log_a_run(LightningLogger(str(folder), name="run", version=0), folder / "report")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")
def test_a_logger_of_lightning_is_taken_as_it_is(tmp_path):
    """In a process of its own: importing Lightning sets a variable, and starts a thread, for good."""
    run_ranks(_log_by_lightning, 1, tmp_path, init=False, start="fork")
    assert [row["step"] for row in rows_of(tmp_path / "run" / "version_0")] == ["1", "2", "3", "3"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("wandbb", ValueError, "there is no logger 'wandbb': give one of 'csv', 'mlflow', 'tensorboard', 'wandb'"),
        (CSVLogger, TypeError, "CSVLogger is a class: give an object, CSVLogger"),
        (3, TypeError, "a int is not a logger"),
        ([Failing(), object()], TypeError, "a object is not a logger"),
    ],
)
def test_what_is_no_logger_is_refused(given, error, message):
    with pytest.raises(error, match=f"Trainer: logger: {message}"):
        resolve(given, "Trainer: logger")


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        (WandbLogger, "wandb", "wandb"),
        (MLflowLogger, "mlflow", "mlflow"),
        (TensorBoardLogger, "tensorboard", "tensorboard"),
    ],
)
def test_a_package_that_is_missing_names_the_extra(monkeypatch, kind, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"{kind.__name__} needs {package}, .* pip install 'phalanx\[{extra}\]'"
    ):
        kind()


def test_importing_the_package_imports_none_of_the_loggers_packages():
    code = (
        "import sys, phalanx, phalanx.loggers.resolve, phalanx.loggers.guarded\n"
        "assert not {'wandb', 'mlflow', 'tensorboard', 'torch'} & set(sys.modules), 'imported'\n"
        "phalanx.loggers.resolve.resolve(['csv'], 'test')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- names -----------------------------------------------------------------------------------------------------------

_PIECES = ["a", "A", "lr", "optimizer", "a b", "é", ".", "..", "x" * 300, "@5", "", "meta.yaml", "-1", "a.b"]


def generated_names(seed):
    """Names of one to three pieces: many extend another, are folders of another, or are unusual in themselves."""
    dice = random.Random(seed)
    names = ["/".join(dice.choice(_PIECES) for _ in range(dice.randint(1, 3))) for _ in range(40)]
    return sorted({name for name in names if name.strip("/. ")})


@pytest.mark.parametrize("seed", range(5))
def test_the_names_for_mlflow_are_as_many_and_none_is_a_folder_of_another(seed):
    names = generated_names(seed)
    planned = plan_names(names)
    assert len({name.lower() for name in planned.values()}) == len(names)
    assert planned == plan_names(names[::-1])
    assert all(re.fullmatch(r"[A-Za-z0-9_:-][A-Za-z0-9_. :-]*", name) and len(name) <= 250 for name in planned.values())
    assert plan_names(["optimizer", "optimizer/lr"]) == {"optimizer": "optimizer", "optimizer/lr": "optimizer.lr"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["csv", "tensorboard", "mlflow"])
def test_every_logger_keeps_every_name(tmp_path, seed, kind, monkeypatch):
    """MLflow's folder lost each hyperparameter whose name extends another: one is a file, the other needs a folder."""
    names = generated_names(seed)
    params = {name: number for number, name in enumerate(names)}
    if kind == "csv":
        logger = CSVLogger(tmp_path)
    elif kind == "tensorboard":
        logger = TensorBoardLogger(tmp_path)
    else:
        pytest.importorskip("mlflow.tracking")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        logger = MLflowLogger("names", tracking_uri=f"file:{tmp_path}")
    logger.begin(None)
    logger.log_hyperparams(params)
    logger.log_hyperparams(params)  # as by a resumed run
    client = logger._client if kind == "mlflow" else None
    run_id = logger.run_id if kind == "mlflow" else None
    logger.finalize("success")
    if kind == "csv":
        assert json.loads((tmp_path / "hyperparameters.json").read_text()) == params
    elif kind == "tensorboard":
        event = next(tmp_path.glob("events*")).read_bytes()
        assert all(f"| {name} | {value} |".encode() in event for name, value in params.items())
    else:
        kept = client.get_run(run_id).data.params
        assert kept == {name: str(params[of]) for of, name in plan_names(params).items()}


def test_of_metrics_that_mlflow_refuses_only_those_are_lost(tmp_path, monkeypatch):
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLflowLogger("names", tracking_uri=f"file:{tmp_path}")
    with pytest.raises(ValueError, match=r"MLflow refuses 1 of 3 metrics: 'a//b': "):
        logger.log_metrics({"loss": 1.0, "a//b": 2.0, "val/loss": 3.0}, 1)
    assert logger._client.get_run(logger.run_id).data.metrics == {"loss": 1.0, "val/loss": 3.0}
    logger.finalize("success")


class _Gone:
    """A logger whose server is gone; its flush does nothing, as most do."""

    def __init__(self):
        self.calls = 0

    def log_metrics(self, metrics, step=None):
        self.calls += 1
        raise ConnectionError("the server is gone")

    def flush(self): ...


def test_a_logger_that_fails_is_asked_no_more_although_its_flush_succeeds():
    """Each flush began the count anew, and every call waited for the server's timeout."""
    gone = _Gone()
    loggers = GuardedLoggers([gone], lambda: True)
    for step in range(6):
        loggers.log_metrics({"loss": 1.0}, step)
        loggers.flush()
    assert gone.calls == 3
