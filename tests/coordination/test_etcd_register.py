"""A witness's vote lies in a real etcd that asks for a user, a password or a certificate."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import urllib.error
from pathlib import Path

import pytest
from tests.coordination.certificates import make_certificates
from tests.coordination.etcd_server import TOKEN_S, USERS, ask, enable_users, run_etcd

from phalanx._job.hosts.succession.witness.etcd_register import EtcdLogin, EtcdRegister, find_login
from phalanx.errors import CoordinationError

NAME = "phalanx/witness/job"
FILE = "PHALANX_WITNESS_PASSWORD_FILE"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USER", "PASSWORD", "CACERT", "CERT", "KEY"):
        monkeypatch.delenv(f"ETCDCTL_{name}", raising=False)
    monkeypatch.delenv(FILE, raising=False)


def at_user(address: str, user: str) -> str:
    return address.replace("://", f"://{user}@")


def test_users_and_their_roles_are_asked_for_and_what_is_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_etcd(tmp_path) as address:
        monkeypatch.setenv("ETCDCTL_PASSWORD", USERS["train"])
        early = EtcdRegister(at_user(address, "train"))  # etcd asks for no user yet
        assert early.write(NAME, b"", b"1")
        enable_users(address)
        assert early.read(NAME) == b"1"
        assert not early.write(NAME, b"", b"2")
        with pytest.raises(CoordinationError, match=r"etcd answers 403: .*permission denied\. Give train a role that"):
            early.read("another/key")
        with pytest.raises(CoordinationError, match=r"etcd does not let root in: .*invalid user ID or password"):
            EtcdRegister(at_user(address, "root")).read(NAME)
        monkeypatch.setenv("ETCDCTL_PASSWORD", USERS["nobody"])
        with pytest.raises(CoordinationError, match=r"403: .*Give nobody a role that reads and writes the keys with"):
            EtcdRegister(at_user(address, "nobody")).write(NAME, b"1", b"2")
        monkeypatch.delenv("ETCDCTL_PASSWORD")
        with pytest.raises(CoordinationError, match="the user train of etcd has no password on this host: set ETCDCTL"):
            EtcdRegister(at_user(address, "train"))
        with pytest.raises(
            CoordinationError, match=r"\(where etcd has users: etcd://USER@HOST:PORT, with the password"
        ):
            EtcdRegister(address).read(NAME)


@pytest.mark.slow
def test_a_token_that_has_expired_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCDCTL_USER", f"train:{USERS['train']}")
    with run_etcd(tmp_path) as address:
        enable_users(address)
        url = address.replace("etcd", "http")
        register = EtcdRegister(address)
        assert register.write(NAME, b"", b"1")
        token = register._token
        while True:  # asked seldom: each use of a token keeps it for another while
            threading.Event().wait(2 * TOKEN_S + 0.5)
            with contextlib.suppress(urllib.error.HTTPError):
                ask(url, "kv/range", token=token, key="cGhhbGFueC93aXRuZXNzLw==")
                continue
            break
        assert register.write(NAME, b"1", b"2")
        assert register._token != token


def test_an_etcd_that_was_started_again_has_forgotten_the_tokens_and_the_next_call_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCDCTL_USER", f"train:{USERS['train']}")
    with run_etcd(tmp_path) as address:
        enable_users(address)
        register = EtcdRegister(address)
        assert register.write(NAME, b"", b"1")
        token = register._token
    with run_etcd(tmp_path, int(address.rpartition(":")[2])):
        assert register.write(NAME, b"1", b"2")
        assert register.read(NAME) == b"2"
        assert register._token != token


def test_etcd_by_tls_with_certificates_of_its_own_and_of_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, certificate, key = make_certificates(tmp_path, "127.0.0.1", "/O=etcd")  # etcd's gateway refuses common names
    tls = ssl.create_default_context(cafile=str(ca))
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    tls.load_cert_chain(certificate, key)
    options = [f"--cert-file={certificate}", f"--key-file={key}", f"--trusted-ca-file={ca}", "--client-cert-auth"]
    with run_etcd(tmp_path, 0, *options, tls=tls) as address:
        assert address.startswith("etcds://")
        enable_users(address, tls)
        with pytest.raises(CoordinationError, match=r"the certificate of etcd is not accepted: .*ETCDCTL_CACERT names"):
            EtcdRegister(address).read(NAME)
        monkeypatch.setenv("ETCDCTL_CACERT", str(ca))
        with pytest.raises(CoordinationError, match="etcd does not answer"):  # it asks for a certificate
            EtcdRegister(address).read(NAME)
        monkeypatch.setenv("ETCDCTL_CERT", str(certificate))
        monkeypatch.setenv("ETCDCTL_KEY", str(key))
        (tmp_path / "password").write_text(USERS["train"] + "\n")
        monkeypatch.setenv(FILE, str(tmp_path / "password"))
        register = EtcdRegister(at_user(address, "train"))
        assert register.write(NAME, b"", b"1")
        assert register.read(NAME) == b"1"
        with pytest.raises(CoordinationError, match="etcd does not answer: Remote end closed connection"):
            EtcdRegister(address.replace("etcds", "etcd")).read(NAME)  # without TLS
        monkeypatch.setenv("ETCDCTL_KEY", str(tmp_path / "no file"))
        with pytest.raises(CoordinationError, match=r"cannot be read \(ETCDCTL_CACERT=.*no file\)"):
            EtcdRegister(address)


def test_a_password_that_hangs_an_etcd_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx._job.hosts.succession.witness.etcd_register._ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        login = {"ETCDCTL_USER": "a", "ETCDCTL_PASSWORD": "b"}
        for name, value in login.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CoordinationError, match="etcd does not answer within"):
            EtcdRegister(f"etcd://127.0.0.1:{server.getsockname()[1]}").read(NAME)


@pytest.mark.parametrize(
    ("user", "variables", "found"),
    [
        ("", {}, None),
        ("", {"ETCDCTL_PASSWORD": "p"}, None),
        ("a", {"ETCDCTL_PASSWORD": "p"}, EtcdLogin("a", "p")),
        ("", {"ETCDCTL_USER": "a", "ETCDCTL_PASSWORD": "p:q"}, EtcdLogin("a", "p:q")),
        ("", {"ETCDCTL_USER": "a:p:q"}, EtcdLogin("a", "p:q")),
        ("a", {"ETCDCTL_USER": "a:p"}, EtcdLogin("a", "p")),
        ("b", {"ETCDCTL_USER": "a:p", "ETCDCTL_PASSWORD": "q"}, EtcdLogin("b", "q")),
    ],
)
def test_the_variables_are_read_as_etcdctl_reads_them(
    user: str, variables: dict[str, str], found: EtcdLogin | None
) -> None:
    assert find_login(user, variables) == found
    assert "p" not in repr(found).replace("password", "").replace("EtcdLogin", "")


def test_a_password_that_is_missing_or_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(CoordinationError, match="the user b of etcd has no password on this host"):
        find_login("b", {"ETCDCTL_USER": "a:p"})
    with pytest.raises(CoordinationError, match=f"{FILE}: the password cannot be read: .*No such file"):
        find_login("b", {FILE: str(tmp_path / "no file")})
    (tmp_path / "file").write_text("from the file\n")
    login = find_login("b", {FILE: str(tmp_path / "file"), "ETCDCTL_PASSWORD": "p"})
    assert login == EtcdLogin("b", "from the file")
