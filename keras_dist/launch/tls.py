"""TLS between the hosts of a job, around connections that speak plain HTTP.

Horovod's client in each rank knows no TLS. So the store listens at 127.0.0.1, and what
is here carries connections between the hosts: an `Exit` in the agent of each host takes
them at 127.0.0.1, and the `Entrance` on the store's host hands them to the store.

A certificate is made for each job, and no authority signs it: a host knows it because
ssh has brought its digest, or because the first host proves that who has made it knows
the job's secret.
"""

import hmac
import socket
import ssl
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_dist.launch.hosts import LOOPBACK
from keras_dist.launch.relays import Entrance, context_of, digest_of, with_tls
from keras_dist.launch.rendezvous import Store, derived, variables_of

# What the first host answers to who asks for it: the proof of its certificate.
PATH = "certificate"

_BYTES = 1 << 16

_OPENSSL = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "3650"),
    *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=keras_dist"),
    *("-keyout", "key", "-out", "certificate"),
)


@dataclass(frozen=True)
class Certificate:
    """The certificate of a job, on the host that has its key.

    Args:
        digest: SHA-256 of it, in hexadecimal.
        context: Settings of connections that show it.
    """

    digest: str
    context: ssl.SSLContext


def make_certificate() -> Certificate:
    """A new certificate and its key, which is in the memory of this process alone.

    Raises:
        ValueError: If there is no `openssl`, or it fails.
    """
    with tempfile.TemporaryDirectory(prefix="keras_dist.") as folder:  # mode 0700
        try:
            subprocess.run(_OPENSSL, cwd=folder, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                "`--tls` needs the command `openssl` on the host with the job's store. "
                f"Received: {error}. On Debian or Ubuntu: apt-get install openssl"
            ) from error
        context = context_of(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        path = Path(folder)
        context.load_cert_chain(path / "certificate", path / "key")
        text = (path / "certificate").read_text()
    return Certificate(digest_of(ssl.PEM_cert_to_DER_cert(text)), context)


def proof_of(digest: str, secret: str) -> bytes:
    """What the first host answers at `PATH` if this is its certificate."""
    return derived(secret, f"certificate {digest}").encode()


def digest_at(link: socket.socket, secret: str) -> str:
    """Digest of the certificate at the other end, if who shows it knows the secret.

    Args:
        link: A connection to the first host, which is used up.
        secret: Secret of the job.

    Raises:
        OSError: If there is no TLS.
        PermissionError: If the first host has another secret, or somebody else answers.
    """
    with with_tls(link) as tls:
        digest = digest_of(tls.getpeercert(binary_form=True))
        tls.sendall(f"GET /{PATH} HTTP/1.0\r\n\r\n".encode())
        answer = b""
        while (data := tls.recv(_BYTES)) and len(answer) < _BYTES:
            answer += data
    head, _, proof = answer.partition(b"\r\n\r\n")
    if b" 200" not in head.partition(b"\r\n")[0]:
        raise ConnectionError("no store answers there")
    if not hmac.compare_digest(proof, proof_of(digest, secret)):
        raise PermissionError("the certificate is not that of a host with this secret")
    return digest


class TlsStore(Store):
    """A store that other hosts reach by TLS, and this one at 127.0.0.1.

    Args:
        address: Address at which the other hosts reach it.
        port: Port there; 0 for one that the system chooses.
        secret: Secret of the job, by which it proves that the certificate is its own;
            `None` where the other hosts know it.

    Raises:
        OSError: If it cannot listen there.
        ValueError: If no certificate can be made.
    """

    def __init__(self, address: str, port: int = 0, secret: str | None = None) -> None:
        self._entrance = Entrance(address, port)  # first: it may not be its address
        certificate = make_certificate()
        self.digest = certificate.digest
        super().__init__(LOOPBACK)
        self._near, self.port = self.port, self._entrance.port
        if secret is not None:
            self.publish(PATH, lambda: proof_of(self.digest, secret))
        self._entrance.open(certificate.context, self._near)

    def variables(self, secret: str) -> dict[str, str]:
        """As of `Store`, for the ranks of this host alone."""
        return variables_of(LOOPBACK, self._near, secret)

    @property
    def tls(self) -> dict[str, Any]:
        """What the agent of another host has to know, as of `Assignment`."""
        return {"port": self.port, "digest": self.digest}

    def close(self) -> None:
        """End the server."""
        self._entrance.close()
        super().close()
