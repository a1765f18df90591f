"""farandole's data parallelism on CUDA: whatever streams are used and however late they are, nothing is read too
early."""

import itertools

import pytest
import torch
from torch import nn

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from gpu.replicas import Alone, assert_close, batches, current_stream, follow, layers, loss_of, new_stream, on, pause
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]


def _adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def _another_stream(rank, world_size, device="cuda"):
    """Wrapped on one stream, trained on another, where gradients come late."""
    for sharded, overlap_grad_reduce in itertools.product((False, True), repeat=2):
        module = layers(device, late=True)
        alone = Alone(module, _adam)
        model = DistributedDataParallel(
            module,
            use_distributed_optimizer=sharded,
            overlap_param_gather=sharded,
            overlap_grad_reduce=overlap_grad_reduce,
            bucket_size=1000,
        )
        optimizer = _adam(model.parameters())
        if sharded:
            optimizer = DistributedOptimizer(optimizer, model)
        side = new_stream(device)
        follow(side, current_stream(device))
        for step in range(4):
            with on(side):
                of_ranks = batches(step, world_size, device)
                optimizer.zero_grad()
                loss_of(model(of_ranks[rank])).backward()
                optimizer.step()
                alone.step(of_ranks)
        with on(side):
            if sharded:
                model.start_param_sync(force_sync=True)
            alone.check(model.module, f"sharded {sharded}, overlap {overlap_grad_reduce}, rank {rank}")


def test_a_backward_on_another_stream_than_the_wrapping_is_waited_for(world):
    run_on_gpus(_another_stream, world)


def _streams_of_one_bucket(rank, world_size, device="cuda"):
    """One bucket, whose gradients accumulate on two streams; the one that comes first in it does so late."""
    for sharded in (False, True):
        module = layers(device)
        alone = Alone(module, _adam)
        # Autograd adds up a parameter's gradient on the stream on which it was first used, while a graph keeps that.
        other, trains = new_stream(device), new_stream(device)
        with on(other):
            kept = [parameter.expand_as(parameter) for parameter in module[0].parameters()]
        model = DistributedDataParallel(module, use_distributed_optimizer=sharded)
        is_late = [False]

        def late(grad, is_late=is_late):
            if is_late[0]:
                pause(grad.device)
            return grad

        module[4].weight.register_hook(late)
        follow(trains, current_stream(device))
        for step in range(3):
            with on(trains):
                of_ranks = batches(step, world_size, device)
                alone.backward(of_ranks)
                model.zero_grad_buffer()
                is_late[0] = True
                loss_of(model(of_ranks[rank])).backward()
                is_late[0] = False
                where = f"sharded {sharded}, step {step}, rank {rank}"
                if not sharded:
                    alone.check_grads(model.module, where)
                    continue
                (bucket,) = model._reducer.buckets()
                part = bucket.grads.numel() // world_size
                want = list(alone.module.parameters())
                for index, offset, numel in bucket.slots:
                    first, last = max(offset, rank * part), min(offset + numel, (rank + 1) * part)
                    if first < last:
                        grad = want[index].grad.flatten()[first - offset : last - offset]
                        assert_close(bucket.grads[first:last], grad, f"{where}, parameter {index}")
        assert len(kept) == 2


def test_a_bucket_waits_for_the_streams_of_all_its_gradients(peers):
    run_on_gpus(_streams_of_one_bucket, peers)


class _Branches(nn.Module):
    """Two branches beside each other, the first of them on a stream of its own, which follows before anything has waited
    for parameters."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream
        self.into, self.left, self.right = nn.Linear(16, 64), nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x):
        current = current_stream(x.device)
        follow(self.stream, current)
        with on(self.stream):
            left = self.left(self.into(x))
        right = self.right(x.repeat(1, 4))
        follow(current, self.stream)
        return left + right


def _late_steps(rank, world_size, device="cuda"):
    """Each rank in turn steps late, with its device; the others' forwards run ahead as far as they can."""
    for in_parts, bucket_size in itertools.product((False, True), (None, 100)):
        torch.manual_seed(3)
        module = _Branches(new_stream(device)).double().to(device)
        reference = _Branches(None).double().to(device)  # on one stream: nobody keeps its inputs for a second one
        reference.load_state_dict(module.state_dict())
        optimizer_of_one = _adam(reference.parameters())
        model = DistributedDataParallel(
            module, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=bucket_size
        )
        optimizer = DistributedOptimizer(
            _adam(model.parameters()), model, overlap_param_gather_with_optimizer_step=in_parts
        )
        losses = []
        for step in range(2 + 2 * world_size):
            of_ranks = batches(step, world_size, device)
            optimizer.zero_grad()
            loss = loss_of(model(of_ranks[rank]))
            loss.backward()
            losses.append(loss.detach())
            if step % world_size == rank:
                pause(device)
            optimizer.step()
        model.start_param_sync(force_sync=True)
        for step, got in enumerate(losses):
            optimizer_of_one.zero_grad()
            theirs = [loss_of(reference(batch)) for batch in batches(step, world_size, device)]
            where = f"in parts {in_parts}, bucket size {bucket_size}, step {step}, rank {rank}"
            assert_close(got, theirs[rank], where)
            (sum(theirs) / world_size).backward()
            optimizer_of_one.step()


def test_a_forward_on_several_streams_reads_no_parameter_before_it_has_come(peers):
    run_on_gpus(_late_steps, peers)
