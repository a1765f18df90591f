"""Forwards whose outputs need no gradient: no round comes of them, so that ranks that had unlike numbers of them are told."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole import megatron
from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from megatron_api.data_parallel_support import collection_of
from support.devices import backend_for, seeded
from support.processes import await_all, run_ranks

_TOLD = r"rank 1 of the group had 1, all others 0 forwards since the backward before whose outputs need no gradient"


class _Opaque:
    """An output that is not looked into."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@dataclass
class _Output:
    loss: torch.Tensor | None
    name: str = "head"
    count: int = 3


class _Model(torch.nn.Module):
    """Without labels there is nothing to train on; ``form`` is what its loss comes in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(5, 5)

    def forward(
        self, x: torch.Tensor, has_labels: bool = True, form: Callable[[torch.Tensor], Any] | None = None
    ) -> Any:
        loss = self.layer(x).square().mean()
        if not has_labels:
            loss = torch.zeros(())
        return loss if form is None else form(loss)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=seeded(10 * step + rank))


def _train(rank: int, world_size: int, options: dict[str, Any]) -> None:
    model = DistributedDataParallel(_Model(), **options)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer: Any = DistributedOptimizer(sgd, model) if options else sgd

    def step(number: int, has_labels: bool = True) -> None:
        optimizer.zero_grad()
        loss = model(_batch(rank, number), has_labels)
        if loss.requires_grad:
            loss.backward()
            optimizer.step()

    for number in range(2):
        step(number)
    step(2, has_labels=False)  # on all ranks alike
    step(3)
    if rank == 1:  # which goes on to the next batch, with which it comes to the others' backward
        step(4, has_labels=False)
    with pytest.raises(RuntimeError, match=_TOLD):
        step(5 if rank == 1 else 4)
    for number in range(6, 9):
        step(number)
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"grad_reduce_in_fp32": True}, {"use_distributed_optimizer": True, "overlap_param_gather": True}],
    ids=str,
)
def test_a_rank_whose_forward_leads_to_no_backward_is_told_of_on_all_ranks(backend, options):
    run_ranks(_train, 3, backend, timeout=60, options=options)


def _looks(model: Any, rank: int) -> dict[str, Callable[[], Any]]:
    """What one rank alone may do."""

    def under(context: contextlib.AbstractContextManager[Any], has_labels: bool) -> Any:
        with context:
            return model(_batch(rank, 50), has_labels)

    def evaluate() -> None:
        model.eval()
        model(_batch(rank, 50), False)
        model.train()

    return {
        "no_grad": lambda: under(torch.no_grad(), True),
        "inference_mode": lambda: under(torch.inference_mode(), False),
        "no_sync": lambda: under(model.no_sync(), False),
        "evaluation": evaluate,
        "no backward": lambda: model(_batch(rank, 50)),
        "in a list": lambda: model(_batch(rank, 50), form=lambda loss: [torch.ones(3), {"loss": loss}]),
        "opaque": lambda: model(_batch(rank, 50), form=_Opaque),
        "opaque among others": lambda: model(_batch(rank, 50), form=lambda loss: (torch.ones(3), _Opaque(loss))),
    }


def _looks_alone(rank: int, world_size: int, seed: int) -> None:
    """Steps are what they are without it."""
    rng = random.Random(seed)
    model, plain = DistributedDataParallel(_Model()), _Model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for name in [*_looks(model, rank)] * 2:
        before = rng.random() < 0.5  # the forward, or between that and backward
        for optimizer in optimizers:
            optimizer.zero_grad()
        step = rng.randrange(1000)
        if rank == 1 and before:
            _looks(model, rank)[name]()
        loss = model(_batch(rank, step))
        if rank == 1 and not before:
            _looks(model, rank)[name]()
        loss.backward()
        for other in range(world_size):
            (plain(_batch(other, step)) / world_size).backward()
        for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad, msg=f"seed {seed}: {name}, {before}")
        for optimizer in optimizers:
            optimizer.step()
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_alone_does_without_gradients_or_without_a_backward_is_nothing(backend):
    seed = random.randrange(2**30)
    print(f"seed {seed}")
    run_ranks(_looks_alone, 2, backend, timeout=60, seed=seed)


class _Agent(torch.nn.Module):
    """Acts without a graph of its own accord, and is trained on what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, acts: bool = False) -> torch.Tensor:
        if acts:
            with torch.no_grad():
                return self.layer(x).argmax(-1)
        return self.layer(x).square().mean()


_ACTS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "by the wrapper": lambda model, x: model(x, acts=True),
    "by the module": lambda model, x: model.module(x, acts=True),
    "without gradients": torch.no_grad()(lambda model, x: model(x, acts=True)),
}


def _acts(rank: int, world_size: int) -> None:
    """Of three ways of one rank's agent two are right; the error of the other names both."""
    gloo = dist.new_group(backend=backend_for("gloo"))
    for name, act in _ACTS.items():
        model, theirs = DistributedDataParallel(_Agent()), TorchDdp(_Agent(), process_group=gloo)
        for step in range(3):
            for one in (model, theirs):
                one.zero_grad()
                for _ in range(step if rank == 1 else 0):
                    act(one, _batch(rank, 40 + step))
                loss = one(_batch(rank, step))
                if one is model and step > 0 and name == "by the wrapper":
                    with pytest.raises(
                        RuntimeError, match=r"\(an agent acts, .* inside torch\.no_grad\(\), or model\.module"
                    ):
                        loss.backward()
                else:
                    loss.backward()
            for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(mine.grad, expected.grad), f"{name} {step}"
    await_all(rank, world_size)


def test_an_agent_that_acts_on_one_rank_alone_is_told_how():
    run_ranks(_acts, 2, BACKENDS[-1], timeout=60)


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": _Output,
    "nothing": lambda loss: None,
    "a number": lambda loss: {"loss": float(loss), "names": ["a", "b"]},
    "a tensor": lambda loss: (loss.detach(), None),
    "tokens": lambda loss: [loss.detach().round().long()],
}


def _forms(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(_Model())
    for form in FORMS.values():
        if rank == 1:
            output = model(_batch(rank, 1), has_labels=form is not _Output, form=form)
            assert not isinstance(output, torch.Tensor)
        with pytest.raises(RuntimeError, match=_TOLD):
            model(_batch(rank, 2)).backward()
    await_all(rank, world_size)


def test_whatever_form_the_output_has():
    run_ranks(_forms, 2, BACKENDS[-1], timeout=60)


def _takes_part(rank: int, world_size: int) -> None:
    """What the error asks for: a rank makes the others' rounds with zeros."""
    model = DistributedDataParallel(_Model())
    for step in range(4):
        model.zero_grad()
        is_labelled = rank != step % world_size
        x = _batch(rank, step)
        loss = model(x, is_labelled)
        if step < 2 and not is_labelled:
            model.start_grad_sync()
            model.finish_grad_sync()
        elif not is_labelled:
            (0 * model(x)).backward()
        else:
            if step >= 2:  # as many as the other
                model(x, False)
            loss.backward()
        grads = [torch.empty_like(model.module.layer.weight) for _ in range(world_size)]
        dist.all_gather(grads, model.module.layer.weight.grad)
        assert torch.equal(*grads) and grads[0].abs().sum() > 0
    await_all(rank, world_size)


def test_a_rank_without_anything_to_train_on_may_take_part_with_zeros():
    run_ranks(_takes_part, 2, BACKENDS[-1], timeout=60)


def _as_megatron(rank: int, world_size: int, overlaps: bool) -> None:
    options = megatron.DistributedDataParallelConfig(overlap_grad_reduce=overlaps)
    module: Any = _Model()
    groups = collection_of(dist.group.WORLD, None)
    model = megatron.DistributedDataParallel(megatron.ModelParallelConfig(), options, module, pg_collection=groups)
    for step in range(4):
        model.zero_grad_buffer()
        with model.no_sync():
            model(_batch(rank, step)).backward()
        if rank == step % world_size:
            model(_batch(rank, step), False)
            model.start_grad_sync()
        else:
            model(_batch(rank, step + 10)).backward()
        model.finish_grad_sync()
    await_all(rank, world_size)


@pytest.mark.parametrize("overlaps", [False, True])
def test_rounds_that_a_call_makes_compare_nothing(overlaps):
    run_ranks(_as_megatron, 2, BACKENDS[-1], timeout=60, overlaps=overlaps)
