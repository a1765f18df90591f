"""Stages that are no chain: skip connections, encoder and decoder, two copies of a model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.ddp import DistributedDataParallel
from farandole.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    ScheduleDualPipe,
    ScheduleFromPlan,
    ScheduleGPipe,
    auto_plan,
    get_schedule_class,
    lower,
    plan,
)
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, train_alone
from pipelining.plan_support import CHANNELS
from support.devices import DEVICE
from support.processes import run_ranks

WIDTH = 6


class Down(nn.Module):
    """Halves the width; returns what goes on, and what skips to the other side."""

    def __init__(self, width: int):
        super().__init__()
        self.keep, self.go = nn.Linear(width, width), nn.Linear(width, width // 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        skipped = torch.tanh(self.keep(x))
        return torch.tanh(self.go(skipped)), skipped, torch.arange(len(x))


class Up(nn.Module):
    """Joins what came along with what skipped the stages between."""

    def __init__(self, width: int):
        super().__init__()
        self.go = nn.Linear(width // 2, width)

    def forward(self, skipped: torch.Tensor, numbers: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.go(x) * skipped + numbers[:, None]


class Net(nn.Module):
    """The same in one process: 0 -> 1 -> 2 -> 3, and 0 -> 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        half = WIDTH // 2
        stages = [Down(WIDTH), nn.Linear(half, half), nn.Sequential(nn.Tanh(), nn.Linear(half, half)), Up(WIDTH)]
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skipped, numbers = self.stages[0](x)
        for stage in self.stages[1:3]:
            x = stage(x)
        return self.stages[3](skipped, numbers, x)


EDGES = [(0, 1, [0]), (0, 3, [1, 2]), (1, 2), (2, 3)]


def _train_with_a_skip(rank: int, world_size: int) -> None:
    names = ["1F1B", "ZB-H1"] if world_size == 4 else ["Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"]
    for name in names:
        net = Net()
        alone = copy.deepcopy(net)
        owners = plan(name, 4, 5, num_ranks=world_size).rank_of_stage
        stages = [PipelineStage(net.stages[i], i, 4, DEVICE) for i, owner in enumerate(owners) if owner == rank]
        given = stages[0] if world_size == 4 else stages
        schedule = get_schedule_class(name)(given, 5, nn.MSELoss(), edges=EDGES)
        for rows in (10, 10, 13):
            batch, target = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
            net.zero_grad()
            alone.zero_grad()
            trained, losses, output = train_alone([alone], nn.MSELoss(), batch, target, 5)
            mine: list[Any] = []
            result = schedule.step(batch, target=target, losses=mine)
            for index, owner in enumerate(owners):
                if owner == rank:
                    expected = trained[0].stages[index]
                    assert_same_gradients(net.stages[index], expected, f"{name}, stage {index}", tolerance=2e-5)
            if owners[3] == rank:
                assert torch.equal(torch.stack(mine), torch.stack(losses)), name
                assert torch.equal(result, output), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_connection_that_skips_stages_trains_as_in_one_process(backend: str, world_size: int) -> None:
    run_ranks(_train_with_a_skip, world_size, backend)


def _train_by_the_plan_that_was_found(rank: int, world_size: int) -> None:
    net = Net()
    # Stage 1 is long: what has the same time for each stage is not what is fastest.
    made = auto_plan(4, 5, [(1, 2, 1, 1), (3, 6, 3, 3), (1, 2, 1, 1), (1, 2, 1, 1)], num_ranks=world_size, edges=EDGES)
    stages = [
        PipelineStage(net.stages[i], i, 4, DEVICE) for i, owner in enumerate(made.plan.rank_of_stage) if owner == rank
    ]
    outputs_to = {(edge[0], edge[1]): edge[2] for edge in EDGES if len(edge) == 3}
    schedule = ScheduleFromPlan(stages, made.plan, nn.MSELoss(), outputs_to=outputs_to)
    for rows in (10, 13):
        batch, target = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        net.zero_grad()
        trained, losses, _ = train_alone([copy.deepcopy(net)], nn.MSELoss(), batch, target, 5)
        mine: list[Any] = []
        schedule.step(batch, target=target, losses=mine)
        for stage in stages:
            index = stage.stage_index
            assert_same_gradients(net.stages[index], trained[0].stages[index], made.chosen.name, tolerance=2e-5)
        if 3 in [stage.stage_index for stage in stages]:
            assert torch.equal(torch.stack(mine), torch.stack(losses)), made.chosen.name


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_plan_that_was_found_for_a_graph_trains_it(world_size: int) -> None:
    run_ranks(_train_by_the_plan_that_was_found, world_size, BACKENDS[-1])


def _load_graphs(rank: int, world_size: int, folder: str) -> None:
    net = Net()
    made = lower(plan("ZBV", 4, 5, num_ranks=2, edges=EDGES), CHANNELS[0])
    stages = [PipelineStage(net.stages[i], i, 4, DEVICE) for i, owner in enumerate(made.rank_of_stage) if owner == rank]
    file = Path(folder) / f"zbv.{rank}.csv"
    file.write_text(made.to_csv())
    with pytest.raises(
        ValueError, match=r"edges is \[\(0, 1\), \(0, 2\)\], expected None or those that the text names"
    ):
        PipelineScheduleMulti(stages, 5, nn.MSELoss(), edges=[(0, 1), (0, 2)]).load_csv(file, "compute_comms")
    schedule = PipelineScheduleMulti(stages, 5, nn.MSELoss(), edges=EDGES)
    schedule.load_csv(file, "compute_comms")
    batch, target = torch.randn(10, WIDTH), torch.randn(10, WIDTH)
    trained, _, _ = train_alone([copy.deepcopy(net)], nn.MSELoss(), batch, target, 5)
    schedule.step(batch, target=target)
    for stage in stages:
        index = stage.stage_index
        assert_same_gradients(net.stages[index], trained[0].stages[index], f"stage {index}", tolerance=2e-5)

    # A schedule knows the graph of its two copies, so that a file that does not say will do.
    model: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    two = [PipelineStage(model[i % 2], i, 4, DEVICE) for i in (rank, 3 - rank)]
    _, losses, _ = train_alone(model, nn.MSELoss(), batch[:8], target[:8], 4)
    both = plan("DualPipe", 4, 4, num_ranks=2)
    for lowered in (both, lower(both, CHANNELS[0])):
        for text in (lowered.to_csv(), "".join(",".join(row) + "\n" for row in lowered.actions)):
            file.write_text(text)
            dual = ScheduleDualPipe(two, 4, nn.MSELoss())
            dual.load_csv(file, "compute_comms" if lowered.has_communication else "compute_only")
            mine: list[Any] = []
            dual.step(batch[:8], target=target[:8], losses=mine)
            assert torch.equal(torch.stack(mine), torch.stack(losses[2:] if rank == 0 else losses[:2]))


def test_graphs_are_loaded_from_csv(tmp_path: Path) -> None:
    run_ranks(_load_graphs, 2, BACKENDS[-1], folder=str(tmp_path))


class Decoder(nn.Module):
    """Takes what the encoder made, of another shape, and what the decoder's stage before it made, and hands both on."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, memory: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return memory, torch.tanh(self.own(x) + self.cross(memory).mean(dim=1))


class Last(Decoder):
    def forward(self, memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().forward(memory, x)[1]


def _encode_and_decode(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    encoder = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh())
    embedding, middle, last = nn.Linear(WIDTH, WIDTH), Decoder(), Last()
    modules: list[nn.Module] = [encoder, embedding, middle, last]
    source, shifted, target = torch.randn(4, 3, WIDTH), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    alone = [copy.deepcopy(module) for module in modules]
    for i in range(4):
        memory, x = alone[2](alone[0](source[i : i + 1]), alone[1](shifted[i : i + 1]))
        (nn.functional.mse_loss(alone[3](memory, x), target[i : i + 1]) / 4).backward()
    for name in ("GPipe", "1F1B", "ZB-H1"):
        module = modules[rank]
        module.zero_grad()
        stage = PipelineStage(module, rank, 4, DEVICE)
        schedule = get_schedule_class(name)(stage, 4, nn.MSELoss(), edges=[(0, 2), (1, 2), (2, 3)])
        # Both stages that begin get the arguments of their own rank.
        schedule.step(source if rank == 0 else shifted, target=target)
        assert_same_gradients(module, alone[rank], name, tolerance=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_encoder_and_a_decoder_hand_on_tensors_of_several_shapes(backend: str) -> None:
    run_ranks(_encode_and_decode, 4, backend)


def _train_two_copies(rank: int, world_size: int) -> None:
    torch.manual_seed(7)
    p, n_microbatches = world_size, 2 * world_size
    model: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(p)]
    batch, target = torch.randn(2 * n_microbatches, WIDTH), torch.randn(2 * n_microbatches, WIDTH)
    alone, losses, output = train_alone(copy.deepcopy(model), nn.MSELoss(), batch, target, n_microbatches)
    groups = [dist.new_group(sorted({i, p - 1 - i})) for i in range(p)]
    copies = {rank: rank, 2 * p - 1 - rank: p - 1 - rank}  # of this rank: which stage of the model each one is
    wrapped = {
        index: DistributedDataParallel(copy.deepcopy(model[of_model]), process_group=groups[of_model])
        for index, of_model in sorted(
            copies.items(), key=lambda item: item[1]
        )  # both ranks of a group at the same time
    }
    stages = [PipelineStage(module, index, 2 * p, DEVICE) for index, module in wrapped.items()]
    schedule = ScheduleDualPipe(stages, n_microbatches, nn.MSELoss())
    for _ in range(2):
        for module in wrapped.values():
            module.zero_grad()
        mine: list[Any] = []
        result = schedule.step(batch, target=target, losses=mine)
        for index, of_model in copies.items():
            assert_same_gradients(wrapped[index].module, alone[of_model], f"stage {index}", tolerance=2e-5)
        half = n_microbatches // 2
        if rank == p - 1:
            assert torch.equal(torch.stack(mine), torch.stack(losses[:half]))
            assert torch.equal(result, output[: len(output) // 2])
        elif rank == 0:
            assert torch.equal(torch.stack(mine), torch.stack(losses[half:]))
        else:
            assert result is None and mine == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_copies_in_opposite_directions_train_as_one_model(world_size: int) -> None:
    run_ranks(_train_two_copies, world_size, BACKENDS[-1])


class Tanh2(nn.Module):
    """Two outputs, of which only the second is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.go = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 0, torch.tanh(self.go(x))


def _choose_in_both_copies(rank: int, world_size: int) -> None:
    torch.manual_seed(7)
    model: list[nn.Module] = [Tanh2(), nn.Linear(WIDTH, WIDTH)]
    batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    chain = [nn.Sequential(model[0].go, nn.Tanh()), model[1]]
    stages = [PipelineStage(model[i % 2], i, 4, DEVICE) for i in (rank, 3 - rank)]
    schedule = ScheduleDualPipe(stages, 4, nn.MSELoss(), edges=[(0, 1, [1])])
    mine: list[Any] = []
    schedule.step(batch, target=target, losses=mine)
    _, losses, _ = train_alone(chain, nn.MSELoss(), batch, target, 4)
    assert torch.equal(torch.stack(mine), torch.stack(losses[2:] if rank == 0 else losses[:2]))


def test_outputs_are_chosen_in_both_copies() -> None:
    run_ranks(_choose_in_both_copies, 2, "gloo")


def _refuse(rank: int, world_size: int) -> None:
    stage = PipelineStage(nn.Linear(2, 2), rank, 2, DEVICE)
    with pytest.raises(ValueError, match="1"):
        ScheduleGPipe(stage, 2, nn.MSELoss(), edges=[(1, 0)])
    forked = plan("GPipe", 2, 2, edges=[])
    with pytest.raises(ValueError, match="microbatch 0 ends in stages 0 and 1, expected one last stage for each"):
        ScheduleFromPlan([stage], forked, nn.MSELoss()).step(torch.ones(2, 2), target=torch.ones(2, 2))
    with pytest.raises(
        ValueError, match=r"outputs are chosen for \(0, 2\), expected an edge of the plan: \[\(0, 1\)\]"
    ):
        ScheduleFromPlan([stage], plan("GPipe", 2, 2), nn.MSELoss(), outputs_to={(0, 2): [0]})
    schedule = ScheduleGPipe(stage, 2, nn.MSELoss(), edges=[(0, 1, [3])])
    with pytest.raises(RuntimeError, match="stage 0, microbatch 0: the module returned 1 tensors, expected more"):
        schedule.step(torch.ones(2, 2), target=torch.ones(2, 2))


def test_graphs_that_cannot_run_are_refused() -> None:
    run_ranks(_refuse, 2, "gloo")
