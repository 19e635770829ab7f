"""The problems of all hosts in one table, and the address at which they meet."""

from __future__ import annotations

from dataclasses import replace

import pytest

import phalanx
from phalanx._job.ssh.check import Problem, choose_address, explain_ssh, find_problems, format_table
from phalanx._job.ssh.facts import Facts

GOOD = Facts(phalanx.__version__, "3.12.1", "2.13.0", "machine-0", "digest")


def judge(**facts: Facts) -> list[tuple[str, str]]:
    machines = {name: replace(own, machine=f"{own.machine}-{name}") for name, own in facts.items()}
    return [(problem.host, problem.what) for problem in find_problems(machines, "/work")]


def test_hosts_that_are_alike_have_no_problem() -> None:
    assert judge(a=GOOD, b=replace(GOOD, python="3.12.7"), c=GOOD) == []
    assert judge(a=replace(GOOD, torch="", script=""), b=replace(GOOD, torch="", script="")) == []


def test_the_host_that_differs_is_the_one_that_is_named() -> None:
    assert judge(a=GOOD, b=replace(GOOD, torch="2.14.0")) == [("b", "it has torch 2.14.0, and other hosts have 2.13.0")]
    assert judge(a=replace(GOOD, torch="2.14.0"), b=GOOD, c=GOOD) == [
        ("a", "it has torch 2.14.0, and other hosts have 2.13.0")
    ]
    assert judge(a=GOOD, b=replace(GOOD, python="3.13.0")) == [("b", "it has Python 3.13.0, and other hosts have 3.12")]
    assert judge(a=GOOD, b=replace(GOOD, phalanx="0.0.1", torch="x")) == [
        ("b", f"it has Phalanx 0.0.1, but the version here is {phalanx.__version__}")
    ]
    assert judge(a=GOOD, b=replace(GOOD, script="other")) == [("b", "its script is not the same as on a")]


def test_one_machine_under_two_names_is_recognized() -> None:
    assert find_problems({"a": GOOD, "b": GOOD}, "/work") == [
        Problem("b", "it is the same machine as a", "List it once: a:N")
    ]


def test_a_problem_of_the_host_itself_comes_without_advice_to_copy_the_script() -> None:
    bad = replace(GOOD, machine="other", problem="this host has no GPU")
    assert find_problems({"a": GOOD, "b": bad}, "/work") == [Problem("b", "this host has no GPU")]


def test_a_missing_folder_comes_with_the_line_that_copies_it() -> None:
    problem = "the folder /my work cannot be entered: No such file or directory"
    bad = replace(GOOD, machine="other", problem=problem, script="", has_folder=False)
    assert find_problems({"a": GOOD, "b": bad}, "/my work") == [
        Problem("b", problem, "Copy it: rsync -a '/my work'/ b:'/my work'/   Or name another folder: --remote-dir.")
    ]


@pytest.mark.parametrize(
    ("words", "what", "advice"),
    [
        ("@ REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "has changed", "ssh-keygen -R"),
        ("Host key verification failed.", "ssh does not know its host key", "Type ssh a once"),
        ("you@a: Permission denied (publickey,password).", "needs a password", "ssh-copy-id a"),
        ("ssh: Could not resolve hostname a: Name or service not known", "its name does not resolve", "Correct"),
        ("ssh: connect to host a port 22: Connection refused", "no sshd answers there", "Start sshd"),
        ("ssh: connect to host a port 22: Connection timed out", "it does not answer", "Does ssh a work?"),
        ("/usr/bin/python3: No module named phalanx", "Phalanx is not installed for /py there", "--remote-python"),
        ("phalanx: /py: not found on this host. Name the Python", "/py is missing there", "--remote-python"),
        ("kex_exchange_identification: something new", "kex_exchange_identification: something new", "ssh a true"),
    ],
)  # fmt: skip
def test_what_ssh_says_becomes_advice(words: str, what: str, advice: str) -> None:
    problem = explain_ssh("a", f"a banner\n{words}", 255, "/py")
    assert what in problem.what
    assert advice in problem.advice


def test_a_host_that_is_silent_does_not_answer() -> None:
    assert explain_ssh("a", "", None, "/py").what == "it does not answer"
    assert explain_ssh("a", "", 254, "/py").what == "the connection ended, with exit code 254"


def test_the_fastest_address_that_all_have_reached_is_chosen() -> None:
    candidates = [("10.0.0.1", "mgmt", 100), ("10.1.0.1", "eth0", 10000), ("10.2.0.1", "ib0", 200000)]
    far = {0: "", 1: "", 2: "no answer"}
    assert choose_address(candidates, {"b": {0: "", 1: "", 2: ""}, "c": far}, "a", 4000) == (1, [])
    assert choose_address(candidates, {}, "a", 4000) == (2, [])
    chosen, (problem,) = choose_address(candidates, {"b": {0: "", 1: "", 2: ""}, "c": {}}, "a", 4000)
    assert (chosen, problem.host) == (-1, "c"), "it was started at the last address that nobody had tried"
    assert choose_address([("x", "e", 0), ("y", "e", 0)], {"b": {0: "", 1: ""}}, "a", 1) == (0, [])


def test_where_no_address_is_reached_by_all_each_host_says_what_it_has_tried() -> None:
    reached = {"b": {0: "", 1: "no answer"}, "c": {0: "Connection refused", 1: ""}}
    chosen, problems = choose_address([("10.0.0.1", "e", 0), ("fd77::1", "e", 0)], reached, "a", 4000)
    assert chosen == -1
    assert [(problem.host, problem.what) for problem in problems] == [
        ("b", "it does not reach a: [fd77::1]:4000: no answer"),
        ("c", "it does not reach a: 10.0.0.1:4000: Connection refused"),
    ]
    assert "--master-addr" in problems[0].advice


def test_the_table_has_each_host_with_its_problems_and_the_advice_below() -> None:
    problems = [Problem("a", "one\ntwo", "Do this."), Problem("long-name", "three")]
    assert format_table(problems, 3) == (
        "phalanx run: nothing was started: 2 of 3 hosts cannot run this job\n"
        "  a          one\n"
        "             two\n"
        "             Do this.\n"
        "  long-name  three"
    )
