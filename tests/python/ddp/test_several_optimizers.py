"""Several optimizers over the parameters of one wrapped model: those that see no gradient, and those that have copies."""

import gc

import pytest
import torch

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.processes import run_ranks

LAYOUTS = [{"grad_reduce_in_fp32": True}, {"use_distributed_optimizer": True}]


def _wrapped(dtype=torch.bfloat16, **layout):
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)
    return DistributedDataParallel(module, **layout)


def _backward(model, rank, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    inputs = torch.randn(4, 6, generator=generator).to(next(model.parameters()))
    model(inputs).float().square().sum().backward()


def _values(model):
    return torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])


class _ReadsMainGrad(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.main_grad.to(parameter.dtype)


def _blind_steps(rank, world_size, layout):
    is_whole = "use_distributed_optimizer" not in layout
    model = _wrapped(**layout)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        plain = kind(model.parameters(), lr=0.5)
        before = _values(model)
        model.zero_grad_buffer()
        _backward(model, rank)
        text = rf"{kind.__name__}.step\(\): the gradient of parameter '0.weight' is in its main_grad"
        with pytest.raises(RuntimeError, match=text):
            plain.step()
        assert torch.equal(_values(model), before)
    if is_whole:
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        assert not torch.equal(_values(model), before)
        for parameter in model.parameters():
            parameter.grad = None
        before = _values(model)
        _ReadsMainGrad(model.parameters(), {"lr": 0.5}).step()
        assert not torch.equal(_values(model), before)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    before = _values(model)
    optimizer.step()
    assert not torch.equal(_values(model), before)
    # Others have nothing to do with it, and nor has who has let go of the model.
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.5).step()
    module = model.module
    del model, optimizer
    gc.collect()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    return True


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_of_torchs_optimizer_that_would_change_nothing_is_refused(layout):
    assert run_ranks(_blind_steps, 2, "farandole", layout=layout) == [True] * 2


def _older_copies(rank, world_size, layout, overlaps):
    kwargs = {"overlap_param_gather_with_optimizer_step": True} if overlaps else {}
    model, alone = _wrapped(**layout), _wrapped(**layout)
    first, second = (
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model, **kwargs) for lr in (0.5, 0.25)
    )
    one = DistributedOptimizer(torch.optim.SGD(alone.parameters(), lr=0.5), alone, **kwargs)
    for optimizer, its in ((first, model), (one, alone)):
        _backward(its, rank)
        optimizer.step()
    before = _values(model)
    for turn in range(2):
        second.zero_grad()
        _backward(model, rank, 1)
        with pytest.raises(RuntimeError, match=r"step\(\): parameter '0.weight' was updated by another"):
            second.step()
        assert torch.equal(_values(model), before), turn
    second.reload_model_params()
    second.step()
    one.zero_grad()
    _backward(alone, rank, 1)
    one.reload_model_params()
    one.param_groups[0]["lr"] = 0.25
    one.step()
    assert torch.equal(_values(model), _values(alone))
    with pytest.raises(RuntimeError, match="older"):
        first.step()
    first.load_state_dict(first.state_dict())  # its copies are the model's then, and the other's are too old
    with pytest.raises(RuntimeError, match="older"):
        second.step()
    del second
    gc.collect()
    first.step()
    return True


@pytest.mark.parametrize(
    ("layout", "overlaps"),
    [*((layout, False) for layout in LAYOUTS), ({"use_distributed_optimizer": True, "bucket_size": 20}, True)],
    ids=str,
)
def test_copies_that_are_older_than_the_parameters_are_not_stepped(layout, overlaps):
    assert run_ranks(_older_copies, 2, "farandole", layout=layout, overlaps=overlaps) == [True] * 2


def _independent(rank, world_size):
    """Of other parameters, and of parameters that are no copies."""
    model = _wrapped(use_distributed_optimizer=True)
    parts = [
        DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.5), model)
        for layer in (model.module[0], model.module[2])
    ]
    in_float = _wrapped(torch.float32, use_distributed_optimizer=True)
    parts += [DistributedOptimizer(torch.optim.SGD(in_float.parameters(), lr=0.5), in_float) for _ in range(2)]
    for turn in range(2):
        for its in (model, in_float):
            its.zero_grad_buffer()
            _backward(its, rank, turn)
        for part in parts:
            part.step()
    return True


def test_optimizers_that_leave_each_others_copies_alone_go_on():
    assert run_ranks(_independent, 2, "farandole") == [True] * 2
