#!/usr/bin/env python
"""A schedule of one's own, as a Python function: a template.

1F1B with a warm-up that is twice as long, as PiPPy has it: more activations, but messages have a whole forward's time
to arrive. (`plan("1F1B", ..., warmup_per_stage=2)` is the same.) docs/schedules.md explains the steps.

    torchrun --nproc-per-node 2 examples/own_schedule.py
"""

import torch
import torch.distributed as dist

from farandole.pipelining import PipelineScheduleSingle, PipelineStage, Plan, lower, simulate, validate

STAGES, MICROBATCHES, WIDTH = 2, 8, 32


def eager_1f1b(num_stages: int, n_microbatches: int, *, forward_only: bool = False) -> Plan:
    """For each rank its actions in order: stage, kind (F, B, or I and W), microbatch. No communication."""
    ranks = []
    for stage in range(num_stages):
        warm_up = min(2 * (num_stages - 1 - stage), n_microbatches)
        forwards = [f"{stage}F{microbatch}" for microbatch in range(n_microbatches)]
        backwards = [] if forward_only else [f"{stage}B{microbatch}" for microbatch in range(n_microbatches)]
        turns = zip(forwards[warm_up:], backwards, strict=False)
        rest = backwards[n_microbatches - warm_up :]
        steady = forwards[warm_up:] if forward_only else [action for turn in turns for action in turn]
        ranks.append(forwards[:warm_up] + steady + rest)
    return Plan.from_actions(ranks, rank_of_stage=list(range(num_stages)), num_microbatches=n_microbatches)


class ScheduleEager1F1B(PipelineScheduleSingle):
    def compute_plan(self, *, forward_only: bool) -> Plan:
        stage = self._stages[0]
        return eager_1f1b(stage.num_stages, self._n_microbatches, forward_only=forward_only)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("farandole")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        lowered = lower(eager_1f1b(size, MICROBATCHES))  # inserts the communication, and proves the result
        validate(lowered, "fifo_per_edge")
        print(simulate(lowered, [(1.0, 2.0, 1.0, 1.0)] * size).draw())

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(size)]
    batch, target = torch.randn(4 * MICROBATCHES, WIDTH), torch.randn(4 * MICROBATCHES, WIDTH)
    stage = PipelineStage(layers[rank], rank, size, "cpu")
    schedule = ScheduleEager1F1B(stage, MICROBATCHES, torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.5)
    for step in range(5):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(batch, target=target, losses=losses)
        optimizer.step()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
