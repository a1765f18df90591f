"""Several optimizers over the parameters of one wrapped model: those that see no gradient, and those that have copies."""

import gc

import pytest
import torch

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import run_ranks

LAYOUTS = [{"grad_reduce_in_fp32": True}, {"use_distributed_optimizer": True}]
CLIP_BY_VALUE = torch.nn.utils.clip_grad_value_  # bound before a model is wrapped


def _wrapped(dtype=torch.bfloat16, **layout):
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)
    return DistributedDataParallel(module, **layout)


def _backward(model, rank, seed=0):
    generator = seeded(10 * seed + rank)
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


def _blind_clips(rank, world_size, layout):
    model, alone = _wrapped(**layout), torch.nn.Linear(2, 2)
    parameters = list(model.parameters())
    alone(torch.ones(2)).sum().backward()
    torch.nn.utils.clip_grad_norm_([*alone.parameters(), *parameters], 1.0)  # there is no gradient yet
    _backward(model, rank)
    refused = pytest.raises(RuntimeError, match=r"clip_grad_norm_: the gradient of parameter '0\.weight' is")
    for given in (lambda: parameters, lambda: iter(parameters), lambda: parameters[0]):
        with refused:
            torch.nn.utils.clip_grad_norm_(given(), 1.0)
        with refused:
            torch.nn.utils.clip_grads_with_norm_(given(), 1.0, torch.ones(()))
    assert torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5) > 0.5
    assert torch.nn.utils.get_total_norm([one.grad for one in alone.parameters()]).item() == pytest.approx(
        0.5, rel=1e-4
    )
    refused = pytest.raises(RuntimeError, match=r"clip_grad_value_: the gradient of .* '0\.weight' is in its main_grad")
    for given in (lambda: parameters, lambda: iter(parameters), lambda: [*alone.parameters(), *parameters]):
        with refused:
            torch.nn.utils.clip_grad_value_(given(), 1.0)
    with pytest.raises(
        RuntimeError, match=r"clip_grad_value_: no parameter has a \.grad\..* expected parameter\.main_grad\.clamp_"
    ):
        CLIP_BY_VALUE(iter(parameters), 1.0)
    torch.nn.utils.clip_grad_value_(alone.parameters(), 1e-3)
    CLIP_BY_VALUE(alone.parameters(), 1e-4)
    assert all(one.grad.abs().max() <= 1e-4 for one in alone.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.nn.utils.clip_grad_value_(parameters, 0.1)
    assert all(one.grad.max() <= 0.1 for one in parameters)


def _blind_scalers(rank, world_size, layout):
    model = _wrapped(**layout)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        plain = kind(model.parameters(), lr=0.1)
        for unscales in (False, True):
            model.zero_grad()
            scaler.scale(model(torch.ones(2, 6).to(next(model.parameters()))).float().sum()).backward()
            if unscales:
                scaler.unscale_(plain)
            with pytest.raises(
                RuntimeError, match=rf"{kind.__name__}.step\(\): the gradient of parameter '0\.weight' is"
            ):
                scaler.step(plain)
    alone = torch.nn.Linear(2, 2)  # with which it has nothing to do
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    before = alone.bias.detach().clone()
    scaler.scale(alone(torch.ones(2)).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(alone.bias, before - 0.5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_scalers_step_that_would_change_nothing_is_refused(layout):
    run_ranks(_blind_scalers, 2, "farandole", layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_torchs_clipping_that_would_do_nothing_is_refused(layout):
    run_ranks(_blind_clips, 2, "farandole", layout=layout)


def _inner_zero_grad(rank, world_size, layout):
    """That of the optimizer that one was made of begins a step as well."""
    trained = []
    for of_inner in (False, True):
        model = _wrapped(**layout)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model)
        for step in range(3):
            (inner if of_inner else optimizer).zero_grad()
            _backward(model, rank, step)
            optimizer.step()
        trained.append(_values(model))
    assert torch.equal(*trained)
    del optimizer
    gc.collect()
    inner.zero_grad()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_zero_grad_of_the_inner_optimizer_begins_a_step(layout):
    run_ranks(_inner_zero_grad, 2, "farandole", layout=layout)


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


def _turns(rank, world_size, layout, order):
    """Of different parameters, each with its own turns; against torch's optimizers of one process."""
    accumulates = order == "every other step"
    for zeroes in (False, True):
        model, plain = _wrapped(torch.float32, bucket_size=10, **layout), _wrapped(torch.float32).module
        sets = [[list(module[layer].parameters()) for layer in (0, 2)] for module in (model.module, plain)]
        ours = [DistributedOptimizer(torch.optim.SGD(part, lr=0.1, momentum=0.9), model) for part in sets[0]]
        theirs = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in sets[1]]
        for step in range(4):
            if accumulates:
                for both in (ours, theirs):
                    for one in both if step % 2 == 0 else both[:1]:
                        one.zero_grad(set_to_none=not zeroes)
            refused = accumulates and step % 2 == 1 and "use_distributed_optimizer" in layout
            if refused:
                with pytest.raises(
                    RuntimeError, match=r"'2\.(weight|bias)' gets a gradient while the gradients of the step"
                ):
                    _backward(model, rank, step)
                break
            _backward(model, rank, step)
            for other in range(world_size):
                inputs = torch.randn(4, 6, generator=seeded(10 * step + other))
                (plain(inputs).square().sum() / world_size).backward()
            for both in (ours, theirs):
                for index, one in enumerate(both):
                    if accumulates and index == 1 and step % 2 == 0:
                        continue
                    one.step()
                    if not accumulates:
                        one.zero_grad(set_to_none=not zeroes)
                        if one in ours:
                            with pytest.raises(RuntimeError, match="gradients were not reduced"):
                                one.step()
            if "use_distributed_optimizer" in layout:
                model.start_param_sync(force_sync=True)
            assert torch.allclose(_values(model), _values(plain), rtol=1e-5, atol=1e-6), step
    return True


@pytest.mark.parametrize("order", ["every other step", "one after another"])
@pytest.mark.parametrize("layout", [{}, {"gradient_as_bucket_view": True}, *LAYOUTS], ids=str)
def test_each_optimizer_begins_its_own_steps(layout, order):
    assert run_ranks(_turns, 2, "farandole", layout=layout, order=order) == [True] * 2


def _nobodys(rank, world_size):
    """Gradients that no optimizer has do not keep others from the next step."""
    model = _wrapped(use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.module[0].parameters(), lr=0.5), model)
    for step in range(3):
        optimizer.zero_grad()
        _backward(model, rank, step)
        optimizer.step()
    return True


def test_gradients_of_nobodys_parameters_begin_with_any_step():
    assert run_ranks(_nobodys, 2, "farandole") == [True] * 2


def _with_others(rank, world_size):
    """Parameters of another model do not hide that a wrapped one is left as it is; nor is who has nothing to step."""
    model, head = _wrapped(grad_reduce_in_fp32=True), torch.nn.Linear(2, 2)
    both = torch.optim.SGD([*head.parameters(), *model.parameters()], lr=0.5)
    both.step()  # nothing has come yet
    head(torch.ones(1, 2)).sum().backward()
    _backward(model, rank)
    with pytest.raises(RuntimeError, match=r"'0\.weight' is in its main_grad"):
        both.step()
    model.requires_grad_(False)
    both.step()
    return True


def test_what_is_left_as_it_is_is_seen_beside_what_is_stepped():
    assert run_ranks(_with_others, 2, "farandole") == [True] * 2


def _grown(rank, world_size):
    model = _wrapped(use_distributed_optimizer=True)
    inner = torch.optim.SGD([next(model.parameters())], lr=0.1)
    optimizer = DistributedOptimizer(inner, model)
    _backward(model, rank)
    inner.add_param_group({"params": list(model.parameters())[1:]})
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="has 2 param groups, and had 1 then: expected all from the start"):
            use()


def test_a_param_group_that_the_inner_optimizer_gets_later_is_refused_by_name():
    run_ranks(_grown, 2, "farandole")
