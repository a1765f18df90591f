"""Collectives beside gloo, and beside Intel MPI where FARANDOLE_TEST_MPI names an environment that has it."""

import os
import pathlib

import pytest

from bench.test_bench import measure, medians_of
from farandole.bench._mpi import MpiPair
from farandole.bench._noop import NOOP, is_built
from farandole.bench._peers import Repeat
from farandole.bench._settings import built_programs
from farandole.bench.collectives import OPERATIONS

SIZES = ["1 KiB", "64 KiB", "256 KiB", "1 MiB", "16 MiB", "64 MiB"]
MPI = os.environ.get("FARANDOLE_TEST_MPI")


def test_every_collective_is_measured_beside_gloo_and_the_output_says_how_to_have_mpi(tmp_path, capsys):
    has_noop = is_built(built_programs())
    report = measure(tmp_path, capsys, "collectives")
    cases = [f"{operation}, {size}" for operation in OPERATIONS for size in SIZES]
    assert [(one["case"], one["peer"]) for one in report["series"]] == [
        (case, peer) for case in cases for peer in ("farandole", "gloo", *([NOOP] if has_noop else []))
    ]
    assert [one["case"] for one in report["ratios"]] == cases
    assert report["targets"] == []
    assert "pip install impi-rt mpi4py" in report["notes"][0]
    assert len(report["notes"]) == (1 if has_noop else 2)
    medians = medians_of(report)
    for operation in OPERATIONS if has_noop else ():  # it moves nothing; the shortest differ by less than noise
        case = f"{operation}, 64 MiB"
        assert 10 * medians[case, NOOP, "median"] < medians[case, "farandole", "median"]


@pytest.mark.skipif(MPI is None, reason="FARANDOLE_TEST_MPI names no environment with impi-rt and mpi4py")
def test_intel_mpi_measures_every_collective_and_its_ranks_end():
    with MpiPair(pathlib.Path(MPI)) as mpi:
        assert "Intel(R) MPI" in mpi.library
        for operation in OPERATIONS:
            small, large = (mpi.peer(operation)(Repeat(size, 1, 5, 3)) for size in (2**10, 2**24))
            assert len(small) == len(large) == 3
            assert min(small) > (0, 0)
            assert min(large) > max(small)
        with pytest.raises(RuntimeError, match=r"Intel MPI, rank .* ended without an answer(.|\n)*KeyError: 'juggle'"):
            mpi.peer("juggle")(Repeat(8, 1, 1, 1))
        socket = os.fsencode(mpi.address)
    commands = [file.read_bytes() for file in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(socket in command for command in commands)


def _environment(folder: pathlib.Path, mpiexec: str) -> pathlib.Path:
    for name, text in (("bin/mpiexec", mpiexec), ("bin/python", ""), ("lib/libmpi.so.12", "")):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return folder


def test_what_mpiexec_says_when_it_does_not_start_reaches_the_caller(tmp_path):
    prefix = _environment(tmp_path, "#!/bin/sh\necho the fabric is torn >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match="Intel MPI did not start:\nthe fabric is torn"), MpiPair(prefix):
        pass


def test_an_environment_without_the_library_is_named(tmp_path):
    prefix = _environment(tmp_path, "")
    (prefix / "lib/libmpi.so.12").unlink()
    with pytest.raises(RuntimeError, match=r"lib/libmpi\.so\.12 is not there; --mpi expects"):
        MpiPair(prefix)
