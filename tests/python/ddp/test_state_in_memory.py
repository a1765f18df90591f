"""The state of a distributed optimizer in memory: making it counts no step, copies stand by themselves, and what does not
fit is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from farandole.ddp._optimizer_state import FlatPart
from support.devices import DEVICE
from support.processes import run_ranks

BATCH = torch.linspace(-1, 1, 80).view(2, 40)  # on the CPU


class _CountsItself(torch.optim.Optimizer):
    """Momentum whose bias correction goes by a count in the param group, as that of apex's FusedAdam does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "step": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                parameter.add_(average / (1 - 0.9 ** group["step"]), alpha=-group["lr"])


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(BATCH.to(DEVICE)).square().mean().backward()
    optimizer.step()


def _pair(width: int = 4, make: Any = torch.optim.Adam) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(40, width), use_distributed_optimizer=True)
    return model, DistributedOptimizer(make(model.parameters()), model, is_elementwise=True)


def _saves_before_the_first_step(rank: int, world_size: int) -> None:
    model, optimizer = _pair(make=_CountsItself)
    plain = copy.deepcopy(model.module)
    expected = _CountsItself(plain.parameters())
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["step"] == 0
    assert optimizer._inner.calls == 0
    optimizer.load_state_dict(saved)
    for _ in range(3):
        _step(model, optimizer)
        _step(plain, expected)
    model.start_param_sync(force_sync=True)
    assert optimizer._inner.calls == expected.calls
    torch.testing.assert_close(model.module.weight, plain.weight)


def test_a_state_that_is_made_to_be_saved_counts_no_step():
    run_ranks(_saves_before_the_first_step, 2, "gloo", timeout=60)


def _pickled(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def _copied(rank: int, world_size: int) -> None:
    model, optimizer = _pair()
    _step(model, optimizer)
    for copied in (copy.deepcopy, _pickled):
        kept = copied(optimizer.state_dict())
        before = optimizer.full_state_dict()["state"]
        _step(model, optimizer)
        assert not torch.equal(optimizer.full_state_dict()["state"]["weight"]["exp_avg"], before["weight"]["exp_avg"])
        parts = [value for values in kept["state"].values() for value in values.values() if isinstance(value, FlatPart)]
        assert parts and all(
            part.untyped_storage().data_ptr() == part.tensor.untyped_storage().data_ptr() for part in parts
        )
        optimizer.load_state_dict(kept)
        after = optimizer.full_state_dict()["state"]
        for name, values in before.items():
            for key, value in values.items():
                assert torch.equal(after[name][key], value), (name, key)


def test_copies_of_the_state_stand_by_themselves():
    run_ranks(_copied, 2, "gloo", timeout=60)


class _Recording(torch.optim.SGD):
    """Whose state has a list."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("steps", []).append(len(self.state[parameter].get("steps", ())))
        super().step(closure)


def _loaded_state_stays(rank: int, world_size: int) -> None:
    """What a state dict has is changed by no optimizer that has loaded it, as with torch's."""
    for make in (torch.optim.AdamW, _Recording):
        pairs = []
        for _ in range(2):
            model, optimizer = _pair(make=lambda given, kind=make: kind(given, lr=torch.tensor(0.5)))
            _step(model, optimizer)
            pairs.append((model, optimizer))
        state = copy.deepcopy(pairs[0][1].state_dict())
        before = str(state)
        for _, optimizer in pairs:
            optimizer.load_state_dict(state)
        rates = [optimizer.param_groups[0]["lr"] for _, optimizer in pairs]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(pairs[1][1], 0.1)
        for _ in range(2):
            _step(*pairs[1])
            scheduler.step()
        assert str(state) == before
        assert rates[0].item() == 0.5
        assert pairs[1][1].param_groups[0]["lr"].item() == pytest.approx(0.005)


def test_a_state_that_was_loaded_stays_what_it_was():
    run_ranks(_loaded_state_stays, 2, "farandole")


def _saved_meanwhile(rank: int, world_size: int, path: str) -> None:
    model, optimizer = _pair()
    _step(model, optimizer)
    want = optimizer.full_state_dict()["state"]
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save({"optimizer": optimizer}, checkpoint_id=path, process_group=group)
    _step(model, optimizer)
    saving.result()
    dcp.load({"optimizer": optimizer}, checkpoint_id=path)
    got = optimizer.full_state_dict()["state"]
    for name, values in want.items():
        for key, value in values.items():
            assert torch.equal(got[name][key], value), (name, key)


def test_an_asynchronous_save_has_the_parts_of_its_moment(tmp_path):
    run_ranks(_saved_meanwhile, 2, "gloo", timeout=60, path=str(tmp_path / "saved"))


def _of_another_shape(rank: int, world_size: int) -> None:
    larger, small = _pair(8), _pair(4)
    _step(*larger)
    _step(*small)
    before = small[1].full_state_dict()
    with pytest.raises(
        ValueError, match=r"'(step|exp_avg)' of parameter '(weight|bias)' .*(320|8) elements: expected (160|4)"
    ):
        small[1].load_state_dict(larger[1].full_state_dict())
    after = small[1].full_state_dict()
    assert torch.equal(after["state"]["weight"]["exp_avg"], before["state"]["weight"]["exp_avg"])


def test_the_state_of_a_larger_parameter_is_refused():
    run_ranks(_of_another_shape, 2, "gloo", timeout=60)


def _of_other_forms(rank: int, world_size: int) -> None:
    model, optimizer = _pair()
    _step(model, optimizer)
    for wrong, text in (
        ({}, r"state_dict has \[\]: expected 'state' and 'param_groups'"),
        (None, "state_dict is None: expected 'state' and 'param_groups'"),
        (model.state_dict(), r"state_dict has \['module.*\]: expected 'state' and 'param_groups'"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(wrong)
    # Other buckets have other parts of parameters: of some that this rank owns it saved nothing.
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    others = []
    for bucket_size in (10, 1_000_000):
        wrapped = DistributedDataParallel(
            copy.deepcopy(module), bucket_size=bucket_size, use_distributed_optimizer=True
        )
        others.append(DistributedOptimizer(torch.optim.Adam(wrapped.parameters()), wrapped))
    with pytest.raises(
        ValueError, match=r"another bucket size\? Take full_state_dict\(\), or torch.distributed.checkp"
    ):
        others[1].load_state_dict(others[0].state_dict())
    others[1].load_state_dict(others[0].full_state_dict())


def test_what_is_no_state_or_of_other_buckets_is_refused_with_what_to_do():
    run_ranks(_of_other_forms, 2, "farandole", timeout=60)


def _of_unequal_steps(rank: int, world_size: int) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(40, 4), torch.nn.Linear(40, 4))
    inner = torch.optim.Adam(module.parameters())
    _step(module[0], inner)
    inner.zero_grad()
    batch = BATCH.to(DEVICE)
    (module[0](batch) + module[1](batch)).square().mean().backward()
    inner.step()
    model = DistributedDataParallel(module, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match=r"'step' of parameters '1.*' and '0.*' .*1.* and .*2"):
        DistributedOptimizer(inner, model)


def test_parameters_of_one_run_that_were_stepped_unequally_are_refused():
    """One count of steps would be both parameters'."""
    run_ranks(_of_unequal_steps, 1, "gloo", timeout=60)


class _Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.other = torch.nn.Linear(40, 4), torch.nn.Linear(40, 4)

    def forward(self, uses_other: bool) -> torch.Tensor:
        batch = BATCH.to(DEVICE)
        return (self.one(batch) + (self.other(batch) if uses_other else 0)).square().mean()


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: list[bool]) -> None:
    for uses_other in steps:
        optimizer.zero_grad()
        model(uses_other).backward()
        optimizer.step()


def _of_unused(rank: int, world_size: int) -> None:
    for saved, loading in (([False], []), ([False], [True]), ([True], [False]), ([True], []), ([False], [False])):
        for make in (torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)):
            states, results = [], []
            for _ in range(2):
                model = DistributedDataParallel(_Branches(), unused_parameters="skip")
                plain = _Branches()
                optimizers = [DistributedOptimizer(make(model.parameters()), model), make(plain.parameters())]
                results = [(model, optimizers[0]), (plain, optimizers[1])]
                for own, optimizer in results:
                    _train(own, optimizer, loading if states else saved)
                if states:
                    optimizers[0].load_state_dict(states[0])
                    optimizers[1].load_state_dict(states[1])
                states = [optimizers[0].full_state_dict(), copy.deepcopy(optimizers[1].state_dict())]
            for own, optimizer in results:
                _train(own, optimizer, [False, True, True])
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7), (saved, loading, make)


def test_state_is_loaded_where_not_all_parameters_were_stepped():
    """By the one that was saved, or the one that loads."""
    run_ranks(_of_unused, 2, "gloo", timeout=60)


def _call_hooks(rank: int, world_size: int) -> None:
    model, optimizer = _pair()
    _step(model, optimizer)
    seen: list[str] = []
    given: Any = {"mine": rank}
    optimizer.register_state_dict_pre_hook(lambda of: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda of, state_dict: state_dict | given)
    optimizer.register_load_state_dict_pre_hook(lambda of, state_dict: seen.append(state_dict.pop("mine")))
    optimizer.register_load_state_dict_post_hook(lambda of: seen.append("after loading"))
    saved = optimizer.state_dict()
    assert saved["mine"] == rank and optimizer.full_state_dict()["mine"] == rank
    optimizer.load_state_dict(saved)
    assert seen == ["before saving", "before saving", rank, "after loading"] and saved["mine"] == rank
    optimizer.register_load_state_dict_pre_hook(lambda of, state_dict: state_dict["param_groups"] if rank else None)
    with pytest.raises(ValueError, match="state_dict is "):
        optimizer.load_state_dict(saved)


def test_hooks_are_called_around_saving_and_loading():
    run_ranks(_call_hooks, 2, "farandole")
