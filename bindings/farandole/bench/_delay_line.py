"""A cable with a delay, for ``_namespaces``: two TAP interfaces, and a process that carries frames from one to the other.

For kernels that cannot delay packets themselves (no netem). Frames keep their segmentation offload, so that a TCP
stream of 1 Gbit/s is some thousands of them a second. A rate is not its business: tc's tbf on the interfaces limits it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_MOST_BYTES = 10 + 14 + 65536  # virtio_net_hdr, Ethernet header, a segment before it is cut


def open_tap(interface: str) -> int:
    """A new TAP interface of the calling thread's network namespace; it lasts as long as the file that is returned.

    Raises:
        OSError: there is no /dev/net/tun, or no right to use it.
    """
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), flags))
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    except OSError:
        os.close(tap)
        raise
    return tap


class DelayLine:
    """Carries frames between two TAP interfaces, each way with a delay, in a process of its own.

    Args:
        taps: of ``open_tap``; the process takes them over.
        seconds: the delay.
    """

    def __init__(self, taps: tuple[int, int], seconds: float) -> None:
        command = [sys.executable, "-S", __file__, *map(str, taps), str(seconds)]
        try:
            # It ends with its input, so also when this process is killed.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=taps)
        finally:
            for tap in taps:
                os.close(tap)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)


def _carry(taps: tuple[int, int], seconds: float, stop: int) -> None:
    ways: dict[int, tuple[int, deque[tuple[float, bytes]]]] = {
        taps[0]: (taps[1], deque()),
        taps[1]: (taps[0], deque()),
    }
    while True:
        dues = [frames[0][0] for _, frames in ways.values() if frames]
        wait = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready, _, _ = select.select([*taps, stop], [], [], wait)
        if stop in ready:
            return
        now = time.monotonic()
        for tap in ready:
            with contextlib.suppress(BlockingIOError):
                while True:
                    ways[tap][1].append((now + seconds, os.read(tap, _MOST_BYTES)))
        for to, frames in ways.values():
            while frames and frames[0][0] <= now:
                with contextlib.suppress(OSError):  # what an interface does not take is lost, as on any cable
                    os.write(to, frames[0][1])
                frames.popleft()


if __name__ == "__main__":
    _carry((int(sys.argv[1]), int(sys.argv[2])), float(sys.argv[3]), sys.stdin.fileno())
