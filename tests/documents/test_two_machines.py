"""The tutorial on two machines, with real sshd's in two network namespaces."""

from __future__ import annotations

import re

import pytest
from tests.documents.blocks import ROOT, blocks
from tests.system.phalanx_command import start
from tests.system.sshd import ssh_hosts, why_no_sshd

pytestmark = pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd())
TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.mark.slow
def test_the_tutorials_line_trains_the_script_of_step_two_on_two_machines(tmp_path, monkeypatch):
    page = (TUTORIALS / "two-machines.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^node-a\$ phalanx (.*)$", page, re.M)
    (script,) = (block for block in blocks(TUTORIALS / "every-core.md") if block.title == "many.py")
    (tmp_path / "many.py").write_text(script.code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with ssh_hosts(2, tmp_path) as cluster:
        for name, host in zip(("node-a", "node-b"), cluster.hosts, strict=True):
            cluster.configure(f"Host {name}", f"  HostName {host.address}", "  HostKeyAlias none")
            known = cluster.folder / "known"
            known.write_text(known.read_text() + f"none {(host.folder / 'key.pub').read_text()}")
        run, *words = line.split()
        with start(run, "--ssh", cluster.ssh, *words, before=cluster.terminal.command) as running:
            ended = running.finish()
    assert ended.code == 0, ended.err
    assert "phalanx run: 2 hosts over ssh; rendezvous at 10.77.0.1 (eth0 of node-a)" in ended.err
    assert re.search(r"^\[0[^\]]*\] [\d.]+ % of the answers are right", ended.out, re.M)
