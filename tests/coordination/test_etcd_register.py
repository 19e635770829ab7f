"""A witness's vote lies in a real etcd that asks for a certificate."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
from tests.coordination.certificates import make_certificates
from tests.coordination.etcd_server import ask, run_etcd

from phalanx._job.hosts.succession.witness.etcd_register import EtcdRegister
from phalanx.errors import CoordinationError

NAME = "phalanx/witness/job"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACERT", "CERT", "KEY"):
        monkeypatch.delenv(f"ETCDCTL_{name}", raising=False)


def test_an_etcd_that_asks_for_a_user_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    with run_etcd(tmp_path) as address:
        url = address.replace("etcd", "http", 1)
        ask(url, "auth/user/add", name="root", password="secret")
        ask(url, "auth/role/add", name="root")
        ask(url, "auth/user/grant", user="root", role="root")
        ask(url, "auth/enable")
        with pytest.raises(CoordinationError, match=r"etcd answers 400: .*use etcd client certificates"):
            EtcdRegister(address).read(NAME)


def test_etcd_by_tls_with_certificates_of_its_own_and_of_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, certificate, key = make_certificates(tmp_path, "127.0.0.1")
    tls = ssl.create_default_context(cafile=str(ca))
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    tls.load_cert_chain(certificate, key)
    options = [f"--cert-file={certificate}", f"--key-file={key}", f"--trusted-ca-file={ca}", "--client-cert-auth"]
    with run_etcd(tmp_path, 0, *options, tls=tls) as address:
        assert address.startswith("etcds://")
        with pytest.raises(CoordinationError, match=r"the certificate of etcd is not accepted: .*ETCDCTL_CACERT names"):
            EtcdRegister(address).read(NAME)
        monkeypatch.setenv("ETCDCTL_CACERT", str(ca))
        with pytest.raises(CoordinationError, match="etcd does not answer"):  # it asks for a certificate
            EtcdRegister(address).read(NAME)
        monkeypatch.setenv("ETCDCTL_CERT", str(certificate))
        monkeypatch.setenv("ETCDCTL_KEY", str(key))
        register = EtcdRegister(address)
        assert register.write(NAME, b"", b"1")
        assert register.read(NAME) == b"1"
        # The server closes the connection; a reset follows if it has not read all of the request by then.
        with pytest.raises(CoordinationError, match=r"etcd does not answer: .*(closed connection|reset by peer)"):
            EtcdRegister(address.replace("etcds", "etcd")).read(NAME)  # without TLS
        monkeypatch.setenv("ETCDCTL_KEY", str(tmp_path / "no file"))
        with pytest.raises(CoordinationError, match=r"cannot be read \(ETCDCTL_CACERT=.*no file\)"):
            EtcdRegister(address)


def test_an_etcd_that_does_not_answer_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx._job.hosts.succession.witness.etcd_register._ANSWER_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(CoordinationError, match="etcd does not answer within"),
    ):
        EtcdRegister(f"etcd://127.0.0.1:{server.getsockname()[1]}").read(NAME)
