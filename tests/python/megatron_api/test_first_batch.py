"""Parameters that get several gradients in a batch: the first one counts them, as Megatron-core's, and reduces at its end."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.utils.checkpoint import checkpoint

from farandole import ddp, megatron
from megatron_api import data_parallel_support as support
from megatron_api.megatron_support import world
from support.megatrons import cases, check_version, environment_of, every_megatron, import_distributed
from support.processes import await_all, run_ranks

_WIDTH, _STEPS = 4, 3


class _Repeated(nn.Module):
    """An embedding that may be tied to the head, and a layer that may be called several times, each maybe a checkpoint."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(2**31))
        self.embedding, self.head = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2))
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.calls = rng.randint(1, 3)
        self.kind = rng.choice(["plain", "reentrant", "not reentrant"])
        self.is_tied = rng.random() < 0.5
        if self.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in [self.layer] * self.calls + [self.head]:
            x = layer(x) if self.kind == "plain" else checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
        return torch.tanh(x).square().sum()


def _batch(rank: int, step: int, index: int) -> torch.Tensor:
    return torch.full((2, _WIDTH), 0.1 + rank + 0.3 * index - 0.2 * step, requires_grad=True)


def _step(model: Any, batches: list[torch.Tensor], is_sync_left_alone: bool) -> None:
    """``is_sync_left_alone``: without no_sync(), as where a config has no no_sync_func."""
    model.zero_grad_buffer()
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with contextlib.nullcontext() if is_last or is_sync_left_alone else model.no_sync():
            model(batch).backward()
    model.finish_grad_sync()


def _as_megatron(rank: int, world_size: int, version: str, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    import_distributed()
    check_version(version)
    for case in range(cases):
        module = _Repeated(rng)
        sharded, count, is_sync_left_alone = rng.random() < 0.5, rng.randint(1, 3), rng.random() < 0.5
        options = {
            "overlap_grad_reduce": True,
            "use_distributed_optimizer": sharded,
            "grad_reduce_in_fp32": rng.random() < 0.3,
            "bucket_size": rng.choice([None, 1, 20]),
        }
        context = f"seed {seed}, case {case}: {vars(module)} {count} {is_sync_left_alone} {options}"
        theirs, ours = support.both(module, options, support.collection_of(world(), None))
        for step in range(_STEPS):
            for model in (theirs, ours):
                _step(model, [_batch(rank, step, index) for index in range(count)], is_sync_left_alone)
            for other, mine in support.parts(theirs, ours, sharded):
                assert torch.equal(other, mine), f"{context}, step {step}"
    await_all(rank, world_size)


@every_megatron
def test_several_gradients_of_a_parameter_are_reduced_as_megatrons(version):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    given = dict(version=version, cases=cases(40), seed=seed)
    run_ranks(_as_megatron, 2, "gloo", timeout=120, env=environment_of(version), **given)


def _wrap(module: nn.Module, **options: Any) -> Any:
    config = megatron.DistributedDataParallelConfig(overlap_grad_reduce=True, **options)
    groups = support.collection_of(world(), None)
    return megatron.DistributedDataParallel(megatron.ModelParallelConfig(), config, module, pg_collection=groups)


def _as_torch(rank: int, world_size: int, seed: int) -> None:
    """With an optimizer, and parameters that are gathered while the next forwards run."""
    rng = random.Random(seed)
    for case in range(cases(6)):
        module = _Repeated(rng)
        count = rng.randint(1, 3)
        context = f"seed {seed}, case {case}: {vars(module)} {count} rank {rank}"
        # torch's takes no more than one gradient but from a graph that is static.
        theirs = TorchDdp(support.copy_of(module), static_graph=True)
        ours = _wrap(module, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=rng.choice([1, 20]))
        sgd = torch.optim.SGD(theirs.parameters(), lr=0.01)
        optimizer = ddp.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.01), ours)
        for step in range(_STEPS):
            batches = [_batch(rank, step, index) for index in range(count)]
            sgd.zero_grad()
            theirs(torch.cat(batches)).backward()
            sgd.step()
            _step(ours, batches, is_sync_left_alone=True)
            optimizer.step()
            ours.start_param_sync(force_sync=True)
            for (name, mine), other in zip(ours.module.named_parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{context} {name}: {text}")  # noqa: B023
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_several_gradients_of_a_parameter_train_as_under_torch_ddp(backend):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    run_ranks(_as_torch, 2, backend, timeout=60, seed=seed)


class _Fails(nn.Module):
    """A backward that one rank does not come to the end of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        x = self.first(x)
        if fails:
            x.register_hook(_raise)
        return self.last(x).square().sum()


def _raise(grad: torch.Tensor) -> None:
    raise ValueError("a fault of this rank")


def _refused(rank: int, world_size: int) -> None:
    model = _wrap(_Fails(), bucket_size=1)

    def backward(times: int, fails: bool = False) -> None:
        for index in range(times):
            model(_batch(rank, 0, index), fails).backward()

    # In the first batch a backward of one rank fails, which goes on to the next batch.
    model.zero_grad_buffer()
    if rank == 1:
        with pytest.raises(ValueError, match="a fault of this rank"):
            backward(1, fails=True)
        model.zero_grad_buffer()
    backward(1)
    with pytest.raises(
        RuntimeError, match=r"rank 1 of the group: gradients were reset before finish_grad_sync\(\) was"
    ):
        model.finish_grad_sync()

    # Batches of two, then one of three.
    model = _wrap(_Fails(), bucket_size=1)
    for _ in range(2):
        model.zero_grad_buffer()
        backward(2)
        model.finish_grad_sync()
    model.zero_grad_buffer()
    backward(2)
    if rank == 1:
        with pytest.raises(
            RuntimeError, match=r"a forward began before finish_grad_sync.*the first batch had were all"
        ):
            backward(1)
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 of the group: a forward began before finish_grad_sync"):
            model.finish_grad_sync()
    model.zero_grad_buffer()
    outputs = [model(_batch(rank, 0, index)) for index in range(3 if rank == 1 else 2)]
    for output in outputs:
        output.backward()
    with pytest.raises(
        RuntimeError, match=r"rank 1 of the group: parameter '.*' got more gradients than the 2 that it"
    ):
        model.finish_grad_sync()
    model.zero_grad_buffer()
    backward(2)
    model.finish_grad_sync()
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_a_batch_that_is_not_like_the_first_is_an_error_on_all_ranks(backend):
    run_ranks(_refused, 2, backend, timeout=60)
