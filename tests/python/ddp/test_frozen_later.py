"""Parameters that are frozen while a model trains stay where they are, and go on where they were, as under torch's DDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_models import BACKENDS
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import backend_for, seeded
from support.processes import run_ranks

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({"grad_reduce_in_fp32": True}, {}),
    "sharded": ({"use_distributed_optimizer": True}, {}),
    "sharded, small buckets": ({"use_distributed_optimizer": True, "bucket_size": 1, "overlap_param_gather": True}, {}),
    "in parts": (
        {"use_distributed_optimizer": True, "bucket_size": 1, "overlap_param_gather": True},
        {"overlap_param_gather_with_optimizer_step": True},
    ),
    "whole": ({"use_distributed_optimizer": True}, {"is_elementwise": False}),
}


class _Model(torch.nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.third = (torch.nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh()).square().mean()


def _sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


def _adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


def _adam_l2(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.05, weight_decay=0.3)


def _freeze(rank: int, world_size: int, kind: str) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for_model, for_optimizer = KINDS[kind]
    for made in (_sgd, _adam):
        theirs = TorchDdp(_Model(), process_group=gloo, find_unused_parameters=True)
        ours = DistributedDataParallel(_Model(), find_unused_parameters=True, **for_model)
        optimizers = made(theirs), DistributedOptimizer(made(ours), ours, **for_optimizer)
        for step in range(8):
            for model in (theirs, ours):
                model.module.second.requires_grad_(not 2 <= step < 5)
                model.module.first.bias.requires_grad_(step != 4)
            before = ours.module.second.weight.detach().clone()
            x = torch.randn(4, 7, generator=seeded(10 * step + rank))
            for model, optimizer in zip((theirs, ours), optimizers, strict=True):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            if kind != "float32":
                ours.start_param_sync(force_sync=True)
            assert torch.equal(before, ours.module.second.weight) == (2 <= step < 5), step
            if made is _adam and step >= 5 and kind not in ("float32", "whole"):
                break  # the counts of flat parts have gone on
            for name, value in ours.module.named_parameters():
                difference = (value - theirs.module.get_parameter(name)).abs().max()
                assert difference < 1e-6, (made.__name__, step, name, difference)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_does_not_move(kind):
    run_ranks(_freeze, 2, "farandole", timeout=60, kind=kind)


def _begin_frozen(rank: int, world_size: int, kind: str) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for_model, for_optimizer = KINDS[kind]
    for made in (_sgd, _adam, _adam_l2):
        if made is not _sgd and kind not in ("float32", "whole"):
            continue  # the counts of flat parts go on
        theirs = TorchDdp(_Model(), process_group=gloo, find_unused_parameters=True)
        ours = DistributedDataParallel(_Model(), find_unused_parameters=True, **for_model)
        optimizers = made(theirs), DistributedOptimizer(made(ours), ours, **for_optimizer)
        for step in range(6):
            x = torch.randn(4, 7, generator=seeded(10 * step + rank))
            for model, optimizer in zip((theirs, ours), optimizers, strict=True):
                model.module.second.requires_grad_(step >= 3)
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            if kind != "float32":
                ours.start_param_sync(force_sync=True)
            for name, value in ours.module.named_parameters():
                difference = (value - theirs.module.get_parameter(name)).abs().max()
                assert difference < 1e-6, (made.__name__, step, name, difference)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_before_the_first_step_begins_when_it_is_not_any_more(kind):
    run_ranks(_begin_frozen, 2, "farandole", timeout=60, kind=kind)


class _RaisesInTheMiddle(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        raise KeyboardInterrupt


def _raise_while_frozen(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(_Model(), use_distributed_optimizer=True, unused_parameters="skip")
    inner = _RaisesInTheMiddle(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
    optimizer = DistributedOptimizer(inner, model, is_elementwise=True)
    model.module.second.requires_grad_(False)
    before = model.module.second.weight.clone()
    model(torch.ones(4, 7)).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert torch.equal(model.module.second.weight, before)


def test_a_step_that_raises_leaves_what_is_frozen():
    run_ranks(_raise_while_frozen, 2, "farandole")


def _save_while_frozen(rank: int, world_size: int, is_elementwise: bool, path: str) -> None:
    """Of the frozen parameters one lies on both ranks, beside what is trained on one of them: the other has no others."""
    for how in ("torch.distributed.checkpoint", "full_state_dict()"):
        for frozen_from in (0, 2):
            trained, loaded = (
                DistributedDataParallel(_Model(16), use_distributed_optimizer=True, unused_parameters="skip")
                for _ in range(2)
            )
            optimizers = [
                DistributedOptimizer(_adam_l2(model), model, is_elementwise=is_elementwise)
                for model in (trained, loaded)
            ]
            for step in range(7):
                if step == 4:
                    kept = {"model": loaded.module.state_dict(), "optimizer": optimizers[1]}
                    if how == "full_state_dict()":
                        kept["model"] = trained.module.state_dict()
                        optimizers[1].load_state_dict(optimizers[0].full_state_dict())
                    else:
                        saved = {"model": trained.module.state_dict(), "optimizer": optimizers[0]}
                        dcp.save(saved, checkpoint_id=f"{path}/{frozen_from}")
                        dcp.load(kept, checkpoint_id=f"{path}/{frozen_from}")
                    loaded.module.load_state_dict(kept["model"])
                x = torch.randn(4, 16, generator=seeded(10 * step + rank))
                for model, optimizer in list(zip((trained, loaded), optimizers, strict=True))[: 1 + (step >= 4)]:
                    model.module.third.requires_grad_(not frozen_from <= step < 5)
                    model.module.second.requires_grad_(not frozen_from <= step < 5)
                    optimizer.zero_grad()
                    model(x).backward()
                    optimizer.step()
            for name, value in trained.module.named_parameters():
                assert torch.equal(value, loaded.module.get_parameter(name)), (how, frozen_from, name)


@pytest.mark.parametrize("is_elementwise", [True, False])
def test_a_checkpoint_of_a_model_that_is_partly_frozen_is_loaded_by_as_many_ranks(is_elementwise, tmp_path):
    run_ranks(_save_while_frozen, 2, "farandole", timeout=60, is_elementwise=is_elementwise, path=str(tmp_path))


def _add_to_stale(rank: int, world_size: int) -> None:
    """One rank forgets zero_grad()."""
    model = DistributedDataParallel(_Model(), use_distributed_optimizer=True, bucket_size=1)
    optimizer = DistributedOptimizer(_sgd(model), model)
    x = torch.randn(4, 7, generator=seeded(rank))
    for step in range(4):
        if step != 2 or rank != 1:
            optimizer.zero_grad()
        if step == 2:
            with pytest.raises(
                RuntimeError, match=r"rank 1 of the group: parameter '\w+\.\w+' gets a gradient while the"
            ):
                model(x).backward()
            continue
        model(x).backward()
        optimizer.step()
    for value in model.parameters():
        of_ranks = [torch.empty_like(value) for _ in range(world_size)]
        dist.all_gather(of_ranks, value.detach())
        assert all(torch.equal(one, value) for one in of_ranks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_are_told_of_one_that_adds_to_gradients_of_the_step_before(backend):
    run_ranks(_add_to_stale, 2, backend, timeout=60)
