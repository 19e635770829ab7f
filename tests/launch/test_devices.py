import pytest

from phalanx.launch.devices import count_gpus, count_visible, find_cpus


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
