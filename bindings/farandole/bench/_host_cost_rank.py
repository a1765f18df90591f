"""A rank of the benchmark of what the executor itself costs: its messages are done as soon as they are posted."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from farandole import _C, pipelining
from farandole.bench._actions_rank import ROWS, WIDTH, run_bare
from farandole.bench._pipeline_rank import MICROBATCHES, Case
from farandole.bench._ranks import Rank


def time_host(rank: Rank, case: Case, count: int) -> tuple[list[float], list[float], int]:
    """Runs on both ranks, without a message between them: as :func:`_actions_rank.time_steps`.

    The group is torch's fake one, which posts nothing: what is received is what the buffers held. So nobody waits, and
    (step - bare) / actions is what the executor costs.
    """
    if case not in rank.state:
        rank.state[case] = _prepare(rank, case)
    executor, modules, arguments, bare_loop, actions = rank.state[case]
    steps: list[float] = []
    bare: list[float] = []
    for _ in range(count):
        for fn, taken in ((lambda: executor.step(**arguments), steps), (bare_loop, bare)):
            for module in modules:
                module.zero_grad(set_to_none=True)
            start = time.perf_counter()
            fn()
            taken.append(time.perf_counter() - start)
    return steps, bare, actions


def _prepare(rank: Rank, case: Case) -> tuple[Any, ...]:
    plan = pipelining.lower(case.plan())
    mine = {index: nn.Linear(WIDTH, WIDTH) for index, owner in enumerate(plan.rank_of_stage) if owner == rank.rank}
    last = plan.num_stages - 1
    declared = [([ROWS, WIDTH], torch.float32)]
    executor = _C.PipelineExecutor(
        plan=plan,
        rank=rank.rank,
        group=rank.groups["fake"],
        stages=[
            _C.PipelineStage(
                index=index,
                is_first=index == 0,
                is_last=index == last,
                module=module,
                loss_fn=nn.functional.mse_loss,
                declared_inputs=None if index == 0 else declared,
                declared_outputs=None if index == last else declared,
                outputs_to={},
                require_grad_sync=None,
                abandon_grad_sync=None,
            )
            for index, module in mine.items()
        ],
        loss_scale=1.0,
        description="host cost",
        rank_name=f"rank {rank.rank}",
        shapes_declared=True,
    )
    rows = [torch.ones(ROWS, WIDTH) for _ in range(MICROBATCHES)]
    arguments = dict(
        args=[(row,) for row in rows],
        kwargs=None,
        targets=rows,
        loss_kwargs=None,
        outputs=None,
        losses=None,
        relearn=False,
    )
    actions = plan.actions[rank.rank]
    splits = any("W" in action for action in actions if "WAIT" not in action)
    return executor, list(mine.values()), arguments, lambda: run_bare(mine, last, splits=splits), len(actions)
