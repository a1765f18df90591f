"""Pipeline and data parallelism together: two stages, two replicas, gradients as in one process."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBH1, ScheduleZBH2
from pipelining.pipeline_support import BACKENDS, random_stages, train_alone
from support.devices import DEVICE, ON_CPU
from support.processes import await_all, run_ranks

STAGES, REPLICAS = 2, 2


def _wrap(kind: str, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    if kind == "torch":
        return nn.parallel.DistributedDataParallel(module, process_group=group)
    from farandole.ddp import DistributedDataParallel

    return DistributedDataParallel(module, process_group=group)


def _train_two_by_two(rank: int, world_size: int, kind: str) -> None:
    stage_index, replica = rank % STAGES, rank // STAGES
    pipelines = [dist.new_group([r * STAGES + s for s in range(STAGES)]) for r in range(REPLICAS)]
    replicas = [dist.new_group([r * STAGES + s for r in range(REPLICAS)]) for s in range(STAGES)]
    for seed in range(3):
        rng = random.Random(seed)
        stages = random_stages(rng, STAGES)
        n_microbatches = rng.randint(1, 5)
        batches = torch.randn(REPLICAS, 2 * n_microbatches + 1, stages[0][0].in_features)
        with torch.no_grad():
            targets = torch.randn_like(nn.Sequential(*stages)(batches))
        expected = [
            train_alone(stages, nn.MSELoss(), batches[r], targets[r], n_microbatches)[0][stage_index]
            for r in range(REPLICAS)
        ]
        wrapped = _wrap(kind, stages[stage_index], replicas[stage_index])
        stage = PipelineStage(wrapped, stage_index, STAGES, DEVICE, group=pipelines[replica])
        schedule = rng.choice([ScheduleGPipe, Schedule1F1B])(stage, n_microbatches, nn.MSELoss())
        for step in range(3):
            wrapped.zero_grad()
            schedule.step(batches[replica], target=targets[replica])
            triples = zip(wrapped.parameters(), *(replica.parameters() for replica in expected), strict=True)
            for parameter, first, second in triples:
                mean = (first.grad + second.grad) / 2
                assert torch.allclose(parameter.grad, mean, rtol=1e-5, atol=1e-7), f"seed {seed}, step {step}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["torch", "farandole"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_reduce_once_per_step_at_the_last_backward(backend: str, kind: str) -> None:
    run_ranks(_train_two_by_two, STAGES * REPLICAS, backend, kind=kind)


def _sequence_number(group: dist.ProcessGroup) -> int:
    return group._get_sequence_number_for_group()  # of its collectives


def _count_reductions(rank: int, world_size: int, kind: str) -> None:
    stage_index, replica = rank % STAGES, rank // STAGES
    pipelines = [dist.new_group([r * STAGES + s for s in range(STAGES)]) for r in range(REPLICAS)]
    replicas = [dist.new_group([r * STAGES + s for r in range(REPLICAS)]) for s in range(STAGES)]
    mine = replicas[stage_index]
    # farandole's replicas also tell each other, over the CPU, how their backward ended. torch's groups with NCCL count
    # what is NCCL's alone.
    counts_all = ON_CPU or mine._get_backend(torch.device(DEVICE)).name() == "farandole"
    expected = 2 if kind == "farandole" and counts_all else 1
    for seed, schedule_class in enumerate((ScheduleGPipe, Schedule1F1B, ScheduleZBH1, ScheduleZBH2)):
        rng = random.Random(seed)
        stages = random_stages(rng, STAGES)
        batches = torch.randn(REPLICAS, 8, stages[0][0].in_features)
        with torch.no_grad():
            targets = torch.randn_like(nn.Sequential(*stages)(batches))
        alone = [train_alone(stages, nn.MSELoss(), batches[r], targets[r], 4)[0][stage_index] for r in range(REPLICAS)]
        wrapped = _wrap(kind, stages[stage_index], mine)
        stage = PipelineStage(wrapped, stage_index, STAGES, DEVICE, group=pipelines[replica])
        schedule = schedule_class(stage, 4, nn.MSELoss())

        def step(finalize: bool, schedule=schedule, batches=batches, targets=targets) -> int:
            before = _sequence_number(mine)
            schedule.step(batches[replica], target=targets[replica], finalize_gradients=finalize)
            return _sequence_number(mine) - before

        def gradients_are(factor: float, replicas: list[nn.Module], wrapped=wrapped) -> bool:
            pairs = zip(wrapped.parameters(), *(one.parameters() for one in replicas), strict=True)
            return all(
                torch.allclose(p.grad, factor * sum(q.grad for q in qs) / len(qs), rtol=1e-5, atol=1e-7)
                for p, *qs in pairs
            )

        for _ in range(2):  # torch's wrapper sorts its buckets anew after its first reduction
            step(True)
        where = f"{kind}, {schedule_class.__name__}"
        for _ in range(2):
            wrapped.zero_grad()
            assert step(True) == expected, f"{where}: the stage has one bucket, four microbatches"
            assert gradients_are(1, alone), where
        wrapped.zero_grad()
        assert [step(False), step(False)] == [0, 0], where
        assert gradients_are(2, [alone[replica]]), f"{where}: this replica's own, of two steps"
        assert step(True) == expected, where
        assert gradients_are(3, alone), f"{where}: those of three steps"


@pytest.mark.parametrize("kind", ["torch", "farandole"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_has_one_reduction_however_many_microbatches_and_none_where_none_is_asked_for(
    backend: str, kind: str
) -> None:
    run_ranks(_count_reductions, STAGES * REPLICAS, backend, timeout=120, kind=kind)


class _Departs(nn.Module):
    """Its microbatch says, by its first number, whether the second layer is called, left out, or only read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        how = x[0, 0].item()
        x = torch.tanh(self.layers[0](x))
        if how == CALLS:
            x = torch.tanh(self.layers[1](x))
        elif how == READS:
            x = x + self.layers[1].weight.mean()
        return self.layers[2](x)


CALLS, LEAVES_OUT, READS = 0.0, 1.0, 2.0


def _leave_out(rank: int, world_size: int, schedule_class: Any) -> None:
    from farandole.ddp import DistributedDataParallel, DistributedOptimizer

    stage_index, replica = rank % STAGES, rank // STAGES
    pipelines = [dist.new_group([r * STAGES + s for s in range(STAGES)]) for r in range(REPLICAS)]
    replicas = [dist.new_group([r * STAGES + s for r in range(REPLICAS)]) for s in range(STAGES)]
    torch.manual_seed(4)
    plain: list[nn.Module] = [_Departs(), nn.Linear(6, 6)]
    wrapped = DistributedDataParallel(
        copy.deepcopy(plain[stage_index]),
        process_group=replicas[stage_index],
        bucket_size=1,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        unused_parameters="zero_fill",
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.5), wrapped)
    stage = PipelineStage(wrapped, stage_index, STAGES, DEVICE, group=pipelines[replica])
    schedule = schedule_class(stage, 3, nn.MSELoss())
    for step, hows in enumerate(
        [
            [CALLS, CALLS, CALLS],
            [CALLS, CALLS, CALLS],
            [LEAVES_OUT, CALLS, LEAVES_OUT],
            [CALLS, LEAVES_OUT, READS],
            [LEAVES_OUT, READS, CALLS],
            [READS, CALLS, CALLS],
        ]
    ):
        batches, targets = torch.randn(REPLICAS, 6, 6), torch.randn(REPLICAS, 6, 6)
        batches[:, ::2, 0] = torch.tensor(hows)
        alone = [train_alone(plain, nn.MSELoss(), batches[r], targets[r], 3) for r in range(REPLICAS)]
        optimizer.zero_grad()
        if hows[0] == READS:
            # Whichever replica's error is first, all are told of it, stages without it by their pipeline.
            match = r"'layers\.1\.weight' was read before .*'layers\.1' by then" if stage_index == 0 else None
            with pytest.raises(RuntimeError, match=match):
                schedule.step(batches[replica], target=targets[replica])
            await_all(rank, world_size)
            return
        losses: list[torch.Tensor] = []
        schedule.step(batches[replica], target=targets[replica], losses=losses)
        if stage_index == STAGES - 1:
            want = alone[replica][1]
            assert torch.allclose(torch.stack(losses), torch.stack(want), rtol=1e-4), f"step {step} {hows}"
        time.sleep(0.03 * replica)  # the other replica is in its next forward before this one's part has left
        optimizer.step()
        with torch.no_grad():
            for index, module in enumerate(plain):
                for mine, *theirs in zip(
                    module.parameters(), *(one[0][index].parameters() for one in alone), strict=True
                ):
                    mine -= 0.5 * sum(torch.zeros_like(mine) if p.grad is None else p.grad for p in theirs) / REPLICAS


@pytest.mark.filterwarnings("ignore:the forward of")
@pytest.mark.parametrize("schedule_class", [ScheduleGPipe, Schedule1F1B, ScheduleZBH1])
def test_microbatches_that_leave_out_a_module_have_the_parameters_of_this_step_or_an_error(schedule_class: Any) -> None:
    run_ranks(_leave_out, STAGES * REPLICAS, BACKENDS[-1], schedule_class=schedule_class)
