"""A wrapped module can be copied and pickled, and the copy trains as the original does."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, RandomModel, grads
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.processes import run_ranks


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


_WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": _saved,
}


def _step(model: Any, seed: int, rank: int) -> dict[str, Any]:
    model.zero_grad()
    model(model.module.batch(seed, rank)).backward()
    return {name: None if grad is None else grad.clone() for name, grad in grads(model).items()}


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(left.values(), right.values())
    )


def _copies(rank: int, world_size: int, way: str) -> None:
    module = RandomModel(7)
    theirs = TorchDdp(copy.deepcopy(module))
    ours = DistributedDataParallel(module, bucket_size=100, unused_parameters="zero_fill")
    _step(ours, 1, rank)
    twin = _WAYS[way](ours)
    assert type(twin) is DistributedDataParallel
    assert all(parameter.grad is None for parameter in twin.parameters()), "as in torch's"
    assert twin.bucket_layout() == ours.bucket_layout()
    before = {name: grad.clone() for name, grad in grads(ours).items() if grad is not None}
    expected = _step(theirs, 2, rank)
    assert _equal(expected, _step(twin, 2, rank))
    assert _equal(before, {name: grad for name, grad in grads(ours).items() if grad is not None})
    assert _equal(expected, _step(ours, 2, rank))
    if rank == 0:  # no collective
        _WAYS[way](ours)
    assert _equal(expected, _step(ours, 2, rank))


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", list(_WAYS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_has_a_reduction_of_its_own(backend, way):
    run_ranks(_copies, 2, backend, timeout=60, way=way)


class _Net(torch.nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def _train(model: Any, rank: int, steps: int) -> list[torch.Tensor]:
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + rank + step)).square().sum().backward()
        optimizer.step()
    return list(model.state_dict().values())


def _sharded(rank: int, world_size: int, way: str, overlaps: bool) -> None:
    model = DistributedDataParallel(
        _Net(), use_distributed_optimizer=True, overlap_param_gather=overlaps, bucket_size=4
    )
    _train(model, rank, 2)  # gathers may be under way
    twin, part = _WAYS[way](model), _WAYS[way](model.module)
    plain = copy.deepcopy(part)
    for left, right in zip(_train(twin, rank, 2), _train(model, rank, 2), strict=True):
        assert torch.equal(left, right)
    again = DistributedDataParallel(part, use_distributed_optimizer=True, overlap_param_gather=overlaps)
    for left, right in zip(_train(again, rank, 2), model.state_dict().values(), strict=True):
        assert torch.allclose(left, right)
    plain(torch.ones(2, 3)).sum().backward()  # the hooks of what it was copied from are no longer in it
    plain.load_state_dict(plain.state_dict())


@pytest.mark.sample(3)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("way", list(_WAYS))
def test_a_sharded_model_and_its_module_can_be_copied(way, overlaps):
    run_ranks(_sharded, 2, "gloo", timeout=60, way=way, overlaps=overlaps)


def _refusals(rank: int, world_size: int) -> None:
    other = dist.new_group()
    for wrap in (TorchDdp, DistributedDataParallel):
        with pytest.raises(RuntimeError, match="default process group"):
            pickle.dumps(wrap(_Net(), process_group=other))
    data = pickle.dumps(DistributedDataParallel(_Net()))
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="init_process_group"):
        pickle.loads(data)


def test_only_what_is_over_the_default_group_can_be_copied():
    run_ranks(_refusals, 1, "gloo")
