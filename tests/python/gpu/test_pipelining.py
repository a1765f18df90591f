"""Pipelines whose stages are on GPUs: gradients of one process, and nothing that waits for the device between steps."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    get_schedule_class,
    plan,
)
from pipelining.pipeline_support import assert_same_gradients, random_stages, train_alone
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(300)]
SINGLE = ["GPipe", "1F1B", "ZB-H1", "ZB-H2"]
MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV", "V-Half", "V-Min", "DualPipeV"]


def _schedule(name, stages, n_microbatches, rank, world_size):
    owners = plan(name, len(stages), n_microbatches, num_ranks=world_size).rank_of_stage
    mine = [PipelineStage(stages[i], i, len(stages), "cuda") for i, owner in enumerate(owners) if owner == rank]
    return get_schedule_class(name)(mine[0] if name in SINGLE else mine, n_microbatches, nn.MSELoss()), owners


def _compare(schedule, stages, owners, rank, n_microbatches, context):
    """Four steps: shapes are learned, known, others, known."""
    rows = 0
    for step in range(4):
        if step % 2 == 0:
            rows = random.Random(step).randint(n_microbatches, 3 * n_microbatches)
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(rows, stages[0][0].in_features, generator=generator, dtype=torch.double).cuda()
        with torch.no_grad():
            target = nn.Sequential(*stages)(batch) + 1
        for stage in stages:
            stage.zero_grad()
        alone, losses, output = train_alone(copy.deepcopy(stages), nn.MSELoss(), batch, target, n_microbatches)
        mine = []
        result = schedule.step(batch, target=target, losses=mine)
        where = f"{context}, step {step}, rank {rank}"
        for index, owner in enumerate(owners):
            if owner == rank:
                assert_same_gradients(stages[index], alone[index], f"{where}, stage {index}", tolerance=1e-9)
        if owners[-1] == rank:
            torch.testing.assert_close(torch.stack(mine), torch.stack(losses), msg=where)
            torch.testing.assert_close(result, output, msg=where)
    evaluated = schedule.eval(batch, target=target)
    assert (evaluated is None) == (owners[-1] != rank), context


def _train_by_every_schedule(rank, world_size, seed):
    for number, name in enumerate(SINGLE + MULTI):
        rng = random.Random(seed + number)
        num_stages = world_size * (1 if name in SINGLE else 2)
        n_microbatches = 2 * world_size + 2
        stages = [stage.cuda() for stage in random_stages(rng, num_stages, torch.double)]
        schedule, owners = _schedule(name, stages, n_microbatches, rank, world_size)
        _compare(schedule, stages, owners, rank, n_microbatches, f"seed {seed + number}, {name}")


WAYS = ["nccl", "ucx", "one queue", "torch's NCCL"]


def _run(fn, placement, way, **kwargs):
    env = {"ucx": {"FARANDOLE_CUDA_MESSAGES": "ucx"}, "one queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}.get(way, {})
    backend = "cpu:gloo,cuda:nccl" if way.startswith("torch") else "farandole"
    run_on_gpus(fn, placement, backend=backend, timeout=100, env=env, **kwargs)


@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_trains_as_one_process_does(peers, way):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    _run(_train_by_every_schedule, peers, way, seed=seed)


def _wait_for_the_device(rank, world_size):
    """In each forward for all that the device was given, as when CUDA loads a kernel or frees memory."""
    for name in SINGLE + MULTI:
        num_stages = world_size * (1 if name in SINGLE else 2)
        n_microbatches = 2 * world_size + 2
        stages = [nn.Linear(4, 4).cuda() for _ in range(num_stages)]
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: torch.cuda.synchronize())
        schedule, _ = _schedule(name, stages, n_microbatches, rank, world_size)
        batch = torch.ones(n_microbatches, 4, device="cuda")
        for _ in range(3):
            schedule.step(batch, target=batch)


@pytest.mark.parametrize("way", WAYS)
def test_a_stage_may_wait_for_the_device(peers, way):
    _run(_wait_for_the_device, peers, way)


class _Structured(nn.Module):
    """Returns more than tensors."""

    def __init__(self, is_last):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.is_last = is_last

    def forward(self, x):
        hidden, note = (x["hidden"], x["note"]) if isinstance(x, dict) else (x, "begin")
        hidden = self.linear(hidden)
        return hidden if self.is_last else {"hidden": hidden, "note": note + "+", "none": None}


def _hand_structures_over(rank, world_size):
    torch.manual_seed(3)
    stages = [_Structured(i == world_size - 1).cuda() for i in range(world_size)]
    schedule = ScheduleGPipe(PipelineStage(stages[rank], rank, world_size, "cuda"), 4, nn.MSELoss())
    batch = torch.ones(8, 8, device="cuda")
    for _ in range(3):
        for stage in stages:
            stage.zero_grad()
        schedule.step(batch, target=batch)
    x = batch
    for stage in stages:
        x = stage.linear(x)
    expected = torch.autograd.grad(nn.functional.mse_loss(x, batch), stages[rank].linear.weight)[0]
    torch.testing.assert_close(stages[rank].linear.weight.grad, expected)


def test_structures_pass_between_stages(peers):
    run_on_gpus(_hand_structures_over, peers)


class _Raising(nn.Module):
    def __init__(self, raises):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.raises = raises

    def forward(self, x):
        if self.raises:
            raise ValueError("as asked")
        return self.linear(x)


def _fail_once(rank, world_size, fails_in):
    stage = _Raising(False).cuda()
    schedule = Schedule1F1B(PipelineStage(stage, rank, world_size, "cuda"), 4, nn.MSELoss())
    batch = torch.ones(8, 4, device="cuda")
    for step in range(4):
        stage.raises = rank == 1 and step == fails_in
        if step == fails_in:
            with pytest.raises(RuntimeError, match=r"rank 1.*ValueError: as asked"):
                schedule.step(batch, target=batch)
        else:
            stage.zero_grad()
            schedule.step(batch, target=batch)
            assert stage.linear.weight.grad.isfinite().all()


@pytest.mark.parametrize("fails_in", [0, 2])
def test_a_stage_that_raises_fails_the_step_everywhere_and_the_next_one_runs(peers, fails_in):
    run_on_gpus(_fail_once, peers, fails_in=fails_in)


def _steady_steps(rank, world_size):
    stages = [nn.Sequential(nn.Linear(256, 256), nn.GELU()).cuda() for _ in range(2 * world_size)]
    mine = [PipelineStage(stages[i], i, 2 * world_size, "cuda") for i in range(rank, 2 * world_size, world_size)]
    schedule = ScheduleInterleavedZeroBubble(mine, 4 * world_size, nn.MSELoss())
    batch = torch.randn(64 * world_size, 256, device="cuda")
    for _ in range(3):
        schedule.step(batch, target=batch)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises
    for _ in range(3):
        schedule.step(batch, target=batch)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    dist.barrier()
    first_peak = torch.cuda.max_memory_allocated()
    for _ in range(20):
        schedule.step(batch, target=batch)
    torch.cuda.synchronize()
    return held, torch.cuda.memory_allocated(), first_peak, torch.cuda.max_memory_allocated()


def test_a_steady_step_waits_for_no_device_and_memory_stays_flat(peers):
    for held, later, first_peak, last_peak in run_on_gpus(_steady_steps, peers):
        assert later <= held + (1 << 20)
        assert last_peak <= 1.1 * first_peak + (1 << 20)
