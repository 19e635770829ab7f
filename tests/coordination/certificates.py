"""A CA and a server's certificate for the tests, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificates(folder: Path, host: str) -> tuple[Path, Path, Path]:
    """Return a CA's certificate, a server's for this address, and that one's key, with as few extensions as old CAs."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here, which makes the certificates")
    ca, ca_key, certificate, key = (folder / name for name in ("ca.crt", "ca.key", "server.crt", "server.key"))
    request, extensions = folder / "server.csr", folder / "extensions"
    extensions.write_text(f"subjectAltName=IP:{host}\n")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extensions)
    for words in (
        ("req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-subj", "/CN=authority"),
        ("req", *curve[:-2], "-keyout", key, "-out", request, "-subj", "/CN=server"),
        ("x509", "-req", "-in", request, *signed, "-out", certificate),
    ):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
    return ca, certificate, key
