"""The TCP ports of a mesh, looked at before anything is started."""

import errno
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tensorline.cli.failure import CommandError

__all__ = ["Listener", "check_free", "free_port"]

WILDCARDS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}  # noqa: S104 - to tell, not to bind


@dataclass(frozen=True, slots=True)
class Listener:
    """A port that a process will open, and the flags that move it."""

    what: str
    address: str
    port: int
    flag: str
    """Its name without "-port" and "-address": "--grpc"."""

    @property
    def target(self) -> str:
        """host:port under which this machine reaches it."""
        host = WILDCARDS.get(self.address, self.address).strip("[]")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


ANY = Listener("a free port", "127.0.0.1", 0, "--grpc")


def check_free(listeners: Iterable[Listener]) -> None:
    """
    Raises:
        CommandError: two ask for the same port, or one cannot be opened; with the flag to change.
    """
    seen: dict[int, Listener] = {}
    for listener in listeners:
        other = seen.setdefault(listener.port, listener)
        is_both = other.address == listener.address or other.address in WILDCARDS or listener.address in WILDCARDS
        if other is not listener and is_both:
            raise CommandError(
                f"{other.what} and {listener.what} are both given port {listener.port}; change {listener.flag}-port"
            )
        _probe(listener)


def free_port(listener: Listener = ANY) -> int:
    """A port that nobody holds at this moment, on the listener's address.

    Raises:
        CommandError: the address is none of this machine's.
    """
    return _probe(replace(listener, port=0))


def _probe(listener: Listener) -> int:
    """Listen for an instant: the port."""
    where = f"port {listener.port} on {listener.address or 'all addresses'}"
    try:
        with socket.socket(_family(listener.address)) as probe:
            # As servers do: passes over what a closed connection left, and still refuses a port that is listened on.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((listener.address.strip("[]"), listener.port))
            probe.listen(1)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(
                f"{where} is taken; give {listener.what} another one with {listener.flag}-port"
            ) from None
        if error.errno == errno.EACCES:
            raise CommandError(
                f"{where} may not be opened by this user; give {listener.what} another one with {listener.flag}-port"
            ) from None
        raise CommandError(
            f"{listener.what} cannot listen on {listener.address!r} ({error.strerror or error}); "
            f"change it with {listener.flag}-address"
        ) from None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
