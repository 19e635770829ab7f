"""What every test is held to: it leaves no process, thread, descriptor, port or variable behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest

from phalanx.testing import leaks
from phalanx.testing.namespaces import enter_own_network, why_no_hosts

USUAL_RESUMPTIONS = (25, 57, 102)  # cases of tests/trainer/resumption.py


def pytest_configure(config: pytest.Config) -> None:
    # Container images set this; each of the thousands of processes would compile the modules that it imports, anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if hasattr(config, "workerinput"):
        config.option.slow = config.workerinput["slow"]
    else:  # whoever names tests wants them, whatever they take
        names_tests = config.args_source != pytest.Config.ArgsSource.TESTPATHS
        config.option.slow = config.option.slow or names_tests or bool(config.option.keyword or config.option.markexpr)
    # `nohup` ignores the one, a shell that puts us into the background the other, for all that a test starts as well.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests run side by side (pytest-xdist). A rank of Gloo whose peer was killed may otherwise connect to the port that
    # the peer had, and that a rank of another test has now: that one's connections break.
    if hasattr(config, "workerinput") and sys.platform == "linux" and not why_no_hosts():
        enter_own_network()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist what was decided about slow tests: it has the words of the command line only."""
    node.workerinput["slow"] = node.config.option.slow


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests, too, where no tests are named")
    parser.addoption("--kills", type=int, default=3, help="ranks killed at random moments, in the update or in a save")
    parser.addoption("--frames", type=int, default=10_000, help="frames that the coordinator is fuzzed with")
    parser.addoption("--copies", type=int, default=5, help="random jobs whose coordinator is copied, for each seed")
    parser.addoption("--model-states", type=int, default=30_000, help="states of a model of the take-over")
    parser.addoption("--model-strolls", type=int, default=30, help="random paths through it, for each start")
    parser.addoption("--strangers", type=int, default=300, help="hostile connections to the coordinator")
    parser.addoption("--trees", type=int, default=15, help="random states saved and loaded beside torch.save")
    parser.addoption("--host-losses", type=int, default=2, help="ranks, hosts and links lost at random in one job")
    parser.addoption("--host-losses-seed", type=int, default=0, help="by which they are drawn")
    parser.addoption("--any-host-losses", type=int, default=4, help="hosts lost at random, also the one that leads")
    parser.addoption("--strikes", type=int, default=30, help="kills and stops at random in one elastic job")
    parser.addoption("--strikes-seed", type=int, default=0, help="by which they are drawn")
    parser.addoption(
        "--loops", type=int, default=1, help="random loops trained under each strategy, for each world size"
    )
    parser.addoption("--models", type=int, default=100, help="random models trained beside PyTorch's DDP")
    parser.addoption("--programs", type=int, default=60, help="programs drawn at random that lose ranks")
    parser.addoption("--host-programs", type=int, default=2, help="and of those that run on two hosts")
    parser.addoption("--lost-host-programs", type=int, default=8, help="and of those that lose whole hosts")
    parser.addoption("--first-program", type=int, default=0, help="the seed of the first of them")
    parser.addoption(
        "--stage-kills", type=int, default=3, help="ranks of pipelines killed at random cells of schedules"
    )
    parser.addoption(
        "--simulated-accelerator",
        metavar="FOLDER",
        help="run tests/gpu on a simulated device as well, which is built in this folder",
    )
    parser.addoption("--resumptions", type=int, default=0, help="random jobs of a Trainer ended and taken up again")
    parser.addoption("--resumptions-seed", type=int, default=0, help="by which they are drawn")
    parser.addoption(
        "--averagings", type=int, default=1, help="random trainings apart of each kind, for each world size"
    )
    parser.addoption("--streams", type=int, default=50, help="streams drawn at random, read, left and taken up again")
    parser.addoption("--first-stream", type=int, default=0, help="the seed of the first of them")
    parser.addoption("--elastic-kills", type=int, default=6, help="ranks of elastic jobs killed at random places")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill" in metafunc.fixturenames:
        metafunc.parametrize("kill", range(metafunc.config.getoption("kills")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked as slow, unless it is wanted."""
    if config.option.slow:
        return
    slow = [item for item in items if is_slow(item)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is marked as slow, and not with parameters that are to run every time."""
    mark = item.get_closest_marker("slow")
    called = item.name.partition("[")[2].rstrip("]")
    return mark is not None and called not in mark.kwargs.get("but", ())


@pytest.fixture(params=["gloo", "phalanx"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backends over which what stands on collectives must do the same."""
    name: str = request.param
    return name


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts, cut tensors of some hundred KiB into several segments, as large ones are cut."""
    from phalanx.transport.hierarchical import segments

    monkeypatch.setattr(segments, "_WANTED", 16)
    monkeypatch.setattr(segments, "_LEAST_BYTES", 2**17)
    monkeypatch.setattr(segments, "_LEAST_MESSAGE_BYTES", 2**15)


@pytest.fixture(autouse=True, scope="session")
def _marked_descendants() -> None:
    leaks.mark_descendants()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage: what an import makes stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported and collected is neither searched for garbage nor copied in each forked rank
    # One intra-op thread: no pool starts in the middle of a test, and what is forked from here starts clean.
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _police() -> Iterator[None]:
    before = leaks.Snapshot.take()
    yield
    if left := before.leaks():
        before.restore()
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def num_frames(request: pytest.FixtureRequest) -> int:
    """How many frames the coordinator is fuzzed with."""
    return int(request.config.getoption("frames"))


@pytest.fixture
def num_copies(request: pytest.FixtureRequest) -> int:
    """How many random jobs have a coordinator that is copied."""
    return int(request.config.getoption("copies"))


@pytest.fixture
def model_states(request: pytest.FixtureRequest) -> int:
    """How many states of the model of a take-over are looked at, where there are more."""
    return int(request.config.getoption("model_states"))


@pytest.fixture
def model_strolls(request: pytest.FixtureRequest) -> int:
    """How many random paths are gone through it."""
    return int(request.config.getoption("model_strolls"))


@pytest.fixture
def num_strangers(request: pytest.FixtureRequest) -> int:
    """How many hostile connections are made to the coordinator."""
    return int(request.config.getoption("strangers"))


@pytest.fixture
def trees(request: pytest.FixtureRequest) -> int:
    """How many random states are saved."""
    return int(request.config.getoption("trees"))


@pytest.fixture
def resumptions(request: pytest.FixtureRequest) -> Iterable[int]:
    """Which random jobs of a Trainer are ended and taken up again."""
    first, count = (request.config.getoption(name) for name in ("resumptions_seed", "resumptions"))
    return range(first, first + count) if count else USUAL_RESUMPTIONS


@pytest.fixture
def num_any_host_losses(request: pytest.FixtureRequest) -> int:
    """How many hosts of an elastic job are lost at random, also the one that leads."""
    return int(request.config.getoption("any_host_losses"))


@pytest.fixture
def num_elastic_kills(request: pytest.FixtureRequest) -> int:
    """How many ranks of elastic jobs are killed at random places."""
    return int(request.config.getoption("elastic_kills"))


@pytest.fixture
def num_averagings(request: pytest.FixtureRequest) -> int:
    """How many random trainings apart there are of each kind and world size."""
    return int(request.config.getoption("averagings"))


@pytest.fixture
def models(request: pytest.FixtureRequest) -> int:
    """How many random models are trained."""
    return int(request.config.getoption("models"))
