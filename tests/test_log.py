import logging

import pytest

from phalanx._base.log import get_logger, warn_once


@pytest.mark.parametrize(
    ("asked", "name"),
    [("phalanx._comm.backend", "phalanx._comm.backend"), ("train", "phalanx.train"), ("phalanx", "phalanx")],
)
def test_every_logger_lies_below_phalanx(asked, name):
    assert get_logger(asked).name == name


def test_getting_a_logger_configures_nothing():
    logger = get_logger("phalanx.quiet")
    assert (logger.handlers, logger.level) == ([], logging.NOTSET)


def test_a_warning_is_said_once_per_process(caplog):
    logger = get_logger("phalanx.warned")
    for _ in range(3):
        warn_once(logger, "the core is missing: collectives run over gloo")
    warn_once(logger, "another matter")
    assert caplog.messages == ["the core is missing: collectives run over gloo", "another matter"]
