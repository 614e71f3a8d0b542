import socket

import pytest

from tensorline.cli.failure import CommandError
from tensorline.cli.ports import Listener, check_free, free_port


def test_a_free_port_passes_and_stays_free() -> None:
    listener = Listener("HTTP", "127.0.0.1", free_port(), "--http")
    check_free([listener])
    check_free([listener])


def test_a_taken_port_is_refused_also_when_its_holder_would_share_it() -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            CommandError, match=f"port {port} on 127.0.0.1 is taken; give gRPC another one with --grpc-port"
        ):
            check_free([Listener("gRPC", "127.0.0.1", port, "--grpc")])


def test_a_port_whose_connections_have_just_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        port = server.getsockname()[1]
        peer, _ = server.accept()
        peer.close()  # the server's side closes first: TIME_WAIT stays on its port
        assert client.recv(1) == b""
    check_free([Listener("HTTP", "127.0.0.1", port, "--http")])


@pytest.mark.parametrize(("one", "other"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_two_on_one_port_are_refused(one: str, other: str) -> None:
    port = free_port()
    with pytest.raises(CommandError, match=f"gRPC and HTTP are both given port {port}; change --http-port"):
        check_free([Listener("gRPC", one, port, "--grpc"), Listener("HTTP", other, port, "--http")])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        CommandError, match=r"metrics cannot listen on '192\.0\.2\.1' .*change it with --metrics-address"
    ):
        check_free([Listener("metrics", "192.0.2.1", 8002, "--metrics")])


@pytest.mark.parametrize(
    ("address", "target"),
    [("127.0.0.1", "127.0.0.1:80"), ("0.0.0.0", "127.0.0.1:80"), ("::", "[::1]:80"), ("[::1]", "[::1]:80")],
)
def test_where_this_machine_reaches_it(address: str, target: str) -> None:
    assert Listener("HTTP", address, 80, "--http").target == target
