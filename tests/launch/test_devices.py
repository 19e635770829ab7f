import pytest
from tests.fake_nvml import build_nvml
from tests.system.phalanx_command import run

from phalanx._job.launch.devices import count_gpus, count_visible, find_cpus


@pytest.mark.parametrize(
    ("installed", "visible", "count"),
    [
        (4, None, 4),
        (4, "", 0),
        (4, "-1", 0),
        (4, "0", 1),
        (4, "0,3", 2),
        (4, " 1 , 2 ", 2),
        (4, "0,9,1", 1),
        (2, "GPU-8932f937,GPU-1", 2),
        (2, "MIG-1", 1),
        (0, "GPU-1", 0),
        (0, None, 0),
    ],
)
def test_visible_devices_are_counted_as_cuda_reads_the_list(installed: int, visible: str | None, count: int) -> None:
    assert count_visible(installed, visible) == count


def test_the_count_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    assert count_gpus({}) == torch.cuda.device_count()


def test_there_is_a_core_to_run_on() -> None:
    assert len(find_cpus()) >= 1


SCRIPT = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "shares", os.environ.get("PHALANX_RANKS_PER_GPU"))
"""


@pytest.mark.slow(but=("words0-3-None-3-None", "words1-4-1,2-2-None"))
@pytest.mark.parametrize(
    ("words", "gpus", "visible", "ranks", "shares"),
    [
        (["--nproc-per-node", "auto"], "3", None, 3, None),
        (["--nproc-per-node", "gpu"], "4", "1,2", 2, None),
        (["--nproc-per-node", "4", "--ranks-per-gpu", "4"], "1", None, 4, "4"),
        (["--ranks-per-gpu", "2"], "2", "0", 2, "2"),
    ],
)
def test_the_command_starts_as_many_ranks_as_the_gpus_are_to_have(tmp_path, words, gpus, visible, ranks, shares):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**build_nvml(tmp_path), "FAKE_GPUS": gpus, "PHALANX_RANKS_PER_GPU": "9"}  # an outer launcher's is not ours
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    finished = run("--no-preload", *words, str(script), env=env)
    assert finished.code == 0, finished.err
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} shares {shares}" in finished.out
