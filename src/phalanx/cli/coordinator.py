"""`phalanx coordinator` runs the coordinator of a job in a process of its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import time

import click


@click.command("coordinator", short_help="Run the coordinator of a job's hosts as a separate service.")
@click.option(
    "--bind", default=":29400", show_default=True, metavar="[HOST]:PORT", help="The address; port 0: any free one."
)
@click.option("--key-file", type=click.Path(dir_okay=False), help="The file with the job's key, readable only by you.")
@click.option("--job", default="", help="The job's name; hosts of other jobs are refused.")
@click.option(
    "--lost-after", default=10.0, show_default=True, metavar="SECONDS", help="A member silent for this long is lost."
)
@click.pass_context
def command(ctx: click.Context, bind: str, key_file: str | None, job: str, lost_after: float) -> None:
    """Serve a job's keys, members and reports until Ctrl-C. Clients must have the job's key.

    `phalanx run --nnodes` starts a coordinator on the first host. Use this command for a coordinator that must survive
    every host of the job.
    """
    from phalanx.errors import CoordinationError

    try:
        _serve(bind, key_file, job, lost_after)
    except (CoordinationError, ValueError) as error:
        click.echo(error, err=True)
        ctx.exit(1)


def _serve(bind: str, key_file: str | None, job: str, lost_after_s: float) -> None:
    """Print one line with the address, then serve at `bind` until Ctrl-C or SIGTERM.

    Raises:
        AuthenticationError: there is no key, or the key may not be used.
        CoordinationError: the address cannot be bound.
        ValueError: `bind` is not an address.
    """
    from phalanx._comm.control.address import Address
    from phalanx._comm.control.key_file import ask_for_key, find_key
    from phalanx._job.coordinator.service import Service

    Address.parse(bind)
    key = find_key(key_file) or ask_for_key()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Service(bind, key, job=job, lost_after_s=lost_after_s, log=_log) as service:
        assert service.address is not None
        assert key is not None
        place = Address(_advertised_host(service.address.host), service.address.port)
        with contextlib.suppress(KeyboardInterrupt):
            _log(f"listening at {place} (key {key.fingerprint}). To join: phalanx join {place}")
            while service.problem is None:
                time.sleep(1.0)
    if service.problem is not None:
        raise service.problem
    _log("ended.")


def _log(line: str) -> None:
    click.echo(f"coordinator: {line}", err=True)


def _advertised_host(host: str) -> str:
    """Return the host to publish for a listener on `host`: this host's name if it listens on all interfaces."""
    return host if host not in ("", "*", "::", "0.0.0.0") else socket.gethostname()
