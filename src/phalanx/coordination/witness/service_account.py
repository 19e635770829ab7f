"""A `ServiceAccount` is as what a pod calls the API of its Kubernetes: Kubernetes puts the files there itself."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.coordination.witness.json_service import make_tls
from phalanx.errors import CoordinationError

_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class ServiceAccount:
    """A `ServiceAccount` has the place of the API and the files of this pod's account."""

    host: str
    port: int
    folder: Path

    @classmethod
    def find(cls, variables: Mapping[str, str]) -> ServiceAccount:
        """Return the account of this pod.

        Raises:
            CoordinationError: this process runs in no pod.
        """
        host, port = variables.get("KUBERNETES_SERVICE_HOST", ""), variables.get("KUBERNETES_SERVICE_PORT", "")
        if not host or not port.isdecimal():
            raise CoordinationError(
                "this host is no pod of Kubernetes (KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set), "
                "and only pods ask for a Lease"
            )
        return cls(host, int(port), _FOLDER)

    @property
    def namespace(self) -> str:
        """Return the pod's own namespace."""
        return self._read("namespace")

    @property
    def token(self) -> str:
        """Return the token as it is now; Kubernetes writes another one before it expires."""
        return self._read("token")

    def tls(self) -> ssl.SSLContext:
        """Return a context that trusts the CA of the cluster.

        Raises:
            CoordinationError: its certificate cannot be read.
        """
        try:
            return make_tls(str(self.folder / "ca.crt"))
        except OSError as error:  # ssl.SSLError is one
            raise self._explain("ca.crt", error) from None

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise self._explain(name, error) from None

    def _explain(self, name: str, error: Exception) -> CoordinationError:
        return CoordinationError(
            f"{self.folder / name} cannot be read: {error}. A pod has it unless automountServiceAccountToken is false"
        )
