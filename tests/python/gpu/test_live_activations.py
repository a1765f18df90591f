"""What a step holds on the device's allocator: the microbatches that are between forward and backward, and no more."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, get_schedule_class, plan, simulate
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(120)]
WIDTH, ROWS, LAYERS = 256, 1024, 24  # of a microbatch, 1 MiB for each layer


def _activation_bytes(stage, x):
    """What one microbatch holds from its forward on, beside its input."""
    stage(x)  # what is allocated once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    held = stage(x)
    size = torch.cuda.memory_allocated() - before
    del held
    return size


def _peaks(rank, world_size, name):
    """By number of microbatches: how many of them a step has held, as measured and as the plan says."""
    peaks = {}
    for n_microbatches in (8, 16):
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        stage = nn.Sequential(*layers).cuda()
        schedule = get_schedule_class(name)(
            PipelineStage(stage, rank, world_size, "cuda"), n_microbatches, nn.MSELoss()
        )
        batch = torch.randn(ROWS * n_microbatches, WIDTH, device="cuda")
        size = _activation_bytes(stage, batch[:ROWS].clone().requires_grad_())
        for _ in range(3):  # receive buffers and gradients are there
            schedule.step(batch, target=batch, return_outputs=False)
        torch.cuda.synchronize()
        dist.barrier()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        schedule.step(batch, target=batch, return_outputs=False)
        torch.cuda.synchronize()
        held = (torch.cuda.max_memory_allocated() - before) / size
        computed = plan(name, world_size, n_microbatches, num_ranks=world_size)
        simulated = simulate(computed, [(1, 2, 1, 1)] * world_size)
        peaks[n_microbatches] = held, simulated.ranks[rank].peak_live_activations
        dist.barrier()
    return peaks


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_the_peak_is_that_of_as_many_activations_as_the_formula_counts(peers, name, record_property):
    for rank, peaks in enumerate(run_on_gpus(_peaks, peers, name=name)):
        record_property(f"rank {rank}", str(peaks))
        for n_microbatches, (held, expected) in peaks.items():
            # Beside activations: what backward computes with, and gradients that have not left.
            assert expected - 0.5 <= held <= expected + 0.75, (rank, n_microbatches, peaks)
        growth = peaks[16][0] - peaks[8][0]
        if name == "GPipe":
            assert 7.5 <= growth <= 8.5, (rank, peaks)
        else:
            assert abs(growth) <= 0.25, (rank, peaks)
