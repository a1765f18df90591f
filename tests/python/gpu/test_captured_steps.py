"""Steps captured in a CUDA graph: what is replayed computes what a step does, from what its tensors then hold."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.bench._gpus import Placement
from farandole.pipelining import PipelineStage, ScheduleGPipe, get_schedule_class, plan
from gpu.graphs import capture
from pipelining.pipeline_support import assert_same_gradients, train_alone
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]
WIDTH, ROWS = 16, 12
SINGLE = ["GPipe", "1F1B", "ZB-H1"]
MULTI = ["Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"]
TORCHS = "cpu:gloo,cuda:nccl"


def _stages(num_stages, device):
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device, torch.double) for _ in range(num_stages)]


def _schedule(name, stages, n_microbatches, rank, world_size, device):
    owners = plan(name, len(stages), n_microbatches, num_ranks=world_size).rank_of_stage
    mine = [PipelineStage(stages[i], i, len(stages), device) for i, owner in enumerate(owners) if owner == rank]
    return get_schedule_class(name)(mine if name in MULTI else mine[0], n_microbatches, nn.MSELoss()), owners


def _data(seed, device):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.double).to(device) for _ in range(2)]


def _replay_and_compare(rank, world_size, names, device="cuda"):
    for name in names:
        _compare(name, rank, world_size, device)
        dist.barrier()


def _compare(name, rank, world_size, device):
    n_microbatches = 2 * world_size + 1
    stages = _stages(world_size * (2 if name in MULTI else 1), device)
    schedule, owners = _schedule(name, stages, n_microbatches, rank, world_size, device)
    batch, target = _data(0, device)
    results = {}

    def step():
        for stage in stages:
            stage.zero_grad(set_to_none=False)
        losses = []
        results["output"] = schedule.step(batch, target=target, losses=losses)
        results["losses"] = losses

    graph = capture(step)
    shown = dict(results) if device == "cuda" else results
    for seed in range(1, 5):
        for given, new in zip((batch, target), _data(seed, device)):
            given.copy_(new)
        graph.replay()
        alone, losses, output = train_alone(stages, nn.MSELoss(), batch, target, n_microbatches)
        where = f"{name}, data {seed}, rank {rank}"
        for index, owner in enumerate(owners):
            if owner == rank:
                assert_same_gradients(stages[index], alone[index], where, tolerance=1e-9)
        if owners[-1] == rank:
            torch.testing.assert_close(torch.stack(shown["losses"]), torch.stack(losses), msg=where)
            torch.testing.assert_close(shown["output"], output, msg=where)
        if seed == 2:  # steps beside the graph, of the same and of other shapes and weights, change nothing of it
            step()
            schedule.step(batch[:7].clone(), target=target[:7].clone(), loss_weights=[3.0] * n_microbatches)
            schedule.step(batch[:7].clone(), target=target[:7].clone(), loss_weights=list(range(1, n_microbatches + 1)))
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("backend", ["farandole", TORCHS])
def test_a_replayed_step_has_the_gradients_of_its_new_inputs(peers, backend):
    run_on_gpus(_replay_and_compare, peers, backend=backend, timeout=120, names=SINGLE + MULTI)


def test_a_step_of_one_rank_is_captured_too():
    run_on_gpus(_replay_and_compare, Placement(1), names=["GPipe", "Interleaved1F1B"])


def _train_replayed(rank, world_size, device="cuda"):
    """Whole training steps in the graph, optimizer included, beside those of one process."""
    n_microbatches = 4
    stages = _stages(world_size, device)
    schedule, _ = _schedule("1F1B", stages, n_microbatches, rank, world_size, device)
    mine, alone = stages[rank], copy.deepcopy(stages)
    batch, target = _data(0, device)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(nn.ModuleList(alone).parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=False)
        schedule.step(batch, target=target, return_outputs=False)
        optimizer.step()

    def step_alone():
        reference.zero_grad()
        x = batch
        for stage in alone:
            x = stage(x)
        nn.functional.mse_loss(x, target).backward()
        reference.step()

    graph = capture(step)
    # The warm-up has trained; what is captured has not run.
    for _ in range(3 if device == "cuda" else 0):
        step_alone()
    for seed in range(1, 6):
        for given, new in zip((batch, target), _data(seed, device)):
            given.copy_(new)
        graph.replay()
        step_alone()
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter, alone[rank].get_parameter(name), rtol=1e-9, atol=1e-12)
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    del graph


def test_training_by_replays_goes_as_training_does(peers):
    run_on_gpus(_train_replayed, peers)


def _capture_too_early(rank, world_size, warmups):
    stages = _stages(world_size, "cuda")
    schedule, _ = _schedule("1F1B", stages, 4, rank, world_size, "cuda")
    batch, target = _data(0, "cuda")
    for _ in range(warmups):
        schedule.step(batch, target=target)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    raised = []
    try:
        with torch.cuda.graph(graph):
            try:
                schedule.step(batch, target=target)
            except RuntimeError as error:
                raised.append(str(error))
    except RuntimeError as error:  # of what remains of the capture
        raised.append(str(error))
    assert (
        "captures a step in a graph, expected two steps with the same shapes outside of a graph before it" in raised[0]
    )
    torch.cuda.synchronize()
    for stage in stages:
        stage.zero_grad()
    for _ in range(2):
        for stage in stages:
            stage.zero_grad()
        schedule.step(batch, target=target)
    alone, _, _ = train_alone(stages, nn.MSELoss(), batch, target, 4)
    assert_same_gradients(stages[rank], alone[rank], f"rank {rank}", tolerance=1e-9)


@pytest.mark.parametrize("warmups", [0, 1])
def test_a_capture_before_ranks_are_connected_is_refused_and_the_next_step_runs(peers, warmups):
    run_on_gpus(_capture_too_early, peers, warmups=warmups)


def _capture_on_one_rank(rank, world_size):
    stages = _stages(world_size, "cuda")
    schedule, _ = _schedule("1F1B", stages, 4, rank, world_size, "cuda")
    batch, target = _data(0, "cuda")
    for _ in range(3):
        schedule.step(batch, target=target)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    raised = []
    try:
        with torch.cuda.graph(graph) if rank == 0 else torch.no_grad(), torch.enable_grad():
            try:
                schedule.step(batch, target=target)
            except RuntimeError as error:
                raised.append(str(error))
    except RuntimeError as error:
        raised.append(str(error))
    assert "do not run the same step" in raised[0] and "captured in a graph" in raised[0], raised


def test_a_capture_on_one_rank_only_is_refused_on_all(peers):
    run_on_gpus(_capture_on_one_rank, peers)


def _capture_what_cannot_be(rank, world_size, match, **options):
    stage = PipelineStage(_stages(world_size, "cuda")[rank], rank, world_size, "cuda")
    schedule = ScheduleGPipe(stage, 4, nn.MSELoss(), **options)
    batch, target = _data(0, "cuda")
    for _ in range(3):
        schedule.step(batch, target=target)
    torch.cuda.synchronize()
    with pytest.raises(NotImplementedError, match=match), torch.cuda.graph(torch.cuda.CUDAGraph()):
        batch.clone()  # a graph of nothing warns
        schedule.step(batch, target=target)
    torch.cuda.synchronize()
    schedule.step(batch, target=target)


def test_what_a_graph_would_not_replay_is_refused_by_name_and_the_next_step_runs(peers):
    match = r"check_for_nan_in_loss_and_grad is True .* captured in a CUDA graph"
    run_on_gpus(_capture_what_cannot_be, peers, match=match, check_for_nan_in_loss_and_grad=True)


def test_so_is_a_capture_over_ucx(peers):
    match = r"FARANDOLE_CUDA_MESSAGES is 'ucx' .* expected 'nccl'"
    run_on_gpus(_capture_what_cannot_be, peers, match=match, env={"FARANDOLE_CUDA_MESSAGES": "ucx"})
