"""examples/cpp/train_gpt.cc: training in C++ as its users start it, by torchrun and by hand."""

from __future__ import annotations

import re

import pytest

from support.cpp_examples import needs_examples, program
from support.devices import only_on_cpu
from support.launchers import by_hand, by_torchrun, finish, start

STEPS = 12
PROGRAM = (str(program("train_gpt")), "--steps", str(STEPS))

pytestmark = [needs_examples, only_on_cpu("a C++ example")]


def check_training(output: str, described: str) -> None:
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]
    assert len(losses) == STEPS, output
    assert losses[-1] < losses[0] - 0.5, losses
    found = re.search(rf"^{described}, 8 microbatches; beside one process: losses differ by (\S+), parameters by (\S+),"
                      r" within 1.0e-09$", output, re.MULTILINE)  # fmt: skip
    assert found is not None, output


def test_torchrun_starts_it_and_it_trains_as_one_process_does() -> None:
    code, output = by_torchrun(2, *PROGRAM, "--schedule", "1F1B")
    assert code == 0, output
    check_training(output, "1F1B over 2 ranks, 2 stages")


def test_started_by_hand_it_trains_as_one_process_does() -> None:
    ended = by_hand(4, *PROGRAM, "--schedule", "ZBV")
    output = "".join(output for _, output in ended)
    assert [code for code, _ in ended] == [0] * 4, output
    check_training(output, "ZBV over 4 ranks, 8 stages")


def test_started_alone_it_is_a_pipeline_of_one_rank() -> None:
    [(code, output)] = finish([start([*PROGRAM, "--stages", "3", "--schedule", "LoopedBFS"])])
    assert code == 0, output
    check_training(output, "LoopedBFS over 1 ranks, 3 stages")


def test_it_fails_where_the_trainings_differ_by_more_than_the_tolerance() -> None:
    (code, output), (other, _) = by_hand(2, *PROGRAM, "--tolerance", "0")
    assert code == 1 and other == 0, output
    assert "expected at most 0.0e+00" in output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--schedule", "1F2B"), "schedule name is '1F2B'; expected one of none, GPipe, 1F1B"),
        (("--schedule", "dualpipe"), "--schedule is dualpipe, expected one of a single model"),
        (("--microbatches", "0"), "--microbatches is '0', expected a number of at least 1"),
        (("--rank", "0"), "unknown option --rank, expected --schedule"),
    ],
)
def test_every_rank_says_what_is_wrong_with_its_options(options: tuple[str, ...], error: str) -> None:
    for code, output in by_hand(2, *PROGRAM, *options):
        assert code == 1 and error in output, output


def test_it_says_what_is_wrong_with_its_environment() -> None:
    [(code, output)] = finish([start([PROGRAM[0]], WORLD_SIZE="2")])
    assert code == 1 and "RANK is not set, expected RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in output


def test_no_python_is_in_the_process() -> None:
    [(code, output)] = finish([start(["ldd", PROGRAM[0]])])
    libraries = [line.split()[0] for line in output.splitlines()]
    assert code == 0 and "libtorch_cpu.so" in libraries, output
    assert [library for library in libraries if "python" in library] == []
