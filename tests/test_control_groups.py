import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.phalanx_command import run

from phalanx._base.control_groups import find_groups, read_cpu_quota
from phalanx._tools.doctor.host import examine_host

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


def read_quota(root: Path, membership: str, files: dict[str, str]) -> float | None:
    """Return the quota that a process with this /proc/self/cgroup has; `files` are those below /sys/fs/cgroup."""
    for path, text in {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return read_cpu_quota(find_groups(str(root)))


@pytest.mark.parametrize(("text", "quota"), [("150000 100000", 1.5), ("max 100000", None)])
@pytest.mark.parametrize("mount", ["", "unified/"])
def test_the_quota_of_version_2_is_read(tmp_path: Path, mount: str, text: str, quota: float | None) -> None:
    assert read_quota(tmp_path, "0::/job", {f"{mount}job/cpu.max": text}) == quota


@pytest.mark.parametrize(("text", "quota"), [("50000", 0.5), ("-1", None)])
@pytest.mark.parametrize(
    ("membership", "group"),
    [
        ("4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc", "cpu,cpuacct"),  # at the base, as inside a container
        ("4:cpuacct,cpu:/docker/abc", "cpu/docker/abc"),  # the folder has another name than the pair of controllers
        ("4:cpu:/../outside", "cpu"),  # in a namespace of control groups
    ],
)
def test_the_quota_of_version_1_is_read(
    tmp_path: Path, membership: str, group: str, text: str, quota: float | None
) -> None:
    files = {f"{group}/cpu.cfs_quota_us": text, f"{group}/cpu.cfs_period_us": "100000"}
    assert read_quota(tmp_path, membership, files) == quota


def test_the_smallest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {"outer/inner/cpu.max": "400000 100000", "outer/cpu.max": "300000 100000"}
    assert read_quota(tmp_path, "0::/outer/inner", files) == 3.0


@pytest.fixture
def half_of_the_cores() -> Iterator[Path]:
    """Yield a control group of this machine that grants half of the cores' time."""
    cores, name = len(os.sched_getaffinity(0)), f"phalanx-test-{os.getpid()}"
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if version_2 else "/sys/fs/cgroup/cpu", name)
    if cores < 2:
        pytest.skip("one core cannot be halved")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be written: {error}")
    try:
        file, text = ("cpu.max", "{} 100000") if version_2 else ("cpu.cfs_quota_us", "{}")
        try:
            (group / file).write_text(text.format(100000 * (cores // 2)))
        except OSError as error:
            pytest.skip(f"the quota cannot be written: {error}")
        yield group
    finally:
        group.rmdir()


def test_run_and_doctor_count_the_cores_that_the_quota_grants(half_of_the_cores: Path, tmp_path: Path) -> None:
    """With 96 cores and a quota of 4, `phalanx run` started 96 ranks; only `phalanx doctor` knew better."""
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])")
    enter = ("sh", "-c", f'echo $$ > {half_of_the_cores}/cgroup.procs && exec "$@"', "sh")
    granted = len(os.sched_getaffinity(0)) // 2
    for words, expected in (((), f"{granted} 1"), (("--nproc-per-node", "1"), f"1 {granted}")):
        finished = run("--no-preload", *words, str(script), before=enter)
        assert finished.code == 0, finished.err
        assert {line.partition("] ")[2] for line in finished.lines} == {expected}
    asked = [*enter, sys.executable, "-c", "from phalanx._tools.doctor.host import *; print(examine_host().cpu_quota)"]
    assert float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) == granted
    assert examine_host().cpu_quota != granted
