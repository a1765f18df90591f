"""Modules that become what they are after their stage was made: initialized, wrapped, sharded, replaced."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchsDataParallel

from farandole.ddp import DistributedDataParallel
from farandole.pipelining import PipelineStage, get_schedule_class, plan
from pipelining.pipeline_support import BACKENDS, train_alone
from pipelining.step_support import seeded_random
from support.devices import DEVICE
from support.processes import run_ranks

COPIES, RANKS, WIDTH, N = 2, 2, 6, 4
SCHEDULES = ["1F1B", "ZB-H1", "Interleaved1F1B", "ZBV"]
HOWS = ["initialized", "wrapped", "torchs", "sharded", "replaced", "parallel"]


def _module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def _late(module: nn.Module, how: str, mesh: Any) -> nn.Module:
    """What the module is by the first step, or after it."""
    group = mesh.get_group()
    if how == "wrapped":
        return DistributedDataParallel(module, process_group=group)
    if how == "torchs":
        return TorchsDataParallel(module, process_group=group)
    if how == "sharded":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(module, mesh=mesh)
    if how == "parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False)})
    return copy.deepcopy(module) if how == "replaced" else module


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(_whole(output), target)


def _train(
    rank: int, world_size: int, how: str, name: str, seed: int, begins_on_meta: bool, after_a_step: bool
) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    where = f"seed {seed}, {how}, {name}, begins_on_meta={begins_on_meta}, after_a_step={after_a_step}, rank {rank}"
    meshes = init_device_mesh(DEVICE, (COPIES, RANKS), mesh_dim_names=("copy", "pipeline"))
    place, copy_of = meshes["pipeline"].get_local_rank(), meshes["copy"].get_local_rank()
    num_stages = RANKS * (2 if name in SCHEDULES[2:] else 1)
    torch.manual_seed(seed)
    plain = [_module() for _ in range(num_stages)]
    owners = plan(name, num_stages, N, num_ranks=RANKS).rank_of_stage
    mine = [i for i, owner in enumerate(owners) if owner == place]
    stages = [
        PipelineStage(
            copy.deepcopy(plain[i]).to("meta" if begins_on_meta else DEVICE),
            *(i, num_stages, DEVICE),
            group=meshes["pipeline"].get_group(),
        )
        for i in mine
    ]
    schedule = get_schedule_class(name)(stages if num_stages > RANKS else stages[0], N, _loss)

    def step(data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        batch, target = data[0 if how == "parallel" else copy_of]
        losses: list[torch.Tensor] = []
        schedule.step(*[batch] if 0 in mine else [], target=target, losses=losses)

    for stage in stages:
        if begins_on_meta:
            stage.submod.to_empty(device=DEVICE)
            stage.submod.load_state_dict(plain[stage.stage_index].state_dict())
    data = [(torch.randn(3 * N, WIDTH), torch.randn(3 * N, WIDTH)) for _ in range(COPIES)]
    if after_a_step:
        step(data)
    for stage in stages:
        if how != "replaced" or place == 1:  # on one rank only
            stage.submod = _late(stage.submod, how, meshes["copy"])
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        step(data)
    alone = [train_alone(plain, nn.functional.mse_loss, batch, target, N)[0] for batch, target in data]
    for stage in stages:
        each = [dict(one[stage.stage_index].named_parameters()) for one in alone]
        for parameter_name, parameter in stage.submod.named_parameters():
            short = parameter_name.removeprefix("module.")
            expected = each[copy_of][short].grad
            if how in ("wrapped", "torchs", "sharded"):  # a mean over the copies
                expected = torch.stack([one[short].grad for one in each]).mean(0)
            elif how == "parallel":  # both copies are parts of one, and have one batch
                expected = each[0][short].grad
            assert parameter.grad is not None, f"{where}: {parameter_name} has no gradient"
            assert torch.allclose(_whole(parameter.grad), expected, rtol=1e-4, atol=1e-6), f"{where}: {parameter_name}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_modules_that_change_after_their_stage_is_made_are_run_as_they_are(backend: str, how: str) -> None:
    rng: random.Random = seeded_random()
    given: dict[str, Any] = {"name": rng.choice(SCHEDULES), "seed": rng.randrange(2**31)}
    # In place torch shards or makes parallel what no step has run: its forward is another one by then.
    after_a_step = how not in ("initialized", "sharded", "parallel") and rng.random() < 0.5
    given |= {"after_a_step": after_a_step, "begins_on_meta": how == "initialized" or rng.random() < 0.5}
    run_ranks(_train, COPIES * RANKS, backend, timeout=120, how=how, **given)
