"""A run that logs, and what a logger has kept of it."""

import csv

from phalanx.loggers.guarded import GuardedLoggers


def rows_of(folder, name="metrics.csv"):
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


def page(folder):
    folder.mkdir(exist_ok=True)
    path = folder / "report.html"
    path.write_text("<!doctype html><title>The report</title>")
    return str(path)


def log_a_run(logger, folder):
    """What a Trainer has a logger do, in its order."""
    loggers = GuardedLoggers([logger], lambda: True)
    loggers.begin(None, {"lr": 0.5, "model": "Linear", "betas": (0.9, 0.999)})
    for step in range(1, 4):
        loggers.log_metrics({"train/loss": 1.0 / step}, step)
    loggers.log_metrics({"val/accuracy": 0.75}, 3)
    loggers.log_file(page(folder))
    loggers.finalize("success")
