"""The tutorial on two hosts, and the line of docker/compose.yaml, in two network namespaces."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import yaml
from tests.documents.blocks import ROOT, blocks
from tests.system.phalanx_command import start

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
TUTORIALS = ROOT / "docs" / "tutorials"


def lines_of(host: str) -> list[str]:
    """What the page types on this host."""
    page = (TUTORIALS / "two-hosts.md").read_text(encoding="utf-8")
    return re.findall(rf"^{host}\$ phalanx (.*)$", page, re.M)


@pytest.mark.slow
def test_the_tutorials_lines_train_the_script_of_step_two_on_two_hosts(tmp_path):
    (script,) = (block for block in blocks(TUTORIALS / "every-core.md") if block.title == "many.py")
    (tmp_path / "many.py").write_text(script.code, encoding="utf-8")
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PHALANX_KEY": "", "PHALANX_KEY_FILE": ""}
    environ = {name: value for name, value in environ.items() if value}
    key, run = lines_of("node-a")
    (join,) = lines_of("node-b")
    assert join.startswith("join ")
    with hosts(2) as (first, second), start(*key.split(), env=environ) as made:
        assert "A new key is in" in made.finish().out
        words = [str(tmp_path / word) if word == "many.py" else word for word in run.split()]
        with start(*words, env=environ, before=first.command, stderr=subprocess.STDOUT) as one:
            typed = one.read_until("phalanx join ").rpartition("phalanx join ")[2].split()[0]
            with start("join", typed, env=environ, before=second.command, stderr=subprocess.STDOUT) as two:
                ended, other = one.finish(), two.finish()
    assert (ended.code, other.code) == (0, 0), ended.out + other.out
    assert "2 hosts: " in ended.out
    assert re.search(r"^\[0[^\]]*\] [\d.]+ % of the answers are right", ended.out, re.M)


@pytest.mark.slow
def test_the_line_of_the_compose_file_is_one_job_of_two_hosts(tmp_path):
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    lines = {services[name]["command"] for name in ("host-a", "host-b")}
    assert len(lines) == 1, "both hosts type the same"
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    assert "/home/worker/.config/phalanx" in str(services["host-a"]["volumes"]), "where a key is looked for"
    with hosts(2) as machines, start("key", env=environ) as made:
        made.finish()
        line = lines.pop().replace("host-a", machines[0].address)
        words = [word.replace("/examples", str(ROOT / "examples")) for word in line.split()]
        words[words.index("--steps") + 1] = "5"
        jobs = [start(*words, env=environ, before=machine.command, stderr=subprocess.STDOUT) for machine in machines]
        with jobs[0] as one, jobs[1] as two:
            ended, other = one.finish(), two.finish()
    assert (ended.code, other.code) == (0, 0), ended.out + other.out
    assert "2 hosts: " in ended.out


def test_the_image_installs_what_the_package_needs_and_no_more():
    """It copies what the build reads: the paths that setup.py and pyproject.toml name."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for word in line.split()}
    assert copied == {"pyproject.toml", "setup.py", "README.md", "LICENSE", "csrc", "src"}
    assert all(os.path.exists(ROOT / path) for path in copied)
