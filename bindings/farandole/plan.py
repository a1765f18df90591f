"""Plans on the command line: ``python -m farandole.plan 1F1B --stages 4 --microbatches 8``."""

from __future__ import annotations

import argparse
from pathlib import Path

from farandole import pipelining

_CHANNELS = ("tagged", "fifo_per_edge", "one_queue_per_rank")


def parse(arguments: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m farandole.plan",
        description="Makes the plan of a pipeline schedule, proves it, simulates it, draws it.",
    )
    parser.add_argument("name", metavar="NAME", help=f"the schedule: {', '.join(pipelining.schedule_names())}")
    parser.add_argument("--stages", type=int, required=True, help="stages of the pipeline")
    parser.add_argument("--ranks", type=int, help="processes (default: as many as stages)")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches per step")
    parser.add_argument("--forward-only", action="store_true", help="leave out the backwards")
    parser.add_argument(
        "--seconds",
        type=_numbers,
        action="append",
        metavar="F,B,I,W",
        help="what the actions of a stage take; once for all stages, or once for each (default: 1,2,1,1)",
    )
    parser.add_argument("--transfer", type=float, default=0.0, help="seconds per message (default: 0)")
    parser.add_argument(
        "--memory",
        type=_numbers,
        action="append",
        metavar="A,W",
        help="bytes that a microbatch of a stage holds from F to B or I, and from I to W; given like --seconds",
    )
    parser.add_argument(
        "--validate",
        choices=_CHANNELS,
        metavar="CHANNEL",
        help=f"insert the messages and prove that they cannot deadlock; what follows is of that plan ({', '.join(_CHANNELS)})",
    )
    parser.add_argument("--draw", action="store_true", help="print the simulated step (default, if nothing is written)")
    parser.add_argument("--columns", type=int, default=100, help="width of what is printed (default: %(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the simulated step")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write it for chrome://tracing or Perfetto")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the plan, a line for each rank")
    return parser, parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    parser, options = parse(arguments)
    try:
        _run(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> None:
    plan = pipelining.plan(
        options.name, options.stages, options.microbatches, num_ranks=options.ranks, forward_only=options.forward_only
    )
    if options.validate is not None:
        plan = pipelining.lower(plan, options.validate)
        print(f"{options.name}: runs to its end on {options.validate} channels")
    if options.csv is not None:
        _write(options.csv, plan.to_csv())
    step = pipelining.simulate(
        plan, _per_stage("seconds", options.seconds or [(1, 2, 1, 1)], options), options.transfer
    )
    memory = None if options.memory is None else _per_stage("memory", options.memory, options)
    if options.svg is not None:
        _write(options.svg, pipelining.draw_svg(step, memory=memory))
    if options.trace is not None:
        _write(options.trace, pipelining.chrome_trace(step, memory=memory))
    written = (options.validate, options.csv, options.svg, options.trace)
    if options.draw or all(one is None for one in written):
        print(pipelining.draw_text(step, options.columns), end="")
        if memory is not None:
            peaks = [curve.peak for curve in pipelining.memory_over_time(step, memory)]
            print("peak bytes: " + ", ".join(f"{peak:.10g}" for peak in peaks))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


def _per_stage(name: str, given: list[tuple[float, ...]], options: argparse.Namespace) -> list[tuple[float, ...]]:
    if len(given) not in (1, options.stages):
        raise ValueError(
            f"--{name} was given {len(given)} times; expected once, or once for each of {options.stages} stages"
        )
    return given * options.stages if len(given) == 1 else given


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
