"""Bytes that go both ways over one plain TCP connection: what the path between two hosts lets through."""

from __future__ import annotations

import socket
import threading
import time

from farandole.bench._ranks import Rank
from farandole.bench._series import Sample
from farandole.bench._timing import time_each

_PORT = 7777  # of a host of its own: nobody else listens there
_SECONDS = 60.0


def exchange_often(rank: Rank, address: str, size: int, warm_up: int, count: int, samples: int) -> list[Sample]:
    """Runs on two ranks, of which the first has the address: each sends and receives ``size`` bytes."""
    if "tcp" not in rank.state:
        rank.state["tcp"] = _connect(rank, address)
    connection: socket.socket = rank.state["tcp"]
    outgoing, incoming = bytes(size), memoryview(bytearray(size))

    def operation() -> None:
        sender = threading.Thread(target=connection.sendall, args=(outgoing,))
        sender.start()
        received = 0
        while received < size:
            got = connection.recv_into(incoming[received:])
            if got == 0:
                raise RuntimeError(f"the connection ended after {received} of {size} bytes")
            received += got
        sender.join()

    for _ in range(warm_up):
        operation()
    return time_each(operation, count, samples)


def _connect(rank: Rank, address: str) -> socket.socket:
    if rank.rank == 0:
        with socket.create_server((address, _PORT)) as server:
            server.settimeout(_SECONDS)
            connection, _ = server.accept()
    else:
        connection = _dial((address, _PORT), time.monotonic() + _SECONDS)
    connection.settimeout(_SECONDS)
    return connection


def _dial(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=_SECONDS)
        except ConnectionRefusedError:  # it does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
