"""The hosts of --hosts and --hostfile: what is taken, and what is refused with advice."""

from __future__ import annotations

import pytest

from phalanx._job.ssh.host_list import HostEntry, parse_hostfile, parse_hosts


def hosts(text: str) -> list[HostEntry]:
    problems: list[str] = []
    found = parse_hosts(text, problems)
    assert problems == []
    return found


def refuse(text: str) -> str:
    problems: list[str] = []
    parse_hosts(text, problems)
    return "\n".join(problems)


def test_hosts_have_a_user_and_a_number_of_ranks_where_they_are_given() -> None:
    assert hosts("a,b:4,you@c,you@d.example:2") == [
        HostEntry("a"), HostEntry("b", "4"), HostEntry("you@c"), HostEntry("you@d.example", "2"),
    ]  # fmt: skip
    assert hosts("[fd77::1]:2,you@[fd77::2]") == [HostEntry("fd77::1", "2"), HostEntry("you@fd77::2")]
    assert [entry.host for entry in hosts("you@c,d")] == ["c", "d"]


def test_blanks_in_quotes_are_no_part_of_a_name() -> None:
    assert hosts("a:2 , b:2") == [HostEntry("a", "2"), HostEntry("b", "2")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:2,", "the list ends with a comma"),
        ("a,,b", "'': must be HOST"),
        ("a,b,a:2", "a is listed 2 times. List it once, with its ranks: a:N"),
        ("you@a,me@a", "a is listed 2 times"),
        ("a:0", "the number of ranks must be at least 1, got '0'"),
        ("a:two", "got 'two'"),
        ("fd77::1", "brackets around an IPv6 address"),
        ("ssh://a:2222", "--ssh 'ssh -p 2222'"),
        ("-oProxyCommand=x", "must be HOST"),
        ("a;b", "must be HOST"),
        ("@a", "must be HOST"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text: str, expected: str) -> None:
    assert expected in refuse(text)


def test_all_problems_of_a_list_are_told_at_once() -> None:
    assert len(refuse("a:0,b:x,c").splitlines()) == 2


def test_a_hostfile_is_that_of_mpi_and_deepspeed() -> None:
    problems: list[str] = []
    text = "# the lab\n\nnode-a slots=4\nnode-b:2   # the old one\n  you@node-c\n"
    assert parse_hostfile(text, "hosts.txt", problems) == [
        HostEntry("node-a", "4"), HostEntry("node-b", "2"), HostEntry("you@node-c"),
    ]  # fmt: skip
    assert problems == []


def test_what_a_hostfile_has_besides_is_refused_by_line() -> None:
    problems: list[str] = []
    parse_hostfile("a slots=2 max_slots=4\nb slots=\nc\nc\n", "hosts.txt", problems)
    assert problems == [
        "--hostfile hosts.txt, line 1: 'max_slots=4' is not understood. A line is: HOST slots=N",
        "--hostfile hosts.txt, line 2: the number of ranks must be at least 1, got ''",
        "--hostfile hosts.txt: c is listed 2 times. List it once, with its ranks: c:N",
    ]
    problems.clear()
    parse_hostfile("# nobody\n", "hosts.txt", problems)
    assert problems == ["--hostfile hosts.txt: it lists no host. A line is: HOST slots=N"]
