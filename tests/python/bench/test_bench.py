"""Each subject runs, with few repetitions, and writes figures that can be true."""

import json
import statistics

import pytest

from farandole.bench.__main__ import main
from farandole.bench._programs import CppPair
from farandole.bench._settings import built_programs

ROUNDS = 2


def measure(folder, capsys, subject: str) -> dict:
    file = folder / "bench.json"
    main(["--quick", "--rounds", str(ROUNDS), "--only", subject, "--json", str(file)])
    printed = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["rounds"] == ROUNDS
    assert document["machine"]["cores"] >= 1
    assert all(document["machine"][key] for key in ("torch", "ucx", "farandole", "python"))
    (report,) = document["subjects"]
    assert report["subject"] == subject
    for series in report["series"]:
        assert len(series["rounds"]) == ROUNDS
        medians = [statistics.median(sample["median"] for sample in samples) for samples in series["rounds"]]
        assert series["median"] == statistics.median(medians)
        assert all(sample["median"] > 0 and sample["mean"] > 0 for samples in series["rounds"] for sample in samples)
        assert series["peer"] in printed
    for target in report["targets"]:
        met = target["measured"] <= target["limit"] if target["kind"] == "at most" else None
        met = target["measured"] >= target["limit"] if target["kind"] == "at least" else met
        assert target["met"] is met
        assert target["name"] in printed
    return report


def medians_of(report: dict) -> dict[tuple[str, str, str], float]:
    return {(one["case"], one["peer"], one["quantity"]): one["median"] for one in report["series"]}


@pytest.mark.skipif(
    not (built_programs() / "bench_point_to_point").exists(), reason="built without FARANDOLE_BENCHMARKS"
)
def test_point_to_point_measures_every_peer_at_both_sizes(tmp_path, capsys):
    report = measure(tmp_path, capsys, "point_to_point")
    medians = medians_of(report)
    peers = {"ucx_perftest", "C++ farandole", "Python farandole", "Python gloo", "Python fake"}
    assert {(case, peer) for case, peer, _ in medians} == {(case, peer) for case in ("8 B", "64 MiB") for peer in peers}
    for peer in peers - {"Python fake"}:
        assert medians["64 MiB", peer, "median"] > medians["8 B", peer, "median"]
    assert len(report["targets"]) == 2


@pytest.mark.parametrize(
    ("subject", "sizes", "targets"),
    [
        ("all_reduce", ["8 B", "512 B", "4 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB"], 4),
        ("batch", ["8 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB"], 3),
    ],
)
def test_farandole_is_measured_beside_gloo_at_every_size(subject, sizes, targets, tmp_path, capsys):
    report = measure(tmp_path, capsys, subject)
    assert [ratio["case"] for ratio in report["ratios"]] == sizes
    assert len(report["targets"]) == targets
    medians = medians_of(report)
    for peer in ("farandole", "gloo"):
        assert medians[sizes[-1], peer, "median"] > medians["8 B", peer, "median"]


def test_pipeline_measures_both_schedules_beside_their_ideals(tmp_path, capsys):
    report = measure(tmp_path, capsys, "pipeline")
    medians = medians_of(report)
    for width in ("d=256", "d=32"):
        for peer in ("farandole", "torch over gloo"):
            # No step is faster than its own compute in the best order.
            assert medians[width, peer, "step / ideal"] >= 0.999
            assert medians[width, peer, "step"] > medians[width, peer, "ideal"] * 0.999
    assert medians["d=256", "farandole", "step"] > medians["d=32", "farandole", "step"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; expected at least 1"),
        (["--only", "weather"], "invalid choice: 'weather'"),
        (["--json", "/nowhere/bench.json"], "expected a file in a folder that exists"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_program_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=f"{tmp_path}/bench_point_to_point is not there; expected the build"):
        CppPair(tmp_path)
