"""Messages go on streams of their own: who waits for a late message computes what does not need it."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.bench._gpus import sleep_cycles
from farandole.pipelining import PipelineStage, ScheduleGPipe
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(120)]
SLOW = 0.5  # seconds
NUMEL = 1 << 20


def _compute_beside_a_receive(rank, world_size):
    """Milliseconds until rank 1 has computed what it needs no message for, and until the message is there."""
    x, y = torch.ones(NUMEL, device="cuda"), torch.empty(NUMEL, device="cuda")
    a = torch.randn(512, 512, device="cuda")
    cycles = sleep_cycles(SLOW)
    for _ in range(2):
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(y, 0)
        a @ a
    torch.cuda.synchronize()
    dist.barrier()
    start, computed, came = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    if rank == 0:
        torch.cuda._sleep(cycles)
        dist.send(x * 3, 1)
    elif rank == 1:
        receiving = dist.irecv(y, 0)
        for _ in range(10):
            a @ a
        computed.record()
        receiving.wait()
        total = y.sum()
        came.record()
    torch.cuda.synchronize()
    dist.barrier()
    if rank != 1:
        return None
    assert total.item() == 3 * NUMEL
    return start.elapsed_time(computed), start.elapsed_time(came)


def test_a_receive_whose_sender_is_late_delays_no_other_compute(peers, record_property):
    computed, came = run_on_gpus(_compute_beside_a_receive, peers)[1]
    record_property("computed and came, ms", f"{computed:.1f} {came:.1f}")
    assert came > SLOW * 1e3 / 4  # whatever its clock did
    assert computed < came / 3


class _Timed(nn.Module):
    """Sleeps in its first forward, and notes when each of its forwards has come to its end."""

    def __init__(self, cycles):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.cycles = cycles
        self.ends = []

    def forward(self, x):
        if self.cycles and not self.ends:
            torch.cuda._sleep(self.cycles)
        y = self.linear(x)
        self.ends.append(torch.cuda.Event(enable_timing=True))
        self.ends[-1].record()
        return y


def _send_to_a_slow_stage(rank, world_size):
    """Milliseconds until this rank's forwards have ended, and its step; and seconds until the host had issued it."""
    stage = _Timed(0).cuda()
    schedule = ScheduleGPipe(PipelineStage(stage, rank, world_size, "cuda"), 4, nn.MSELoss())
    batch = torch.randn(256, 64, device="cuda")
    cycles = sleep_cycles(SLOW)
    for _ in range(3):
        schedule.step(batch, target=batch, return_outputs=False)
    torch.cuda.synchronize()
    stage.ends.clear()
    stage.cycles = cycles if rank == world_size - 1 else 0
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    began = time.monotonic()
    schedule.step(batch, target=batch, return_outputs=False)
    issued = time.monotonic() - began
    end.record()
    torch.cuda.synchronize()
    dist.barrier()
    return start.elapsed_time(stage.ends[-1]), start.elapsed_time(end), issued


def test_sends_to_a_busy_stage_hold_up_neither_compute_nor_the_host(peers, record_property):
    results = run_on_gpus(_send_to_a_slow_stage, peers)
    record_property("forwards, step (ms), issued (s)", str(results))
    forwards, step, issued = results[0]
    assert step > SLOW * 1e3 / 4  # its gradients come late
    assert forwards < step / 3
    assert issued < step / 2e3
