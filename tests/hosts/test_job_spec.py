"""A host that joins takes over some of the first one's words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx._job.agent.settings import Settings
from phalanx._job.agent.target import JobTarget
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.hosts.job_spec import JobSpec

FIRST = Settings(JobTarget("script", "train.py", ()), rendezvous=Rendezvous("10.0.0.1:29400"))
JOINED = Settings(JobTarget("script", "-", ()))


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (("127.0.0.1", 9400), ("127.0.0.1", 9400)),
        (("0.0.0.0", 9400), ("0.0.0.0", 9400)),
        (("10.0.0.1", 9400), None),  # the first host's own
        (None, None),
    ],
)
def test_metrics_are_served_where_the_first_host_serves_them_unless_that_is_its_own_address(
    given: tuple[str, int] | None, taken: tuple[str, int] | None
) -> None:
    spec = JobSpec.from_bytes(JobSpec.of(replace(FIRST, metrics=given), "job", {}).to_bytes())
    assert spec.to_settings(JOINED).metrics == taken
    assert not spec.to_settings(JOINED).needs_metrics
    own = spec.to_settings(replace(JOINED, metrics=("127.0.0.1", 0)))
    assert (own.metrics, own.needs_metrics) == (("127.0.0.1", 0), True)


def test_what_env_names_is_kept_apart_from_what_is_passed_on_unasked() -> None:
    asked = replace(FIRST, env={"WORD": "here", "NCCL_DEBUG": None, "ABSENT": None})
    environment = {"WORD": "here", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "e", "HOME": "/"}
    spec = JobSpec.from_bytes(JobSpec.of(asked, "job", environment).to_bytes())
    assert spec.env == {"WORD": "here", "NCCL_DEBUG": "INFO"}
    own = {"WORD": "there", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    assert spec.plan_environment(own, {}) == {"WORD": "here", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    assert spec.plan_environment({}, {"WORD": "mine"})["WORD"] == "mine"
    assert "NCCL_SOCKET_IFNAME" not in spec.plan_environment({}, {})
