"""The command line: ``python -m farandole.bench``."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from farandole.bench import (
    _machine,
    _output,
    actions,
    all_reduce,
    batch,
    beside_bucket,
    collectives,
    cuda,
    data_parallel,
    hosts,
    megatron,
    overlap,
    oversubscribed,
    pipeline,
    point_to_point,
    predicted,
    schedules,
    sparse,
)
from farandole.bench._ranks import RankPair, transport
from farandole.bench._series import Report, Skipped
from farandole.bench._settings import Settings, built_programs

SUBJECTS: dict[str, Callable[[Settings, RankPair], Report]] = {
    "point_to_point": point_to_point.measure,
    "batch": batch.measure,
    "all_reduce": all_reduce.measure,
    "pipeline": pipeline.measure,
    "overlap": overlap.measure,
    "beside_bucket": beside_bucket.measure,
    "collectives": collectives.measure,
    "oversubscribed": oversubscribed.measure,
    "hosts": hosts.measure,
    "schedules": schedules.measure,
    "actions": actions.measure,
    "predicted": predicted.measure,
    "megatron": megatron.measure,
    "data_parallel": data_parallel.measure,
    "sparse": sparse.measure,
    "cuda": cuda.measure,
}
# They take minutes, or a set-up of their own.
_ONLY_WHEN_ASKED_FOR = (
    "collectives",
    "oversubscribed",
    "hosts",
    "schedules",
    "actions",
    "predicted",
    "megatron",
    "data_parallel",
    "sparse",
    "cuda",
)
_WIDTH = 160  # of the tables when they do not go to a terminal


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev bench", description="Measures farandole beside its peers, all in one invocation."
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: does it run, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to this file")
    parser.add_argument(
        "--only", action="append", choices=list(SUBJECTS), help="this subject alone (may be given again)"
    )
    parser.add_argument(
        "--all", action="store_true", help=f"also what has to be asked for: {', '.join(_ONLY_WHEN_ASKED_FOR)}"
    )
    parser.add_argument(
        "--mpi", type=Path, metavar="PREFIX", help="environment with Intel MPI, to measure collectives beside"
    )
    parser.add_argument("--rounds", type=int, help="turns of every peer (default: 9, with --quick 5)")
    parser.add_argument(
        "--programs", type=Path, default=built_programs(), help="folder of the C++ benchmarks (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 5 if options.quick else 9
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; expected at least 1")
    if options.all and options.only:
        parser.error("--all and --only were both given; expected one of them")
    if options.mpi is not None and not (options.mpi / "bin" / "mpiexec").is_file():
        parser.error(f"--mpi is {options.mpi}; expected the prefix of an environment that has bin/mpiexec")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json is {options.json}; expected a file in a folder that exists")
    options.subjects = options.only or [name for name in SUBJECTS if options.all or name not in _ONLY_WHEN_ASKED_FOR]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    document: dict[str, Any] = {
        "format": 1,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine.facts(),
        "load_before": _machine.load(),
        "rounds": options.rounds,
        "quick": options.quick,
    }
    machine = document["machine"]
    console.print(
        f"{machine['cpu']}, {machine['usable_cores']} cores, load {document['load_before']:.1f}; "
        f"torch {machine['torch']}, UCX {machine['ucx']}, {options.rounds} rounds\n",
        highlight=False,
        soft_wrap=True,
    )
    effort = 0.1 if options.quick else 1.0
    reports = []
    skipped: dict[str, str] = {}
    with RankPair() as pair:
        document["transport"] = pair.call(transport)[0]
        for name in options.subjects:
            try:
                with console.status(name, refresh_per_second=0.5) as status:
                    settings = Settings(options.rounds, effort, options.programs, options.mpi, _ticker(status, name))
                    reports.append(SUBJECTS[name](settings, pair))
            except Skipped as reason:
                skipped[name] = str(reason)
                console.print(f"{name} is skipped: {reason}\n", highlight=False, markup=False, soft_wrap=True)
                continue
            _output.print_report(console, reports[-1])
    targets = [target for report in reports for target in report.targets]
    if targets:
        _output.print_targets(console, targets)
    document["load_after"] = _machine.load()
    document["skipped"] = skipped
    document["subjects"] = _output.to_json(reports)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"\nwrote {options.json}")


def _ticker(status: Any, name: str) -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        status.update(f"{name}: {done} measurements")

    return tick


if __name__ == "__main__":
    main()
