"""Several "hosts" on one machine, for tests and benchmarks: network namespaces on one Ethernet.

Nothing has to be cleaned up, even when the program is killed: the namespaces have no names, they live as long as a
process is in them or the program holds them open, and the interfaces end with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farandole.bench._delay_line import DelayLine, open_tap

INTERFACE = "eth0"  # of every host, beside its loopback

_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000


class NoHostsError(RuntimeError):
    """The machine cannot have such hosts; the message says what it lacks."""


class Hosts(contextlib.AbstractContextManager["Hosts"]):
    """Hosts 0 to ``count - 1``, each with the address ``10.77.0.(i + 1)`` on ``eth0``, plugged into one switch.

    Args:
        count: number of hosts.
        rate: of each link and in each direction, as tc writes it ("1gbit"); None: as fast as the machine.
        delay: of each link and in each direction, in seconds.

    Raises:
        NoHostsError: the machine lacks something that is asked for.
    """

    def __init__(self, count: int, rate: str | None = None, delay: float | None = None) -> None:
        self._spaces: list[int] = []  # open files; the last one is the switch's
        self._delay_lines: list[DelayLine] = []
        try:
            for _ in range(count + 1):
                self._spaces.append(_new_network_namespace())
            self._wire(count, rate, delay)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the hosts; they end with the processes that are in them."""
        while self._delay_lines:
            self._delay_lines.pop().close()
        while self._spaces:
            os.close(self._spaces.pop())

    @property
    def delays_itself(self) -> bool:
        """The delay is that of processes of this module, not of the kernel."""
        return len(self._delay_lines) > 0

    @property
    def count(self) -> int:
        return len(self._spaces) - 1

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def enter(self, host_of_rank: Sequence[int]) -> EnterHost:
        """To be called with its rank in each rank's process: rank ``r`` runs on host ``host_of_rank[r]``."""
        paths = [f"/proc/{os.getpid()}/fd/{self._spaces[host]}" for host in host_of_rank]
        return EnterHost(tuple(host_of_rank), tuple(paths))

    def run(self, host: int, *command: str) -> str:
        """Runs a command on a host and returns what it prints."""
        return _run_in(self._spaces[host], *command)

    def command(self, host: int, *command: str) -> list[str]:
        """What to start for a process on a host; its host name stays the machine's."""
        return _command_in(self._spaces[host], *command)

    def unplug(self, host: int) -> None:
        """Takes the host's own interface down."""
        self.run(host, "ip", "link", "set", INTERFACE, "down")

    def replug(self, host: int) -> None:
        self.run(host, "ip", "link", "set", INTERFACE, "up")

    def cut(self, host: int) -> None:
        """The switch drops what comes from and goes to the host, whose own link stays up: nobody is told."""
        _run_in(self._spaces[-1], "ip", "link", "set", _port(host), "nomaster")

    def mend(self, host: int) -> None:
        _run_in(self._spaces[-1], "ip", "link", "set", _port(host), "master", "switch")

    def _wire(self, count: int, rate: str | None, delay: float | None) -> None:
        switch = self._spaces[-1]
        try:
            _run_in(switch, "ip", "link", "add", "switch", "type", "bridge")
            _run_in(switch, "ip", "link", "set", "switch", "up")
            has_netem = delay is not None and _has_netem(switch)
            for host in range(count):
                space = self._spaces[host]
                if delay is None or has_netem:
                    fd = f"/proc/{os.getpid()}/fd/{space}"
                    _run_in(switch, "ip", "link", "add", _port(host), "type", "veth", "peer", INTERFACE, "netns", fd)
                else:
                    self._delay_lines.append(_far_link((space, INTERFACE), (switch, _port(host)), delay))
                _run_in(switch, "ip", "link", "set", _port(host), "master", "switch", "up")
                _run_in(space, "ip", "link", "set", "lo", "up")
                _run_in(space, "ip", "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
                _run_in(space, "ip", "link", "set", INTERFACE, "up")
                for side, interface in ((space, INTERFACE), (switch, _port(host))):
                    _shape(side, interface, rate, delay if has_netem else None)
        except (OSError, subprocess.CalledProcessError) as error:
            text = f"hosts need iproute2, and veth, bridge, tbf, and netem or tun in the kernel: {_reason(error)}"
            raise NoHostsError(text) from error


@dataclass(frozen=True)
class EnterHost:
    """Moves a rank's process, before it does anything else, to its host."""

    hosts: tuple[int, ...]
    paths: tuple[str, ...]

    def __call__(self, rank: int) -> None:
        enter_namespace(self.paths[rank])
        _check(_libc.unshare(_CLONE_NEWUTS), "unshare(CLONE_NEWUTS)")
        name = f"host-{self.hosts[rank]}".encode()  # what errors name
        _check(_libc.sethostname(name, len(name)), "sethostname")


def enter_namespace(path: str) -> None:
    """Moves the calling thread, and the threads that it starts, to a network namespace."""
    space = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(space, _CLONE_NEWNET), f"setns({path})")
    finally:
        os.close(space)


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _on_a_thread(do: Callable[[], int]) -> int:
    """What it does to the thread's namespaces leaves this process where it is."""
    results: list[int | OSError] = []

    def run() -> None:
        try:
            results.append(do())
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, OSError):
        raise result
    return result


def _new_network_namespace() -> int:
    """A file that keeps it alive."""

    def make() -> int:
        _check(_libc.unshare(_CLONE_NEWNET), "unshare(CLONE_NEWNET)")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    try:
        return _on_a_thread(make)
    except OSError as error:
        raise NoHostsError(f"hosts need the right to make network namespaces (CAP_SYS_ADMIN): {error}") from error


def _open_tap_in(space: int, interface: str) -> int:
    def make() -> int:
        enter_namespace(f"/proc/{os.getpid()}/fd/{space}")
        return open_tap(interface)

    return _on_a_thread(make)


def _far_link(one: tuple[int, str], other: tuple[int, str], delay: float) -> DelayLine:
    """Between two interfaces that it makes, each given as namespace and name."""
    tap = _open_tap_in(*one)
    try:
        other_tap = _open_tap_in(*other)
    except OSError:
        os.close(tap)
        raise
    return DelayLine((tap, other_tap), delay)


def _command_in(space: int, *command: str) -> list[str]:
    return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{space}", *command]


def _run_in(space: int, *command: str) -> str:
    return subprocess.run(_command_in(space, *command), check=True, capture_output=True, text=True, timeout=10).stdout


def _has_netem(space: int) -> bool:
    try:
        _run_in(space, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us")
    except subprocess.CalledProcessError:
        return False
    _run_in(space, "tc", "qdisc", "del", "dev", "lo", "root")
    return True


def _shape(space: int, interface: str, rate: str | None, delay: float | None) -> None:
    if rate is not None:
        tail = ("burst", "256kb", "latency", "50ms")
        _run_in(space, "tc", "qdisc", "add", "dev", interface, "root", "handle", "1:", "tbf", "rate", rate, *tail)
    if delay is not None:
        place = ("parent", "1:1") if rate is not None else ("root",)
        tail = ("limit", "10000", "delay", f"{delay * 1e6:.0f}us")
        _run_in(space, "tc", "qdisc", "add", "dev", interface, *place, "netem", *tail)


def _port(host: int) -> str:
    return f"port{host}"


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"'{' '.join(error.cmd[2:])}' says: {error.stderr.strip()}"
    return str(error)
