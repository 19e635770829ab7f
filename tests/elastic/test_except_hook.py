"""An exception that nobody caught is printed once after many generations, each line with one rank in front."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from phalanx.elastic.groups import one_except_hook


@pytest.fixture(autouse=True)
def own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def print_type(kind: type[BaseException], *_: object) -> None:
        sys.stderr.write(f"{kind.__name__}\n")

    monkeypatch.setattr(sys, "excepthook", print_type)


def form_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def form_groups(times: int) -> None:
    form_group()
    for _ in range(times):
        dist.destroy_process_group()
        with one_except_hook():
            form_group()
    dist.destroy_process_group()


def test_the_hook_of_torch_is_there_once_after_many_generations(capsys: pytest.CaptureFixture[str]) -> None:
    """Each put another in front: `[rank0]: [rank0]: [rank0]: ValueError`, and after a thousand nothing was printed."""
    form_groups(3)
    sys.excepthook(ValueError, ValueError("x"), None)
    assert capsys.readouterr().err == "[rank0]: ValueError\n"


def test_a_hook_that_the_script_has_put_around_it_stays(capsys: pytest.CaptureFixture[str]) -> None:
    form_group()
    torchs = sys.excepthook

    def own(*error: object) -> None:
        sys.stderr.write("own\n")
        torchs(*error)  # type: ignore[arg-type]

    sys.excepthook = own
    for _ in range(3):
        dist.destroy_process_group()
        with one_except_hook():
            form_group()
    dist.destroy_process_group()
    assert sys.excepthook is own
    sys.excepthook(ValueError, ValueError("x"), None)
    assert capsys.readouterr().err == "own\n[rank0]: ValueError\n"


def test_where_no_group_came_about_the_hook_is_as_it_was() -> None:
    form_groups(1)
    hook = sys.excepthook
    with pytest.raises(KeyError), one_except_hook():
        raise KeyError
    assert sys.excepthook is hook
