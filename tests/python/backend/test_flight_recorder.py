"""What the flight recorder tells, in the words of torch's own analyzer where it can."""

import os
import pickle
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import farandole
from support.devices import ON_CPU, only_on_cpu
from support.processes import await_all, run_ranks

# torch records plugins itself where it has this.
HAS_HOOKS = hasattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS")
LIBRARY = "farandole" if HAS_HOOKS else "nccl"  # before, the analyzer knows no other


@pytest.fixture
def traces(tmp_path):
    """A folder for dumps, and the setting that has them written there."""
    return tmp_path, {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_")}


def _analyze(folder):
    """What torchfrtrace prints, and (name, whether all agree, how it ended) of what it takes for one operation."""
    file = folder / "matches"
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "--prefix", "trace_"]
    result = subprocess.run([*command, "-o", str(file)], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    _, database = pickle.loads(file.read_bytes())
    assert len(database.ncclcalls) > 0
    matches = [(c.collective_name.partition(":")[2], c.pass_check, c.collective_state) for c in database.collectives]
    return result.stdout + result.stderr, matches


def _await_dump(rank):
    """The dump that a failure has written, which nobody who waits for the operation waits for."""
    path = os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(path, "rb") as file:
                return pickle.load(file)
        except (FileNotFoundError, EOFError, pickle.UnpicklingError):
            time.sleep(0.02)
    raise AssertionError(f"{path} is not there after 10 s")


def _ended(but=0):
    """What is recorded, when all but so many are completed: of a GPU's operations that is seen a little later."""
    deadline = time.monotonic() + 10
    while True:
        entries = farandole.flight_recorder()["entries"]
        if ON_CPU or all(entry["state"] == "completed" for entry in entries[: len(entries) - but]):
            return entries
        assert time.monotonic() < deadline, entries
        time.sleep(0.01)


def _set_timeout(seconds):
    dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=seconds))


def _miss(rank, world_size):
    dist.barrier()
    dist.all_reduce(torch.ones(3))
    _ended()
    _set_timeout(1)
    if rank == 2:
        await_all(rank, world_size)
        path = farandole.dump_flight_recorder()
        await_all(rank, world_size, "to the last one's dump")
        return path
    with pytest.raises(dist.DistBackendError, match="rank 2" if ON_CPU else "within its timeout"):
        work = dist.all_reduce(torch.ones(4, 2), async_op=True)
        work.wait() if ON_CPU else work.wait(timedelta(seconds=20))  # else the host does not wait
    entry = _await_dump(rank)["entries"][-1]
    await_all(rank, world_size)
    await_all(rank, world_size, "to the last one's dump")  # which shall not see this one leave
    return entry


def test_torchs_analyzer_names_the_rank_that_did_not_come(traces):
    folder, env = traces
    first, second, third = run_ranks(_miss, 3, "farandole", env=env)
    assert third == str(folder / "trace_2")
    for entry in (first, second):
        assert (entry["state"], entry["retired"], entry["timeout_ms"]) == ("started", True, 1000)
        assert entry["time_discovered_completed_ns"] is None
        # NCCL does not tell who is missing.
        told = ["rank 2 (host ", "1000 ms"] if ON_CPU else ["within its timeout"]
        assert all(text in entry["error"] for text in told), entry["error"]
        assert 0.9e9 < entry["time_failed_ns"] - entry["time_created_ns"] < 2e9
    text, matches = _analyze(folder)
    assert matches[:2] == [
        ("barrier" if HAS_HOOKS else "all_reduce_barrier", True, "completed"),
        ("all_reduce", True, "completed"),
    ]
    assert "Not all ranks joining collective, sequence number: 3" in text
    assert "missing ranks: {2}" in text
    assert f"collective: {LIBRARY}:all_reduce" in text and "input sizes: [[4, 2]]" in text
    assert "group info: 0:default_pg" in text


def _differ(rank, world_size):
    dist.barrier()
    with pytest.raises(ValueError, match="expected the same on all ranks"):
        if rank == 1:
            dist.broadcast(torch.ones(3), 0)
        else:
            dist.all_reduce(torch.ones(3))
    error = _await_dump(rank)["entries"][-1]["error"]
    await_all(rank, world_size)
    return error


@only_on_cpu("NCCL does not compare what its ranks call")
def test_torchs_analyzer_names_the_rank_that_called_another_collective(traces):
    folder, env = traces
    for error in run_ranks(_differ, 3, "farandole", env=env):
        assert "broadcast" in error and "all_reduce" in error
    text, _ = _analyze(folder)
    assert "Collective sequence number: 2 has errors" in text
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in text


def _call_all(rank, world_size):
    one, two = torch.ones(2), torch.ones(4, 3)
    parts = [torch.ones(2) for _ in range(world_size)]
    uneven = [torch.ones(1 + i) for i in range(world_size)]
    dist.all_reduce(one)
    dist.broadcast(two, 1)
    dist.reduce(one, 0)
    dist.all_gather(parts, one)
    dist.all_gather(uneven, torch.ones(1 + rank))
    dist.all_gather_into_tensor(torch.ones(2 * world_size), one)
    dist.reduce_scatter(one, parts)
    dist.reduce_scatter(torch.ones(1 + rank), uneven)
    dist.reduce_scatter_tensor(one, torch.ones(2 * world_size))
    dist.all_to_all([torch.ones(1 + rank) for _ in range(world_size)], uneven)
    dist.all_to_all_single(torch.ones(2 * world_size), torch.ones(2 * world_size))
    dist.gather(one, parts if rank == 0 else None)
    dist.scatter(one, parts if rank == 0 else None)
    dist.barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=30), False)
    dist.all_reduce(torch.eye(3).to_sparse())
    with dist._coalescing_manager():
        for _ in range(4):
            dist.all_reduce(two)
    dist.all_reduce(one)
    entries = _ended()
    farandole.dump_flight_recorder()
    return entries


def test_torchs_analyzer_finds_no_fault_with_collectives_that_went_well(traces):
    folder, env = traces
    by_rank = run_ranks(_call_all, 3, "farandole", env=env)
    for entries in by_rank:
        assert [entry["profiling_name"] for entry in entries] == [entry["profiling_name"] for entry in by_rank[0]]
        assert [entry["collective_seq_id"] for entry in entries] == list(range(1, len(entries) + 1))
        assert {entry["state"] for entry in entries} == {"completed"}
        coalesced = entries[-2]
        assert coalesced["profiling_name"] == f"{LIBRARY}:allreduce_coalesced"
        assert coalesced["input_sizes"] == coalesced["output_sizes"] == [[4, 3], [4, 3]]
        assert coalesced["num_inputs"] == 4  # two are kept
    text, matches = _analyze(folder)
    for complaint in ("Not all ranks joining", "has errors", "mismatch in the collective", "cannot decide", "MISMATCH"):
        assert complaint not in text, text
    names = [entry["profiling_name"].partition(":")[2] for entry in by_rank[0]]
    assert sorted(matches) == sorted((name, True, "completed") for name in names)


def _exchange(rank, world_size):
    other = 1 - rank
    data = torch.ones(5, dtype=torch.int16)
    if rank == 0:
        dist.send(data, other, tag=3)
        dist.recv(data, None if ON_CPU else other)  # over NCCL not from any rank
    else:
        dist.recv(data, other, tag=3)
        dist.send(data, other)
    ops = [dist.P2POp(dist.isend, data, other), dist.P2POp(dist.irecv, torch.ones(5, dtype=torch.int16), other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    pending = dist.irecv(data, other)
    entries = _ended(but=1)
    dist.barrier()
    dist.send(data, other)
    pending.wait()
    return entries


def test_point_to_point_operations_are_told_with_their_peers():
    by_rank = run_ranks(_exchange, 2, "farandole")
    names = [[entry["profiling_name"].partition(":")[2] for entry in entries] for entries in by_rank]
    assert names[0][:2] == ["send 0->1", "recv 0<-1"]  # the second was from any rank
    assert names[1][:2] == ["recv 1<-0", "send 1->0"]
    for rank, entries in enumerate(by_rank):
        assert sorted(names[rank][2:4]) == [f"recv {rank}<-{1 - rank}", f"send {rank}->{1 - rank}"]
        assert [entry["op_id"] for entry in entries] == [1, 2, 3, 4, 5]
        numbers = [entry["p2p_seq_id"] for entry in entries]
        assert numbers == list(range(numbers[0], numbers[0] + 5)) and all(entry["is_p2p"] for entry in entries)
        assert [entry["state"] for entry in entries] == ["completed"] * 4 + ["started"]
        assert not entries[4]["retired"] and entries[4]["time_discovered_completed_ns"] is None
        for entry in entries:
            is_send = " " in entry["profiling_name"] and "->" in entry["profiling_name"]
            side, empty = ("input", "output") if is_send else ("output", "input")
            assert (entry[f"{side}_sizes"], entry[f"{side}_dtypes"]) == ([[5]], ["Short"])
            assert (entry[f"{empty}_sizes"], entry[f"{empty}_dtypes"]) == ([], [])


def _dump_exchange(rank, world_size):
    for _ in range(3):
        if rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.ones(5), 0)
    dist.barrier()
    _ended()
    farandole.dump_flight_recorder()


def test_torchs_analyzer_matches_sends_and_receives_of_two_ranks(traces):
    folder, env = traces
    run_ranks(_dump_exchange, 2, "farandole", env=env)
    text, matches = _analyze(folder)
    assert "has errors" not in text and "Not all ranks" not in text, text
    assert [match[1:] for match in matches] == [(True, "completed")] * 4, matches
    assert [match[0] for match in matches[:3]] == ["send 0->1"] * 3


def _fork_groups(rank, world_size):
    group = dist.new_group([0, 2], group_desc="ends")
    if rank != 1:
        dist.all_reduce(torch.ones(2), group=group)
        if rank == 0:
            dist.send(torch.ones(2), 2, group=group)
        else:
            dist.recv(torch.ones(2), 0, group=group)
    dist.barrier()
    return farandole.flight_recorder()


def test_a_group_is_told_with_its_description_and_its_members():
    first, middle, last = run_ranks(_fork_groups, 3, "farandole")
    assert [group["ranks"] for group in middle["pg_config"].values()] == ["[0, 1, 2]"]
    for dump in (first, last):
        name, description = dump["entries"][0]["process_group"]
        assert (description, dump["pg_config"][name]["desc"], dump["pg_config"][name]["ranks"]) == (
            "ends",
            "ends",
            "[0, 2]",
        )
    assert first["entries"][1]["profiling_name"] == f"{LIBRARY}:send 0->1"  # ranks of the group
    assert last["entries"][1]["profiling_name"] == f"{LIBRARY}:recv 1<-0"


def _survive(rank, world_size):
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError):
        dist.recv(torch.ones(2), 1)
    return _await_dump(rank)


def test_survivors_dump_when_a_rank_dies(traces):
    _, env = traces
    dumps = run_ranks(_survive, 3, "farandole", env=env, may_die={1})
    for rank in (0, 2):
        entry = dumps[rank]["entries"][-1]
        assert entry["profiling_name"] == f"{LIBRARY}:recv {rank}<-1"
        assert "rank 1 (host " in entry["error"]


def _end_quietly(rank, world_size):
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        dist.destroy_process_group()
        return None
    work = dist.irecv(torch.ones(2), 1)
    dist.destroy_process_group()
    return work.is_completed() and not work.is_success()


def test_a_group_that_is_destroyed_with_operations_pending_is_no_failure(traces):
    folder, env = traces
    assert run_ranks(_end_quietly, 2, "farandole", env=env) == [True, None]
    assert list(folder.iterdir()) == []


def _time_out(rank, world_size):
    dist.barrier()
    _set_timeout(0.3)
    with pytest.raises(dist.DistBackendError):
        dist.recv(torch.ones(2), 1 - rank)
    entries = farandole.flight_recorder()["entries"]
    hooks = dict(getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", {}))
    time.sleep(0.5)
    return len(entries), len(hooks)


def test_a_dump_can_be_forbidden_as_torch_has_it(traces):
    folder, env = traces
    counts = run_ranks(_time_out, 2, "farandole", env={**env, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})
    assert counts == [(2, 0)] * 2 and list(folder.iterdir()) == []


def test_nothing_is_recorded_when_it_is_off_by_either_setting(traces):
    folder, env = traces
    for setting in ({"FARANDOLE_FLIGHT_RECORDER": "off"}, {"TORCH_FR_BUFFER_SIZE": "0"}):
        assert run_ranks(_time_out, 2, "farandole", env={**env, **setting}) == [(0, 0)] * 2
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not HAS_HOOKS, reason="this torch has no recorder for plugins")
def test_torchs_recorder_is_attached_where_it_is_asked_for_and_then_records_alone(traces):
    _, env = traces
    counts = run_ranks(_time_out, 2, "farandole", env={**env, "FARANDOLE_FLIGHT_RECORDER": "torch"})
    assert counts == [(0, 1)] * 2


def _wrap(rank, world_size):
    for _ in range(20):
        dist.barrier()
    return [entry["collective_seq_id"] for entry in farandole.flight_recorder()["entries"]]


@only_on_cpu("barriers are the CPU's")
def test_the_ring_has_the_size_that_torchs_setting_says():
    assert run_ranks(_wrap, 2, "farandole", env={"TORCH_FR_BUFFER_SIZE": "5"}) == [[16, 17, 18, 19, 20]] * 2


def _is_refused(rank, world_size):
    with pytest.raises(ValueError, match=r"expected|environment variable") as error:
        dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
    return str(error.value)


@only_on_cpu("it is refused before there are tensors")
@pytest.mark.parametrize(
    ("setting", "value"), [("FARANDOLE_FLIGHT_RECORDER", "both"), ("TORCH_FR_BUFFER_SIZE", "many")]
)
def test_a_setting_that_cannot_be_understood_is_named(setting, value):
    (message,) = run_ranks(_is_refused, 1, None, env={setting: value})
    assert setting in message


def _dump_to(rank, world_size, path):
    with pytest.raises(RuntimeError, match="no process group yet"):
        farandole.dump_flight_recorder()
    dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="no-such-folder"):
        farandole.dump_flight_recorder(path / "no-such-folder" / "trace")
    with open(farandole.dump_flight_recorder(path / "mine"), "rb") as file:
        dumped = pickle.load(file)
    return [(entry["profiling_name"], entry["input_sizes"]) for entry in dumped["entries"]]


def test_a_dump_goes_where_the_caller_says(tmp_path):
    assert run_ranks(_dump_to, 1, None, path=tmp_path) == [[(f"{LIBRARY}:all_reduce", [[1]])]]
