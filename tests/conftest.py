"""What every test is held to: it leaves no process, thread, descriptor, port or variable behind."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from tests import huge_pages, leaks

from phalanx.testing.namespaces import enter_own_network, why_no_hosts


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


_LEFT_OUT = {"slow": "make test-all", "lint": "make lint"}  # markers, and what runs the tests that have them
_not_chosen = pytest.StashKey[dict[str, int]]()  # how many tests were left out, by marker


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over from a worker of pytest-xdist what it left out; every worker has collected the same tests."""
    node.config.stash[_not_chosen] = getattr(node, "workeroutput", {}).get("left out", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what did not run, and why: a line for each reason, the most frequent first."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for marker, count in config.stash.get(_not_chosen, {}).items():
        reasons[f"marked as {marker}: `{_LEFT_OUT[marker]}` runs them"] += count
    if lines := [f"{count:6,}  {' '.join(reason.split())}" for reason, count in (+reasons).most_common()]:
        terminalreporter.section("not run, and why")
        for line in lines:
            terminalreporter.line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests, too, as `make test-all` does")
    parser.addoption("--effort", type=int, default=1, help="draw N times as many cases where a test draws them")
    parser.addoption("--seed", type=int, default=0, help="draw others")
    parser.addoption(
        "--simulated-accelerator",
        metavar="FOLDER",
        help="run tests/gpu on a simulated device as well, which is built in this folder",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill" in metafunc.fixturenames:  # the number of a process that is killed at a random moment
        first, count = (metafunc.config.getoption(name) for name in ("seed", "effort"))
        metafunc.parametrize("kill", range(first, first + count))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked as slow or as lint, unless it is wanted."""
    if config.option.slow:
        return
    left_out = {marker: [item for item in items if is_marked(item, marker)] for marker in _LEFT_OUT}
    config.stash[_not_chosen] = {marker: len(items) for marker, items in left_out.items()}
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = config.stash[_not_chosen]
    unwanted = set(itertools.chain.from_iterable(left_out.values()))
    config.hook.pytest_deselected(items=list(unwanted))
    items[:] = [item for item in items if item not in unwanted]


def is_marked(item: pytest.Item, marker: str) -> bool:
    """Whether a test has this marker, and not with parameters that are to run every time."""
    mark = item.get_closest_marker(marker)
    called = item.name.partition("[")[2].rstrip("]")
    return mark is not None and called not in mark.kwargs.get("but", ())


@pytest.fixture(params=[pytest.param("gloo", marks=pytest.mark.slow), "phalanx"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backends over which what stands on collectives must do the same."""
    name: str = request.param
    return name


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts, cut tensors of some hundred KiB into several segments, as large ones are cut."""
    from phalanx._comm.transport.hierarchical import segmented

    monkeypatch.setattr(segmented, "_WANTED", 16)
    monkeypatch.setattr(segmented, "_LEAST_BYTES", 2**17)
    monkeypatch.setattr(segmented, "_LEAST_MESSAGE_BYTES", 2**15)


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


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what was imported and collected is neither searched for garbage nor copied in each forked rank
    if len(session.items) > 20:  # it takes up to a second
        huge_pages.collapse()
    # One intra-op thread: no pool starts in the middle of a test, and what is forked from here starts clean.
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        # Autograd decides at its first pass whether it needs threads. After torch.compile's imports a build for GPUs
        # starts some, also without a GPU, and no rank that is forked from here could run a backward.
        torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def _police() -> Iterator[None]:
    before = leaks.Snapshot.take()
    yield
    if left := before.leaks():
        before.restore()
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def effort(request: pytest.FixtureRequest) -> int:
    """How many times as many cases are drawn as usual, where a test draws them."""
    return int(request.config.getoption("effort"))


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """Return the number by which cases are drawn."""
    return int(request.config.getoption("seed"))
