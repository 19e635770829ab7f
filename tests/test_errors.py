import pickle
import subprocess
import sys

import pytest
import torch.distributed as dist

from phalanx import errors
from phalanx.errors import (
    AuthenticationError,
    CheckpointError,
    ClosedError,
    CoordinationError,
    DataError,
    DeadlineError,
    InternalError,
    LaunchError,
    MismatchError,
    PeerLostError,
    PhalanxError,
)

ALL = [
    AuthenticationError, CheckpointError, ClosedError, CoordinationError, DataError, DeadlineError, InternalError,
    LaunchError, MismatchError, PeerLostError,
]  # fmt: skip


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_a_phalanx_error_and_a_runtime_error(cls):
    assert issubclass(cls, PhalanxError)
    assert issubclass(cls, RuntimeError)


@pytest.mark.parametrize("cls", [MismatchError, PeerLostError])
def test_what_peers_do_is_also_the_error_that_users_of_torch_catch(cls):
    with pytest.raises(dist.DistBackendError, match="rank 2"):
        raise cls("rank 2 did it")


def test_a_passed_deadline_is_also_a_timeout_error():
    with pytest.raises(TimeoutError, match="too late"):
        raise DeadlineError("too late")


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (PhalanxError("said"), {}),
        (ClosedError("said"), {}),
        (CheckpointError("said"), {}),
        (DataError("said"), {}),
        (InternalError("said"), {}),
        (CoordinationError("said", reason="lost"), {"reason": "lost"}),
        (AuthenticationError("said"), {"reason": ""}),
        (DeadlineError("said", missing=(3, 5)), {"missing": (3, 5)}),
        (LaunchError("said", exit_code=7), {"exit_code": 7}),
        (MismatchError("said", calls={0: "broadcast", 1: "barrier"}), {"calls": {0: "broadcast", 1: "barrier"}}),
        (PeerLostError("said", ranks=(1,)), {"ranks": (1,)}),
    ],
)
def test_an_error_travels_between_processes_with_its_fields(error, fields):
    error.batch = 7
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.batch == 7
    assert str(copy) == "said"
    assert {name: getattr(copy, name) for name in fields} == fields


def test_fields_that_are_not_known_are_empty():
    assert DeadlineError("said").missing == ()
    assert LaunchError("said").exit_code == 1
    assert MismatchError("said").calls == {}
    assert PeerLostError("said").ranks == ()


def test_the_two_torch_errors_are_made_once():
    assert errors.MismatchError is MismatchError
    assert MismatchError.__qualname__ == "MismatchError"
    assert MismatchError.__module__ == "phalanx.errors"


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'phalanx\.errors' has no attribute 'PeerLostErorr'"):
        errors.PeerLostErorr  # noqa: B018


def test_without_torch_the_names_still_exist():
    code = """
import sys
sys.modules["torch"] = None      # an import of torch now raises ImportError
from phalanx.errors import MismatchError, PeerLostError, PhalanxError
assert issubclass(PeerLostError, PhalanxError)
print(MismatchError("said", calls={0: "barrier"}).calls)
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.strip() == "{0: 'barrier'}"
