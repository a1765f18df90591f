"""The links between the "hosts" of one machine are as far and as slow as they were asked for."""

import contextlib
import socket
import threading
import time

import pytest

from farandole.bench import _namespaces
from farandole.bench._namespaces import enter_namespace
from support.hosts import Hosts

PORT = 7777
DELAY = 5e-3  # seconds, of each of the two links on the way
ROUND_TRIP = 4 * DELAY
RATE = 40e6 / 8  # bytes a second
BURST = 2**18  # what _namespaces lets each of the two links send at once
BYTES = 2 * 2**20


def _exchange(hosts: Hosts, host: int, connect) -> list[float]:
    """On a thread of its own on that host: 5 answers of a byte, then ``BYTES`` one way; the seconds that each took."""
    times = []

    def talk() -> None:
        (path,) = hosts.enter((host,)).paths
        enter_namespace(path)
        connection = connect()
        connection.settimeout(20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            for _ in range(5):
                start = time.monotonic()
                if host == 0:
                    connection.sendall(b"?")
                connection.recv(1)
                if host == 1:
                    connection.sendall(b"!")
                times.append(time.monotonic() - start)
            start = time.monotonic()
            if host == 0:
                connection.sendall(bytes(BYTES))
                connection.recv(1)
            else:
                left = BYTES
                while left > 0:
                    left -= len(connection.recv(2**20))
                connection.sendall(b"!")
            times.append(time.monotonic() - start)

    thread = threading.Thread(target=talk)
    thread.start()
    thread.join(timeout=40)
    return times


@pytest.mark.parametrize("in_kernel", [True, False])
def test_a_round_trip_takes_four_delays_and_a_stream_the_rate(in_kernel, monkeypatch):
    if not in_kernel:
        monkeypatch.setattr(_namespaces, "_has_netem", lambda space: False)
    with Hosts(2, rate="40mbit", delay=DELAY) as hosts, contextlib.ExitStack() as stack:
        if hosts.delays_itself == in_kernel:
            pytest.skip("the kernel has no netem")
        listening = threading.Event()
        served: list[list[float]] = []

        def accept() -> socket.socket:
            server = stack.enter_context(socket.create_server((hosts.address(1), PORT)))
            listening.set()
            return server.accept()[0]

        other = threading.Thread(target=lambda: served.append(_exchange(hosts, 1, accept)))
        other.start()
        assert listening.wait(10)
        *trips, stream = _exchange(hosts, 0, lambda: socket.create_connection((hosts.address(1), PORT), timeout=10))
        other.join(timeout=40)
        assert len(served) == 1
    assert ROUND_TRIP <= min(trips) < 2 * ROUND_TRIP, trips
    assert stream > (BYTES - 2 * BURST) / RATE, stream
