"""examples/cpp/train_replicas.cc: data parallelism in C++ as its users start it, by torchrun and by hand."""

from __future__ import annotations

import re

from support.cpp_examples import needs_examples, program
from support.devices import only_on_cpu
from support.launchers import by_hand, by_torchrun, finish, start

PROGRAM = (str(program("train_replicas")), "20")

pytestmark = [needs_examples, only_on_cpu("C++ examples")]


def _check(output: str, ranks: int) -> None:
    found = re.search(
        rf"^{ranks} replicas, loss ([\d.]+) -> ([\d.]+); beside one process: .* within 1.0e-09$", output, re.MULTILINE
    )
    assert found is not None, output
    assert float(found[2]) < float(found[1]) - 1


def test_torchrun_starts_it_and_it_trains_as_one_process_does() -> None:
    code, output = by_torchrun(2, *PROGRAM)
    assert code == 0, output
    _check(output, 2)


def test_started_by_hand_it_trains_as_one_process_does() -> None:
    ended = by_hand(3, *PROGRAM)
    assert [code for code, _ in ended] == [0] * 3, ended
    _check(ended[0][1], 3)


def test_it_says_what_is_wrong_with_its_environment_and_arguments() -> None:
    for command, error in (
        (PROGRAM, "RANK and WORLD_SIZE are not set: start it by torchrun"),
        ((PROGRAM[0], "0"), "usage: train_replicas [STEPS], with STEPS at least 1"),
    ):
        [(code, output)] = finish([start([*command])])
        assert code == 1 and error in output, output


def test_no_python_is_in_the_process() -> None:
    [(code, output)] = finish([start(["ldd", PROGRAM[0]])])
    libraries = [line.split()[0] for line in output.splitlines()]
    assert code == 0 and "libtorch_cpu.so" in libraries, output
    assert [library for library in libraries if "python" in library] == []
