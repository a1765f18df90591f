"""Rounds of farandole's data parallelism over CUDA tensors: what is left out, communication hooks, pipelines."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from farandole.pipelining import PipelineStage, get_schedule_class, plan
from gpu.replicas import Alone, assert_close, batches, layers, loss_of
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]


def _adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


class _Forked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, both=True):
        return self.first(x) + self.second(x) if both else self.first(x)


def _leave_out(rank, world_size, device="cuda"):
    """Rank 0 leaves a layer out in the second step."""
    for sharded, policy in itertools.product((False, True), ("zero_fill", "error")):
        torch.manual_seed(2)
        model = DistributedDataParallel(
            _Forked().double().to(device),
            unused_parameters=policy,
            use_distributed_optimizer=sharded,
            bucket_size=100,
        )
        for step in range(4):
            of_ranks = batches(step, world_size, device)
            model.zero_grad(set_to_none=False)
            both = rank != 0 or step != 1
            loss = loss_of(model(of_ranks[rank], both))
            if policy == "error" and step == 1:
                with pytest.raises(RuntimeError, match=r"rank 0 of the group.*second\.weight"):
                    loss.backward()
                continue
            loss.backward()
            losses = [loss_of(model.module(x, step != 1 or r != 0)) for r, x in enumerate(of_ranks)]
            want = torch.autograd.grad(sum(losses) / world_size, list(model.parameters()), allow_unused=True)
            for bucket in model._reducer.buckets():
                part = bucket.grads.numel() // (world_size if sharded else 1)
                begin, end = (rank * part, (rank + 1) * part) if sharded else (0, part)
                for index, offset, numel in bucket.slots:
                    first, last = max(offset, begin), min(offset + numel, end)
                    grad = torch.zeros(numel, device=device) if want[index] is None else want[index].flatten()
                    if first < last:
                        where = f"sharded {sharded}, {policy}, step {step}, parameter {index}, rank {rank}"
                        assert_close(bucket.grads[first:last], grad[first - offset : last - offset], where)


def test_what_one_rank_leaves_out_is_zero_or_an_error_on_all(world):
    run_on_gpus(_leave_out, world)


def _hook(rank, world_size, device="cuda", theirs="nccl"):
    group = dist.new_group(backend=theirs)
    for name in ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"):
        hook = getattr(default_hooks, name)
        ours = DistributedDataParallel(layers(device, torch.float), bucket_size=1000)
        reference = nn.parallel.DistributedDataParallel(layers(device, torch.float), process_group=group)
        ours.register_comm_hook(None, hook)
        reference.register_comm_hook(group, hook)
        for step in range(4):
            for model in (ours, reference):
                model.zero_grad()
                loss_of(model(batches(step, world_size, device, torch.float)[rank])).backward()
            for got, want in zip(ours.parameters(), reference.parameters(), strict=True):
                assert_close(got.grad, want.grad, f"{name}, step {step}, rank {rank}", 1e-5)


def test_communication_hooks_do_what_they_do_under_torchs_ddp(world):
    run_on_gpus(_hook, world)


WIDTH, MICROBATCHES = 16, 4


def _train_pipelines(rank, world_size, is_replicated, device="cuda"):
    """Each rank has a whole pipeline, and replicas are the ranks; or the pipeline goes over the ranks, one replica."""
    alone_groups = [dist.new_group([other]) for other in range(world_size)]
    pipeline, replicas = (alone_groups[rank], dist.group.WORLD)[:: 1 if is_replicated else -1]
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV"):
        _train_pipeline(rank, name, pipeline, replicas, is_replicated, device)


def _train_pipeline(rank, name, pipeline, replicas, is_replicated, device):
    num_stages = 2 * pipeline.size()
    torch.manual_seed(4)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double().to(device) for _ in range(num_stages)]
    alone = Alone(nn.Sequential(*modules), _adam)
    owners = plan(name, num_stages, MICROBATCHES, num_ranks=pipeline.size()).rank_of_stage
    mine = [stage for stage, owner in enumerate(owners) if owner == pipeline.rank()]
    models = [
        DistributedDataParallel(
            modules[stage],
            process_group=replicas,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            bucket_size=100,
        )
        for stage in mine
    ]
    optimizer = DistributedOptimizer(
        _adam([parameter for model in models for parameter in model.parameters()]),
        models,
        model_parallel_group=pipeline,
    )
    stages = [
        PipelineStage(model, stage, num_stages, device, group=pipeline)
        for model, stage in zip(models, mine, strict=True)
    ]
    schedule = get_schedule_class(name)(stages, MICROBATCHES, lambda output, target: loss_of(output - target))
    for step in range(5):
        count = replicas.size()
        generator = torch.Generator().manual_seed(step)
        of_ranks = [torch.randn(2 * MICROBATCHES, WIDTH, generator=generator).double().to(device) for _ in range(count)]
        batch = of_ranks[rank if is_replicated else 0]
        optimizer.zero_grad()
        schedule.step(batch, target=torch.zeros_like(batch))
        norm = optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        alone.backward(of_ranks)
        want = nn.utils.clip_grad_norm_(alone.module.parameters(), 0.1)
        alone.optimizer.step()
        assert_close(norm, want, f"{name}, step {step}, rank {rank}: norm")
    for model, stage in zip(models, mine, strict=True):
        model.start_param_sync(force_sync=True)
        for got, expected in zip(model.parameters(), alone.module[stage].parameters(), strict=True):
            assert_close(got, expected, f"{name}, stage {stage}, rank {rank}")


@pytest.mark.parametrize("is_replicated", [False, True], ids=["over the ranks", "on each rank"])
def test_stages_of_a_pipeline_are_reduced_and_stepped_as_in_one_process(peers, is_replicated):
    run_on_gpus(_train_pipelines, peers, is_replicated=is_replicated)
