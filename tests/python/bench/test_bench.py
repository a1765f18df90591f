"""Each subject runs, with few repetitions, and writes figures that can be true."""

import json
import statistics

import pytest
import torch

from farandole.bench import schedules
from farandole.bench.__main__ import SUBJECTS, main
from farandole.bench._gpus import why_no_gpu
from farandole.bench._programs import CppPair
from farandole.bench._series import Report, Skipped
from farandole.bench._settings import Settings, built_programs
from farandole.sparse._requirements import torchrec_reason


def run(folder, capsys, subject: str, *options: str, rounds: int = 1) -> tuple[dict, str]:
    file = folder / "bench.json"
    main(["--quick", "--rounds", str(rounds), "--only", subject, "--json", str(file), *options])
    return json.loads(file.read_text()), capsys.readouterr().out


def measure(folder, capsys, subject: str, *options: str, rounds: int = 1) -> dict:
    document, printed = run(folder, capsys, subject, *options, rounds=rounds)
    if subject in document["skipped"]:
        assert document["skipped"][subject] in printed
        pytest.skip(document["skipped"][subject])
    assert document["rounds"] == rounds
    assert document["machine"]["cores"] >= 1
    assert all(document["machine"][key] for key in ("torch", "ucx", "farandole", "python"))
    (report,) = document["subjects"]
    assert report["subject"] == subject
    for series in report["series"]:
        assert len(series["rounds"]) == rounds
        medians = [statistics.median(sample["median"] for sample in samples) for samples in series["rounds"]]
        assert series["median"] == statistics.median(medians)
        if series["quantity"] not in ("per action", "exposed"):  # differences of two times, which may be below 0
            values = [sample[key] for samples in series["rounds"] for sample in samples for key in ("median", "mean")]
            assert all(value > 0 for value in values)
        assert series["peer"] in printed
    for target in report["targets"]:
        met = target["measured"] <= target["limit"] if target["kind"] == "at most" else None
        met = target["measured"] >= target["limit"] if target["kind"] == "at least" else met
        assert target["met"] is met
        assert target["name"] in printed
    assert all(note in printed for note in report["notes"])
    return report


def medians_of(report: dict) -> dict[tuple[str, str, str], float]:
    return {(one["case"], one["peer"], one["quantity"]): one["median"] for one in report["series"]}


@pytest.mark.skipif(
    not (built_programs() / "bench_point_to_point").exists(), reason="built without FARANDOLE_BENCHMARKS"
)
def test_point_to_point_measures_every_peer_at_every_size(tmp_path, capsys):
    report = measure(tmp_path, capsys, "point_to_point")
    medians = medians_of(report)
    noops = {"C++ ProcessGroup no-op", "Python fake"}
    moving = {"ucx_perftest", "C++ repeated", "C++ Backend", "C++ ProcessGroup", "Python farandole", "Python gloo"}
    assert {(case, peer) for case, peer, _ in medians} == {
        (case, peer) for case in ("8 B", "16 KiB", "1 MiB", "64 MiB") for peer in moving | noops
    }
    for peer in moving:
        assert medians["64 MiB", peer, "median"] > medians["8 B", peer, "median"]
    for peer in noops:
        assert medians["64 MiB", peer, "median"] < 1e-3  # for which all of the memory's bandwidth would not do
    assert [target["unit"] for target in report["targets"]] == ["ratio", "s", "s", "ratio", "s", *["ratio"] * 3]


@pytest.mark.parametrize(
    ("subject", "sizes", "targets"),
    [
        ("all_reduce", ["8 B", "512 B", "4 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB"], 4),
        ("batch", ["8 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB"], 3),
    ],
)
def test_farandole_is_measured_beside_gloo_at_every_size(subject, sizes, targets, tmp_path, capsys):
    report = measure(tmp_path, capsys, subject, rounds=2)
    assert [ratio["case"] for ratio in report["ratios"]] == sizes
    assert len(report["targets"]) == targets
    medians = medians_of(report)
    for peer in ("farandole", "gloo"):
        assert medians[sizes[-1], peer, "median"] > medians["8 B", peer, "median"]


def test_more_ranks_than_cores_are_measured_beside_gloo_and_idle_ones_beside_none(tmp_path, capsys):
    report = measure(tmp_path, capsys, "oversubscribed")
    medians = medians_of(report)
    for ranks in (4, 8):
        for peer in ("farandole", "gloo"):
            assert medians[f"{ranks} ranks, 16 MiB", peer, "median"] > medians[f"{ranks} ranks, 8 B", peer, "median"]
        computing = [
            medians[f"computing, the group of {ranks} idle", peer, "median"] for peer in ("farandole", "no group")
        ]
        assert max(computing) < 2 * min(computing)
    assert [target["unit"] for target in report["targets"]] == ["ratio"] * 10 + ["share"] * 2


def test_a_loop_is_measured_beside_all_that_can_go_on(tmp_path, capsys):
    report = measure(tmp_path, capsys, "overlap")
    medians = medians_of(report)
    peers = {"nothing", "memcpy", "farandole", "farandole, first", "gloo"}
    assert {(peer, quantity) for _, peer, quantity in medians} == {
        (peer, quantity) for peer in peers for quantity in ("loop", "all", "CPU")
    }
    for peer in peers:
        assert medians["beside", peer, "all"] >= medians["beside", peer, "loop"]
    assert medians["beside", "farandole, first", "all"] > medians["beside", "farandole, first", "loop"] + 1e-3


def test_messages_are_measured_beside_a_bucket_and_alone(tmp_path, capsys):
    report = measure(tmp_path, capsys, "beside_bucket")
    medians = medians_of(report)
    assert {(case, peer) for case, peer, _ in medians} == {
        (case, peer) for case in ("alone", "beside", "bucket") for peer in ("farandole", "gloo")
    }
    assert medians["bucket", "farandole", "time"] > medians["alone", "farandole", "time"]


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_cuda_is_skipped_with_the_reason():
    with pytest.raises(Skipped, match=r"no GPU|without"):
        SUBJECTS["cuda"](Settings(), None)


@pytest.mark.skipif(why_no_gpu() is not None, reason=f"needs a GPU: {why_no_gpu()}")
def test_cuda_is_measured_beside_nccl_on_the_host_and_on_the_device(tmp_path, capsys):
    report = measure(tmp_path, capsys, "cuda")
    medians = medians_of(report)
    for peer in ("farandole", "nccl"):
        assert {(peer, quantity) for _, peer, quantity in medians} >= {(peer, "host"), (peer, "device")}
    assert len(report["ratios"]) == len(report["targets"]) == len(medians) / 2


def test_between_hosts_no_peer_is_faster_than_the_link(tmp_path, capsys):
    report = measure(tmp_path, capsys, "hosts")
    medians = medians_of(report)
    delayed = not any("The slow link has no delay here" in note for note in report["notes"])
    slow = "2 hosts, 1 Gbit/s + 1 ms, 64 MiB" if delayed else "2 hosts, 1 Gbit/s, 64 MiB"
    assert {(case, peer) for case, peer, _ in medians} == {
        *(("2 hosts, 16 MiB", peer) for peer in ("farandole", "gloo", "TCP, both ways")),
        *(("2 hosts x 2 ranks, 16 MiB", peer) for peer in ("farandole", "gloo", "direct", "flat")),
        *((slow, peer) for peer in ("farandole", "gloo", "TCP, both ways")),
    }
    at_best = (64 * 2**20 - 256 * 2**10) / 125e6  # the first 256 KiB pass at any rate
    assert all(median >= at_best for (case, _, _), median in medians.items() if case == slow)
    assert [target["unit"] for target in report["targets"]] == ["ratio", "share", "ratio", "ratio", "share"]


def test_pipeline_measures_both_schedules_beside_their_ideals(tmp_path, capsys):
    report = measure(tmp_path, capsys, "pipeline")
    medians = medians_of(report)
    for schedule in ("1F1B", "Interleaved1F1B"):
        for width in ("d=256", "d=32"):
            case = f"{schedule}, {width}"
            for peer in ("farandole", "torch over gloo"):
                # No step is faster than its own compute in the best order.
                assert medians[case, peer, "step / ideal"] >= 0.999
                assert medians[case, peer, "step"] > medians[case, peer, "ideal"] * 0.999
        assert medians[f"{schedule}, d=256", "farandole", "step"] > medians[f"{schedule}, d=32", "farandole", "step"]


def test_actions_are_measured_beside_torchs_runtime(tmp_path, capsys):
    medians = medians_of(measure(tmp_path, capsys, "actions"))
    assert {(case, peer) for case, peer, _ in medians} == {
        (case, peer)
        for case in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV")
        for peer in ("farandole", "farandole, other shapes each step", "torch over gloo", "farandole, without waiting")
        # torch 2.11 sends to itself in a V, which gloo refuses.
        if not (case == "ZBV" and peer == "torch over gloo" and torch.__version__.startswith("2.11."))
    }
    for (case, peer, quantity), value in medians.items():
        if quantity == "per action" and "waiting" not in peer:
            assert value < medians[case, peer, "step"]


def test_steps_are_measured_beside_megatron_cores(tmp_path, capsys):
    medians = medians_of(measure(tmp_path, capsys, "megatron"))
    assert {peer for _, peer, _ in medians} == {"farandole", "Megatron-core over gloo"}
    assert len(medians) == 8
    assert all(value > 0 for value in medians.values())


def test_data_parallelism_is_measured_beside_torchs(tmp_path, capsys):
    report = measure(tmp_path, capsys, "data_parallel")
    medians = medians_of(report)
    for case in ("transformer, 40M", "2000 parameters", "sleeping"):
        for peer in ("alone", "farandole", "torch over gloo", "torch over farandole"):
            assert medians[case, peer, "step"] > 0
        assert medians[case, "all_reduce", "time"] > 0
        assert (case, "farandole", "exposed") in medians
    assert ("sleeping", "hooks over fake", "exposed") in medians
    wrapped, *memory = report["notes"]
    assert wrapped == "sleeping: farandole's wrapper with bucket_size=16777216, elsewhere with its defaults"
    assert [note.partition(": ")[0] for note in memory] == ["memory, float32 gradients", "memory, bfloat16 gradients"]
    measured = {target["name"]: target["measured"] for target in report["targets"]}
    for grads in ("float32 gradients", "bfloat16 gradients"):
        assert 0.97 < measured[f"memory, {grads}: bytes / formula"] < 1.03
    assert {("a parameter", peer, "exposed") for peer in ("farandole", "torch over gloo")} <= set(medians)
    assert [target["unit"] for target in report["targets"]] == ["ratio"] * 5 + ["s"] + ["ratio"] * 2


def test_sparse_steps_are_measured_beside_one_stage_and_torchrecs(tmp_path, capsys):
    report = measure(tmp_path, capsys, "sparse")
    medians = medians_of(report)
    sleeps = {"stages sleep 10 ms": 0.01, "stages sleep 50 ms": 0.05}
    for case, seconds in sleeps.items():
        assert medians[case, "set duration", "time"] == seconds <= medians[case, "longest stage", "time"]
        # Less than two stages one after the other: they did overlap.
        assert 0.9 < medians[case, "farandole, threads", "step"] / medians[case, "longest stage", "time"] < 2
    rest = {case for case, _, _ in medians} - set(sleeps)
    if torchrec_reason() is not None:
        assert not rest and torchrec_reason() in report["notes"][0]
        return
    assert len(rest) == 4
    for case in rest:
        for peer in ("plain loop", "farandole", "torchrec over gloo"):
            assert medians[case, peer, "step"] > 0


def test_steps_are_measured_beside_what_was_predicted(tmp_path, capsys):
    report = measure(tmp_path, capsys, "predicted")
    ratios = {peer: value for (_, peer, quantity), value in medians_of(report).items() if quantity == "ratio"}
    assert len(ratios) == 12
    assert all(0.2 < value < 5 for value in ratios.values()), ratios
    assert len(report["targets"]) == 24


def test_sleeping_stages_take_no_less_than_was_simulated(tmp_path, capsys):
    report = measure(tmp_path, capsys, "schedules")
    assert report["targets"]
    medians = medians_of(report)
    for name, per_rank in schedules.STAGES_PER_RANK.items():
        # With sleeps of the length that was set: those that were measured beside the steps may have been longer.
        least = schedules.predict(schedules.plan_of(name), schedules.SECONDS / per_rank)
        assert medians["step", name, "median"] >= least, name
        assert medians["step", name, "simulated"] >= least, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; expected at least 1"),
        (["--only", "weather"], "invalid choice: 'weather'"),
        (["--json", "/nowhere/bench.json"], "expected a file in a folder that exists"),
        (["--all", "--only", "batch"], "--all and --only were both given"),
        (["--mpi", "/nowhere"], "--mpi is /nowhere; expected the prefix of an environment that has bin/mpiexec"),
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


def test_a_subject_that_cannot_be_measured_here_says_why_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    def refuse(settings, pair):
        raise Skipped("no moon tonight")

    monkeypatch.setitem(SUBJECTS, "hosts", refuse)
    monkeypatch.setitem(SUBJECTS, "batch", lambda settings, pair: Report("batch", "", notes=["an empty table"]))
    document, printed = run(tmp_path, capsys, "hosts", "--only", "batch")
    assert document["skipped"] == {"hosts": "no moon tonight"}
    assert [report["subject"] for report in document["subjects"]] == ["batch"]
    assert "hosts is skipped: no moon tonight" in printed
    assert "an empty table" in printed
