import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx._base.processes import name_signal
from phalanx._job.agent.error_files import read_report
from phalanx._job.agent.failure import ExceptionReport, Exit, RankFailure, decide_failures, describe_failures
from phalanx._job.agent.job_report import JobReport
from phalanx._job.report.write import write_report


def raised(rank: int, at: float, *types: str, text: str = "Traceback: …") -> ExceptionReport:
    names = types or ("ValueError", "Exception")
    return ExceptionReport(rank, 100 + rank, at, names, f"{names[0]}: boom", "train.py:3", text)


def ended(rank: int, status: int, at: float, dump: str = "") -> Exit:
    return Exit(rank, 100 + rank, status, at, dump)


def order(exits: list[Exit], reports: list[ExceptionReport], sent: dict[int, float] | None = None) -> list[int]:
    failures = decide_failures({e.rank: e for e in exits}, {r.rank: r for r in reports}, sent or {})
    return [failure.rank for failure in failures]


def test_no_failure_when_all_end_well() -> None:
    assert order([ended(0, 0, 1.0), ended(1, 0, 2.0)], []) == []


def test_the_earliest_exception_is_first_whatever_ended_first() -> None:
    assert order([ended(0, 1, 5.0), ended(1, 1, 6.0)], [raised(0, 4.0), raised(1, 3.0)]) == [1, 0]


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV, 9])
def test_a_silent_death_beats_the_exceptions_that_it_causes(status: int) -> None:
    # rank 1 died at 3.0; rank 0 saw its socket close and raised before the parent was told
    assert order([ended(0, 1, 3.2), ended(1, status, 3.1)], [raised(0, 3.05)]) == [1, 0]


def test_the_report_blames_a_silent_death_though_its_victim_reported_first(tmp_path: Path) -> None:
    """Its events are in the order of time, and the agent notices a death later than its victim does."""
    target = SimpleNamespace(name="train.py", kind="script", arguments=())
    settings = SimpleNamespace(target=target, max_restarts=0, rendezvous=None)
    report = JobReport(SimpleNamespace(settings=settings, begun=0.0, num_ranks=2, run="1"), str(tmp_path))  # type: ignore[arg-type]
    failures = decide_failures({0: ended(0, 1, 3.2), 1: ended(1, -signal.SIGKILL, 3.1)}, {0: raised(0, 3.05)}, {})
    report.add_attempt(SimpleNamespace(failures=failures, interrupted=None), [], 2, {})  # type: ignore[arg-type]
    report.write(1)
    measured = write_report(str(tmp_path))
    assert [event.rank for event in measured.events] == [1, 0]


def test_an_exception_long_before_a_silent_death_is_first() -> None:
    assert order([ended(0, 1, 2.0), ended(1, -signal.SIGSEGV, 3.1)], [raised(0, 1.0)]) == [0, 1]


def test_an_abort_is_not_dated_back() -> None:
    assert order([ended(0, 1, 3.2), ended(1, -signal.SIGABRT, 3.1)], [raised(0, 3.05)]) == [0, 1]


def test_who_lost_a_peer_is_not_the_cause() -> None:
    assert order([], [raised(0, 1.0, "PeerLostError", "PhalanxError"), raised(1, 1.1)]) == [1, 0]


def test_what_we_stopped_is_last() -> None:
    exits = [ended(0, -signal.SIGTERM, 5.1), ended(1, 1, 6.0), ended(2, -signal.SIGKILL, 7.0)]
    failures = decide_failures(
        {e.rank: e for e in exits}, {1: raised(1, 4.0)}, {signal.SIGTERM: 5.0, signal.SIGKILL: 6.9}
    )
    assert [(failure.rank, failure.stopped) for failure in failures] == [(1, False), (0, True), (2, True)]


def test_a_handler_that_answers_our_sigterm_with_an_exit_code_is_not_the_cause() -> None:
    assert order([ended(0, 3, 5.01), ended(1, 1, 6.0)], [raised(1, 4.8)], {signal.SIGTERM: 5.0}) == [1, 0]


@pytest.mark.parametrize(("status", "code"), [(3, 3), (-signal.SIGSEGV, 139), (-signal.SIGKILL, 137), (-2, 130)])
def test_the_exit_code_is_what_a_shell_would_show(status: int, code: int) -> None:
    assert RankFailure(0, None, ended(0, status, 1.0)).code == code


def test_a_rank_that_hung_after_its_exception_failed_with_1() -> None:
    assert RankFailure(0, raised(0, 1.0), ended(0, -signal.SIGKILL, 9.0)).code == 1


def test_the_first_failure_is_told_last_with_its_traceback() -> None:
    exits = {0: ended(0, 1, 5.0), 1: ended(1, 1, 4.0), 2: ended(2, -signal.SIGTERM, 5.0), 3: ended(3, 1, 5.0)}
    reports = {1: raised(1, 3.0, text="Traceback\n  line\nValueError: boom\n"), 0: raised(0, 4.0), 3: raised(3, 4.1)}
    text = describe_failures(decide_failures(exits, reports, {signal.SIGTERM: 4.9}), 4, "box")
    assert text == (
        "After it, and probably because of it:\n"
        "  ranks 0, 3: ValueError: boom at train.py:3 (exit code 1)\n"
        "  rank 2: stopped by phalanx run\n"
        "\n"
        "First failure: rank 1 of 4 on box (pid 101): ValueError: boom at train.py:3 (exit code 1)\n"
        "\n"
        "Traceback\n  line\nValueError: boom"
    )


def test_consequences_that_differ_by_a_number_are_one_line_and_other_exit_codes_another() -> None:
    reports = {
        rank: ExceptionReport(
            rank, 100 + rank, float(rank), ("ValueError",), f"ValueError: sample {17 * rank}", "train.py:3", ""
        )
        for rank in range(5)
    }
    exits = {rank: ended(rank, 7 if rank == 4 else 1, 9.0) for rank in range(5)}
    text = describe_failures(decide_failures(exits, reports, {}), 5, "box")
    assert text.splitlines()[:3] == [
        "After it, and probably because of it:",
        "  ranks 1, 2, 3: ValueError: sample 17 at train.py:3 (exit code 1); the numbers are rank 1's",
        "  rank 4: ValueError: sample 68 at train.py:3 (exit code 7)",
    ]


def test_an_error_file_without_a_class_name_is_a_failure_like_any_other(tmp_path: Path) -> None:
    """It ended the agent with an IndexError of its own."""
    path = tmp_path / "error.json"
    path.write_text('{"message": "out of disk space"}')
    report = read_report(str(path), 0, 100, 1e9)
    assert report is not None
    (failure,) = decide_failures({0: ended(0, 1, 1e9)}, {0: report}, {})
    text = describe_failures([failure], 1, "box")
    assert "First failure: rank 0 of 1 on box (pid 100): out of disk space (exit code 1)" in text


def test_a_report_of_any_characters_is_one_datagram() -> None:
    text = "🌍" * 30_000
    report = ExceptionReport(0, 100, 1.0, ("ValueError",), text, "train.py:3", text, own_lines=text)
    data = report.to_bytes()
    assert len(data) <= 150_000
    assert ExceptionReport.from_bytes(data) is not None


def test_a_fatal_signal_is_told_with_its_name_and_dump_without_our_frames() -> None:
    dump = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/home/a/train.py", line 6 in <module>\n'
        '  File "/x/phalanx/_job/agent/worker.py", line 143 in run_script\n'
        '  File "/x/phalanx/_job/agent/worker.py", line 57 in run_worker\n'
        '  File "/x/phalanx/_job/agent/zygote.py", line 45 in main\n'
        '  File "<string>", line 1 in <module>\n\n'
        "Extension modules: numpy.linalg, torch._C (total: 2)\n"
    )
    (failure,) = decide_failures({0: ended(0, -signal.SIGSEGV, 1.0, dump)}, {}, {})
    text = describe_failures([failure], 1, "box")
    assert "SIGSEGV (segmentation fault)" in text
    assert text.endswith('  File "/home/a/train.py", line 6 in <module>')


def test_a_report_survives_the_way_and_a_huge_one_is_cut_in_the_middle() -> None:
    report = raised(2, 1.5)
    assert ExceptionReport.from_bytes(report.to_bytes()) == report
    huge = raised(2, 1.5, text="first\n" + "\x01" * 10**6 + "\nlast")
    data = huge.to_bytes()
    assert len(data) <= 150_000
    received = ExceptionReport.from_bytes(data)
    assert received is not None
    text = received.traceback
    assert text.startswith("first\n")
    assert text.endswith("\nlast")
    assert "characters left out" in text


def test_signals_are_named_with_what_they_mean() -> None:
    assert name_signal(signal.SIGSEGV) == "SIGSEGV (segmentation fault)"
    assert "out of memory?" in name_signal(signal.SIGKILL)
    assert name_signal(signal.SIGUSR1) == "SIGUSR1"
    assert name_signal(63) == "signal 63"


@pytest.mark.parametrize(
    ("kind", "is_likely"), [("MemoryError", True), ("ImportError", True), ("ModuleNotFoundError", False)]
)
def test_a_limit_on_address_space_is_named_where_it_may_be_the_cause(
    kind: str, is_likely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300 << 20, 300 << 20))
    failures = decide_failures({0: ended(0, 1, 5.0)}, {0: raised(0, 4.0, kind)}, {})
    assert ("This process may use 307200 KiB" in describe_failures(failures, 1, "box")) == is_likely
