"""Pipelines whose stages are sharded by FSDP2: two ranks with pipelines of their own, gradients as in one process."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, get_schedule_class, plan
from pipelining.pipeline_support import BACKENDS, train_alone
from support.devices import DEVICE, only_on_cpu
from support.processes import await_all, run_ranks

REPLICAS, RANKS, WIDTH, N = 2, 2, 6, 4
SINGLE = ["GPipe", "1F1B", "ZB-H1"]
MULTI = ["Interleaved1F1B", "InterleavedZeroBubble", "ZBV"]


def _stage() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Tanh())


class _Counts:
    """How often the modules of a rank were gathered and reduced."""

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as theirs

        self.gathered = self.reduced = 0
        gather, reduce = theirs.foreach_all_gather, theirs.foreach_reduce

        def counting_gather(*args: Any, **kwargs: Any) -> Any:
            self.gathered += 1
            return gather(*args, **kwargs)

        def counting_reduce(*args: Any, **kwargs: Any) -> Any:
            self.reduced += 1
            return reduce(*args, **kwargs)

        theirs.foreach_all_gather, theirs.foreach_reduce = counting_gather, counting_reduce

    def take(self) -> tuple[int, int]:
        counts = self.gathered, self.reduced
        self.gathered = self.reduced = 0
        return counts


def _meshes() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(DEVICE, (REPLICAS, RANKS), mesh_dim_names=("replica", "pipeline"))


def _shard(module: nn.Sequential, mesh: Any, how: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    reshard = how != "unsharded"
    if how == "parts":  # the module itself is none, two parts of it are
        fully_shard(module[0], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(module[1], mesh=mesh, reshard_after_forward=reshard)
        return module
    fully_shard(module[1], mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def _make_older() -> None:
    """Takes away what torch 2.11 does not have."""
    from torch.distributed.fsdp import FSDPModule

    for name in ("finalize_backward", "set_manual_backward_finalization", "reset_iter_state"):
        if hasattr(FSDPModule, name):
            delattr(FSDPModule, name)


def _assert_gradients(module: nn.Module, expected: list[nn.Module], where: str) -> None:
    for (name, parameter), *others in zip(
        module.named_parameters(), *(replica.parameters() for replica in expected), strict=True
    ):
        assert parameter.grad is not None, f"{where}: {name} has no gradient"
        mean = sum(other.grad for other in others) / len(others)
        assert torch.allclose(parameter.grad.full_tensor(), mean, rtol=2e-5, atol=1e-7), f"{where}: {name}"


def _train(rank: int, world_size: int, how: str) -> None:
    if how == "older":
        _make_older()
    mesh, counts = _meshes(), _Counts()
    replica, place = mesh["replica"].get_local_rank(), mesh["pipeline"].get_local_rank()
    for name in SINGLE + MULTI:
        num_stages = RANKS if name in SINGLE else 2 * RANKS
        torch.manual_seed(5)
        modules: list[Any] = [_stage() for _ in range(num_stages)]
        plain = copy.deepcopy(modules)
        owners = plan(name, num_stages, N, num_ranks=RANKS).rank_of_stage
        stages = []
        for index, owner in enumerate(owners):
            if owner == place:
                sharded = _shard(modules[index], mesh["replica"], how)
                stages.append(PipelineStage(sharded, index, num_stages, DEVICE, group=mesh["pipeline"].get_group()))
        schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, N, nn.MSELoss())
        for rows in (2 * N, 2 * N, 2 * N + 3):
            batches, targets = torch.randn(REPLICAS, rows, WIDTH), torch.randn(REPLICAS, rows, WIDTH)
            # The ranks draw the same numbers.
            alone = [train_alone(plain, nn.MSELoss(), batches[r], targets[r], N)[0] for r in range(REPLICAS)]
            for stage in stages:
                stage.submod.zero_grad()
            counts.take()
            schedule.step(batches[replica], target=targets[replica])
            gathered, reduced = counts.take()
            where = f"{name}, {rows} rows, {how}, rank {rank}"
            assert reduced == 2 * len(stages), where
            if how == "unsharded":  # once for all microbatches
                assert gathered == 2 * len(stages), where
            for stage in stages:
                _assert_gradients(stage.submod, [one[stage.stage_index] for one in alone], where)
        # Parameters are sharded again, and can be trained.
        optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.1)
        optimizer.step()
        output = schedule.eval(batches[replica])
        for replicas_grads in zip(*(nn.ModuleList(one).parameters() for one in alone), strict=True):
            replicas_grads[0].grad = sum(p.grad for p in replicas_grads) / REPLICAS
        torch.optim.SGD(nn.ModuleList(alone[0]).parameters(), lr=0.1).step()
        if owners[-1] == place:
            assert torch.allclose(output, nn.Sequential(*alone[0])(batches[replica]), atol=1e-5), name


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", ["resharded", "unsharded", "parts", "older"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_reduced_once_after_the_last_microbatch(backend: str, how: str) -> None:
    run_ranks(_train, REPLICAS * RANKS, backend, timeout=120, how=how)


def _profile(rank: int, world_size: int, how: str) -> tuple[int, list[int], list[int], list[str]]:
    """The matrix products in each I and in each W of a step, and the warnings."""
    mesh = _meshes()
    place = mesh["pipeline"].get_local_rank()
    sharded = _shard(_stage(), mesh["replica"], how)
    stage = PipelineStage(sharded, place, RANKS, DEVICE, group=mesh["pipeline"].get_group())
    schedule = get_schedule_class("ZB-H1")(stage, N, nn.MSELoss())
    batch, target = torch.randn(2 * N, WIDTH), torch.randn(2 * N, WIDTH)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        schedule.step(batch, target=target)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            schedule.step(batch, target=target)
    products = [event.time_range.start for event in profile.events() if event.name == "aten::mm"]

    def within(kind: str) -> list[int]:
        ranges = [event.time_range for event in profile.events() if event.name.startswith(f"PP:{place}{kind}")]
        return [sum(one.start <= start <= one.end for start in products) for one in ranges]

    texts = [str(warning.message) for warning in warned if "cannot be split" in str(warning.message)]
    result = place, within("I"), within("W"), texts
    if how == "unsharded":  # as when a loss switches it on for a head that it runs itself
        before = [parameter.grad.to_local().clone() for parameter in sharded.parameters()]
        sharded.set_reshard_after_forward(True)  # type: ignore[operator]
        sharded.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            schedule.step(batch, target=target)
        products = [event.time_range.start for event in profile.events() if event.name == "aten::mm"]
        assert place == 0 or not any(within("W")), "W ran without its parameters"
        for parameter, gradient in zip(sharded.parameters(), before, strict=True):
            assert torch.allclose(parameter.grad.to_local(), gradient / 2), "gradients differ"
    return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["resharded", "unsharded"])
def test_weights_wait_for_w_where_forwards_leave_parameters_unsharded(how: str) -> None:
    for place, inputs, weights, warned in run_ranks(_profile, REPLICAS * RANKS, "gloo", how=how):
        assert not warned
        if place > 0:  # the first stage has no gradients of inputs: its backward is all W or all I
            assert inputs == [2 if how == "unsharded" else 4] * N
            assert weights == [2 if how == "unsharded" else 0] * N


def _accumulate(rank: int, world_size: int) -> None:
    mesh, counts = _meshes(), _Counts()
    replica, place = mesh["replica"].get_local_rank(), mesh["pipeline"].get_local_rank()
    torch.manual_seed(5)
    modules: list[Any] = [_stage() for _ in range(RANKS)]
    plain = copy.deepcopy(modules)
    sharded = _shard(modules[place], mesh["replica"], "unsharded")
    stage = PipelineStage(sharded, place, RANKS, DEVICE, group=mesh["pipeline"].get_group())
    schedule = Schedule1F1B(stage, N, nn.MSELoss())
    batches, targets = torch.randn(2, REPLICAS, 2 * N, WIDTH), torch.randn(2, REPLICAS, 2 * N, WIDTH)
    both = []
    for step in range(2):
        both += [train_alone(plain, nn.MSELoss(), batches[step, r], targets[step, r], N)[0] for r in range(REPLICAS)]
    schedule.step(batches[0, replica], target=targets[0, replica], finalize_gradients=False)
    assert counts.take() == (2, 0)
    schedule.step(batches[1, replica], target=targets[1, replica])
    assert counts.take() == (0, 2)
    for parameter in sharded.parameters():
        parameter.grad /= 2
    _assert_gradients(sharded, [one[place] for one in both], "two steps, reduced once")


def test_steps_that_are_not_finalized_are_reduced_by_the_one_that_is() -> None:
    run_ranks(_accumulate, REPLICAS * RANKS, "gloo")


class _Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.count = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count -= 1
        if self.count == 0:
            raise ValueError("it broke")
        return self.linear(x)


def _fail(rank: int, world_size: int, failing: int) -> tuple[str, float]:
    from torch.distributed.fsdp import fully_shard

    mesh = _meshes()
    place = mesh["pipeline"].get_local_rank()
    module = _Breaks()
    sharded: Any = fully_shard(module, mesh=mesh["replica"])
    stage = PipelineStage(sharded, place, RANKS, DEVICE, group=mesh["pipeline"].get_group())
    schedule = get_schedule_class("ZB-H1")(stage, N, nn.MSELoss())
    batch, target = torch.randn(2 * N, WIDTH), torch.randn(2 * N, WIDTH)
    schedule.step(batch, target=target)
    if rank == failing:
        module.count = 2
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        schedule.step(batch, target=target)
    seconds = time.monotonic() - began
    await_all(rank, world_size)
    return str(raised.value), seconds


# Over gloo, which has no abort, torch's collectives wait until the group's timeout.
@pytest.mark.sample(2)
@pytest.mark.skipif("farandole" not in BACKENDS, reason="needs the backend farandole")
@only_on_cpu("FSDP2 does not wait for GPUs on the host")
@pytest.mark.parametrize("failing", range(REPLICAS * RANKS))
def test_replicas_do_not_wait_for_a_rank_that_failed(failing: int) -> None:
    for rank, (error, seconds) in enumerate(run_ranks(_fail, REPLICAS * RANKS, "farandole", failing=failing)):
        if rank // RANKS == failing // RANKS:
            assert "it broke" in error, (rank, error)
        else:
            assert "aborted the group" in error, (rank, error)
        assert seconds < 20, (rank, seconds)
