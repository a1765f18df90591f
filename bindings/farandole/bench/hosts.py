"""all_reduce between hosts: network namespaces of this machine, joined by veth and a bridge.

Between two hosts with a rank each, beside gloo and a plain TCP connection, on which both sides send as many bytes
at once; what it has under way is more than the way holds, which some congestion control (BBR) answers with a pace of
its own. Between two hosts with two ranks each, by the table's own choice (hierarchical: in the memory of each host
first) and by the algorithms that do not know of hosts. And over links of 1 Gbit/s with 1 ms from host to host:
there the bytes that each host has to send, once the size, go at best at the rate of the link, headers and all; the
plain connection is beside it, too.

It needs the right to make network namespaces, and is skipped without. Where the kernel cannot delay packets (no netem)
processes do, which take some of the machine's time; the table says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from farandole.bench._namespaces import INTERFACE, Hosts, NoHostsError
from farandole.bench._peers import SAMPLES, Peer, measure_peers, on_ranks, usual_count
from farandole.bench._ranks import RankPair, Ranks
from farandole.bench._series import Report, Series, Skipped, Target, ratio, size_name
from farandole.bench._settings import Settings
from farandole.bench._tcp import exchange_often
from farandole.bench.all_reduce import reduce_often

_ONE_EACH = (0, 1)
_TWO_EACH = (0, 0, 1, 1)
_FAST_SIZE = 16 * 2**20
_TCP = "TCP, both ways"
_SLOW_SIZE = 64 * 2**20
_RATE = "1gbit"
_RATE_BYTES = 125e6  # per second
_DELAY = 500e-6  # seconds, of each of the two links on the way
_GLOO = {"GLOO_SOCKET_IFNAME": INTERFACE}  # gloo looks up its own name, which no resolver knows


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("hosts", "all_reduce between hosts (network namespaces), float32, Python")
    try:
        with Hosts(2) as hosts:
            _measure_one_each(report, settings, hosts)
            _measure_two_each(report, settings, hosts)
    except NoHostsError as error:
        raise Skipped(str(error)) from error
    try:
        with Hosts(2, rate=_RATE, delay=_DELAY) as hosts:
            _measure_slow_link(report, settings, hosts)
    except NoHostsError as error:
        report.notes.append(f"The slow link is left out: {error}")
    return report


def _measure_one_each(report: Report, settings: Settings, hosts: Hosts) -> None:
    with _ranks(hosts, _ONE_EACH) as ranks:
        peers = {backend: on_ranks(ranks, reduce_often, backend=backend) for backend in ("farandole", "gloo")}
        peers[_TCP] = on_ranks(ranks, exchange_often, address=hosts.address(0))
        series = _measure(report, settings, peers, _FAST_SIZE, "2 hosts, {}")
    above_gloo = ratio("gloo / farandole", series["gloo"], series["farandole"])
    of_tcp = ratio(f"{_TCP} / farandole", series[_TCP], series["farandole"])
    report.ratios += [above_gloo, ratio(f"gloo / {_TCP}", series["gloo"], series[_TCP]), of_tcp]
    name = f"all_reduce of {size_name(_FAST_SIZE)} between 2 hosts"
    report.targets.append(Target(f"{name}, times faster than gloo", above_gloo.median(), 1.5, at_most=False))
    report.targets.append(Target(f"{name}, of the speed of {_TCP}", of_tcp.median(), 0.9, at_most=False, unit="share"))


def _measure_two_each(report: Report, settings: Settings, hosts: Hosts) -> None:
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(_ranks(hosts, _TWO_EACH))
        peers = {backend: on_ranks(ranks, reduce_often, backend=backend) for backend in ("farandole", "gloo")}
        for algorithm in ("direct", "flat"):
            others = stack.enter_context(_ranks(hosts, _TWO_EACH, algorithm))
            peers[algorithm] = on_ranks(others, reduce_often, backend="farandole")
        series = _measure(report, settings, peers, _FAST_SIZE, "2 hosts x 2 ranks, {}")
    ours = series["farandole"]
    above = {peer: ratio(f"{peer} / farandole", series[peer], ours) for peer in ("gloo", "direct", "flat")}
    report.ratios += above.values()
    for peer in ("direct", "flat"):
        name = f"all_reduce of {size_name(_FAST_SIZE)} over 2 hosts x 2 ranks, hierarchical, times faster than {peer}"
        report.targets.append(Target(name, above[peer].median(), 1.0, at_most=False))


def _measure_slow_link(report: Report, settings: Settings, hosts: Hosts) -> None:
    with _ranks(hosts, _ONE_EACH) as ranks:
        peers = {backend: on_ranks(ranks, reduce_often, backend=backend) for backend in ("farandole", "gloo")}
        peers[_TCP] = on_ranks(ranks, exchange_often, address=hosts.address(0))
        case = "2 hosts, 1 Gbit/s + 1 ms, {}"
        series = _measure(report, settings, peers, _SLOW_SIZE, case, count=lambda size: 2, samples=1)
    if hosts.delays_itself:
        report.notes.append("This kernel has no netem: processes delay the packets of the slow link.")
    report.ratios.append(ratio("gloo / farandole", series["gloo"], series["farandole"]))
    shares = {peer: _SLOW_SIZE / _RATE_BYTES / one.median() for peer, one in series.items()}
    report.notes.append(
        f"Of the 1 Gbit/s, {size_name(_SLOW_SIZE)} used: "
        + ", ".join(f"{100 * share:.1f} % ({peer})" for peer, share in shares.items())
    )
    name = f"{series['farandole'].case}: of the link's rate"
    report.targets.append(Target(name, shares["farandole"], 0.9, at_most=False, unit="share"))


def _measure(
    report: Report,
    settings: Settings,
    peers: dict[str, Peer],
    size: int,
    case: str,
    count: Callable[[int], int] = usual_count,
    samples: int = SAMPLES,
) -> dict[str, Series]:
    return measure_peers(report, settings, peers, [size], case=case, count=count, samples=samples)[size]


def _ranks(hosts: Hosts, host_of_rank: Sequence[int], algorithm: str | None = None) -> Ranks:
    backends = ("farandole", "gloo") if algorithm is None else ("farandole",)
    environment = _GLOO if algorithm is None else {"FARANDOLE_ALGORITHMS": f"all_reduce={algorithm}"}
    return Ranks(len(host_of_rank), backends, environment, hosts.enter(host_of_rank))
