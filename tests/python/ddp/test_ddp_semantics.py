"""When gradients are averaged, what users may do with them, and that waiting lets other threads run."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel
from support.processes import run_ranks


class _Scale(torch.nn.Module):
    """Its weights' gradients are the input."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(3)) for _ in range(layers))

    def forward(self, x: float) -> torch.Tensor:
        return x * sum(weight.sum() for weight in self.weights)


def _grad(model) -> float:
    (value,) = set(model.module.weights[0].grad.tolist())
    return value


def _no_sync(rank: int, world_size: int) -> None:
    for wrap in (TorchDdp, DistributedDataParallel):  # torch shows that these are its semantics
        model = wrap(_Scale())
        with model.no_sync():
            model(1.0 + rank).backward()
            assert _grad(model) == 1.0 + rank
            outside = model(2.0)
        outside.backward()  # the forward decides
        assert _grad(model) == 3.0 + rank
        synchronized = model(4.0)
        with model.no_sync():
            synchronized.backward()
        assert _grad(model) == 7.5
        with pytest.raises(KeyError), model.no_sync():
            raise KeyError
        model.zero_grad()
        model(float(rank)).backward()
        assert _grad(model) == 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sync_means_what_it_means_in_torch(backend):
    run_ranks(_no_sync, 2, backend)


def _per_backward(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(_Scale())
    first, second, third = model(1.0 + rank), model(2.0), model(4.0)
    model._set_require_sync(False)
    first.backward()
    model(100.0)  # a forward in between, as pipelines have, changes nothing
    second.backward()
    assert _grad(model) == 3.0 + rank
    model._set_require_sync(True)
    third.backward()
    assert _grad(model) == 7.5
    model.zero_grad()
    with model.no_sync():
        output = model(1.0 + rank)
        model._set_require_sync(True)  # no_sync wins
        output.backward()
    assert _grad(model) == 1.0 + rank
    model(0.0).backward()
    assert _grad(model) == 1.5


def test_each_backward_can_be_told_whether_it_averages():
    run_ranks(_per_backward, 2, "gloo")


def _explicit(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(_Scale(2), bucket_size=1)
    with model.no_sync():
        model(1.0 + rank).backward()
        model(2.0).backward()
    model.start_grad_sync()
    model.finish_grad_sync()
    assert _grad(model) == 3.5
    model.finish_grad_sync()
    assert _grad(model) == 3.5
    model.zero_grad_buffer()
    assert _grad(model) == 0.0


def test_accumulated_gradients_can_be_averaged_explicitly():
    run_ranks(_explicit, 2, "gloo")


def _grad_is_main_grad(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(_Scale(2))
    first, second = model.module.weights
    model(1.0).backward()
    assert first.grad is first.main_grad
    assert second.grad is second.main_grad
    assert first.grad.untyped_storage().data_ptr() == second.grad.untyped_storage().data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for set_to_none in (True, False):
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        model(float(rank)).backward()
        assert first.grad is first.main_grad
        assert _grad(model) == 0.5
    first.grad = torch.full((3,), 10.0)
    model(1.0).backward()
    assert first.grad is first.main_grad
    assert _grad(model) == 11.0
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert first.main_grad.norm() < 1e-3


def test_grad_is_main_grad_whatever_the_user_does_to_it_between_steps():
    run_ranks(_grad_is_main_grad, 2, "gloo")


def _state_dict(rank: int, world_size: int) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    theirs = TorchDdp(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    ours = DistributedDataParallel(module)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


def test_state_dict_has_the_names_of_torch_ddp():
    run_ranks(_state_dict, 1, "gloo")


def _waiting_lets_threads_run(rank: int, world_size: int) -> int:
    model = DistributedDataParallel(_Scale())
    loss = model(1.0)
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
        loss.backward()
        return 0
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    loss.backward()
    stop.set()
    thread.join()
    return ticks


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_waits_for_other_ranks_without_the_gil(backend):
    assert run_ranks(_waiting_lets_threads_run, 2, backend)[0] >= 10


def _subgroups(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DistributedDataParallel(_Scale(), process_group=groups[rank % 2])
    model(float(rank)).backward()
    assert _grad(model) == (1.0 if rank % 2 == 0 else 2.0)
    with pytest.raises(ValueError, match=rf"expected a ProcessGroup that this rank \({rank}\) is in"):
        DistributedDataParallel(_Scale(), process_group=groups[1 - rank % 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_in_subgroups_average_on_their_own(backend):
    run_ranks(_subgroups, 4, backend)


def _gone(rank: int, world_size: int) -> None:
    module = _Scale()
    DistributedDataParallel(module)(1.0).backward()
    module.zero_grad()
    module(1.0 + rank).backward()  # the wrapper is gone, and its hooks with it
    assert module.weights[0].grad.tolist() == [1.0 + rank] * 3


def test_a_module_outlives_its_wrapper():
    run_ranks(_gone, 2, "gloo")


class _GivesNone(torch.autograd.Function):
    """x * weight, whose backward has a gradient for the weight or none."""

    @staticmethod
    def forward(ctx, x, weight, gives):
        ctx.save_for_backward(x, weight)
        ctx.gives = gives
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0) if ctx.gives else None, None


class _TwoScales(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(3)) for _ in range(2))

    def forward(self, x: torch.Tensor, gives: bool) -> torch.Tensor:
        return _GivesNone.apply(x, self.weights[0], gives) + x * self.weights[1]


def _get_none(rank: int, world_size: int) -> None:
    for gives in ([False, False], [False, True], [True, True], [False, False]):
        grads = []
        for wrap in (TorchDdp, DistributedDataParallel):
            model = wrap(_TwoScales(), find_unused_parameters=True)
            x = torch.arange(6.0).view(2, 3) * (1 + rank)
            model(x.requires_grad_(), gives[rank]).sum().backward()
            grads.append([weight.grad for weight in model.module.weights])
        theirs, ours = grads
        assert (theirs[0] is None) == (not any(gives))  # decayed by no optimizer
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None), f"{gives}: {one}, in torch {other}"
            assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_no_rank_computes_stays_none_as_in_torch(backend):
    run_ranks(_get_none, 2, backend)
