"""A function in namespaces of its own: its result, its exception, or its end come back."""

import os
import shutil

import pytest
from tests.containers import contained, why_no_containers

from phalanx.testing import RankFailed, run_ranks

pytestmark = pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers())


def _look():
    return (
        os.getpid(),
        [name for name in os.listdir("/proc") if name.isdigit()],
        os.listdir("/sys/class/net") and open("/proc/net/dev").read().count(":"),
        shutil.disk_usage("/dev/shm").total,
    )


def _alone(rank, world_size):
    return contained(_look, namespaces=("pid", "net"), shm_bytes=1 << 20)


def test_it_is_process_1_and_sees_itself_alone() -> None:
    outside = shutil.disk_usage("/dev/shm").total
    assert run_ranks(_alone, 1, init=False) == [(1, ["1"], 1, 1 << 20)]
    assert shutil.disk_usage("/dev/shm").total == outside


def _raise():
    raise KeyError("inside")


def _raising(rank, world_size):
    contained(_raise)


def test_its_exception_comes_back() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_raising, 1, init=False)
    assert caught.value.errors[0].args == ("inside",)


def _ending(rank, world_size):
    contained(lambda: os._exit(7))


def test_its_end_is_the_caller_s_end() -> None:
    with pytest.raises(RankFailed, match="exited with code 7"):
        run_ranks(_ending, 1, init=False)


def _as_another_root(rank, world_size):
    return contained(lambda: (os.readlink("/proc/self/ns/user"), os.getuid()), namespaces=("user",))


def test_a_user_namespace_has_a_root_of_its_own() -> None:
    inside, uid = run_ranks(_as_another_root, 1, init=False)[0]
    assert inside != os.readlink("/proc/self/ns/user")
    assert uid == 0
