"""One rank of several without the others, over torch's "fake" backend; torch's pipelining is what it is compared with."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, get_schedule_class
from support.devices import DEVICE
from support.processes import run_ranks

RANKS, WIDTH, N = 4, 6, 8


def _stages(kind: Any, mine: list[int], num_stages: int, **declared: Any) -> list[Any]:
    torch.manual_seed(1)
    return [kind(nn.Linear(WIDTH, WIDTH), index, num_stages, torch.device(DEVICE), **declared) for index in mine]


def _run_dry(rank: int, world_size: int, pretended: int) -> None:
    from torch.distributed.pipelining import PipelineStage as TorchsStage
    from torch.distributed.pipelining.schedules import get_schedule_class as torchs_class
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=pretended, world_size=RANKS, store=FakeStore())
    example = torch.zeros(2, WIDTH)
    batch, target = torch.randn(2 * N, WIDTH), torch.randn(2 * N, WIDTH)
    for name in ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"):
        is_multi = name in ("Interleaved1F1B", "ZBVZeroBubble")
        second = 2 * RANKS - 1 - pretended if name == "ZBVZeroBubble" else RANKS + pretended
        mine, num_stages = ([pretended, second], 2 * RANKS) if is_multi else ([pretended], RANKS)
        last = num_stages - 1 in mine
        seen = []
        for kind, named, output in (
            (TorchsStage, torchs_class, example.clone().requires_grad_()),
            (PipelineStage, get_schedule_class, example),
        ):
            stages = _stages(kind, mine, num_stages, input_args=(example,), output_args=(output,))
            schedule = named(name)(stages if is_multi else stages[0], N, nn.MSELoss())
            losses: list[torch.Tensor] | None = [] if last else None
            for _ in range(2):
                result = schedule.step(*[batch] if 0 in mine else [], target=target if last else None, losses=losses)
            graded = all(p.grad is not None and p.grad.shape == p.shape for s in stages for p in s.submod.parameters())
            assert graded or kind is TorchsStage, f"{name}, rank {pretended}"  # torch's ZBV leaves out some
            seen.append((losses and len(losses), None if result is None else result.shape))
        assert seen[0] == seen[1], f"{name}, rank {pretended}: {seen}"
    stages = _stages(PipelineStage, [pretended], RANKS, input_args=(example,))
    schedule = get_schedule_class("1F1B")(stages[0], N, nn.MSELoss())
    if pretended == RANKS - 1:
        schedule.step(target=target)  # the last stage hands nothing over
    else:
        text = (
            f'output_args of stage {pretended} is None, expected example tensors of a microbatch: the backend .* "fake"'
        )
        with pytest.raises(ValueError, match=text):
            schedule.step(*[batch] if pretended == 0 else [])
    dist.destroy_process_group()


@pytest.mark.sample(2)
@pytest.mark.parametrize("pretended", range(RANKS))
def test_a_rank_runs_without_the_others_over_the_fake_backend(pretended: int) -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < (2, 15):
        pytest.skip("torch's own pipelining runs dry since 2.15")
    run_ranks(_run_dry, 1, None, timeout=120, pretended=pretended)
