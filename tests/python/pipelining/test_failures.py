"""One rank fails: all ranks raise, the error names stage and microbatch, the next step runs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

MICROBATCHES = 5


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("backward broke")


class Unreadable(torch.Tensor):
    """A gradient that cannot be copied, as that of a collective that failed."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Unreadable:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0])
        raise ConnectionError("gradient broke")


class UnreadableGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return Unreadable(grad)


class Fragile(nn.Module):
    """Fails at the n-th call, forward or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fail_in = ""
        self.fail_at = -1
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fails = self.calls == self.fail_at
        self.calls += 1
        if fails and self.fail_in == "forward":
            raise ValueError("forward broke")
        if fails and self.fail_in == "interrupt":
            raise KeyboardInterrupt
        y = self.linear(UnreadableGradient.apply(x) if fails and self.fail_in == "gradient" else x)
        if fails and self.fail_in == "shape":
            return torch.cat([y, y])
        return FailingBackward.apply(y) if fails and self.fail_in == "backward" else y


class Raises(nn.Linear):
    def __init__(self, text: str) -> None:
        super().__init__(4, 4)
        self.text = text

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.text:
            raise ValueError(self.text)
        return super().forward(x)


def _step(schedule, batch, target) -> BaseException | None:
    try:
        schedule.step(batch, target=target)
    except (RuntimeError, ValueError, TypeError, KeyboardInterrupt) as error:
        return error
    return None


def _fail_everywhere(rank: int, world_size: int) -> int:
    torch.manual_seed(0)
    stages: list[nn.Module] = [Fragile() for _ in range(world_size)]
    batch, target = torch.randn(2 * MICROBATCHES, 4), torch.randn(2 * MICROBATCHES, 4)
    alone, _, _ = train_alone(copy.deepcopy(stages), nn.MSELoss(), batch, target, MICROBATCHES)
    own = stages[rank]
    count = 0
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        for learned in (False, True):
            for fail_in in ("forward", "backward"):
                for failing in range(world_size):
                    for microbatch in (0, 2, MICROBATCHES - 1):
                        where = (schedule_class.__name__, learned, fail_in, failing, microbatch)
                        stage = PipelineStage(own, rank, world_size, DEVICE)
                        schedule = schedule_class(stage, MICROBATCHES, nn.MSELoss())
                        if learned:
                            assert _step(schedule, batch, target) is None, where
                        own.calls, own.fail_in, own.fail_at = 0, fail_in, microbatch if rank == failing else -1
                        error = _step(schedule, batch, target)
                        assert type(error) is RuntimeError, (where, error)
                        assert f"rank {failing}, stage {failing}, microbatch {microbatch}: {fail_in}: " in str(error)
                        assert f"Error: {fail_in} broke" in str(error), (where, str(error))
                        cause = {"forward": ValueError, "backward": ArithmeticError}[fail_in]
                        assert (type(error.__cause__) is cause) == (rank == failing), (where, error.__cause__)
                        own.fail_at = -1
                        own.zero_grad()
                        assert _step(schedule, batch, target) is None, where
                        assert_same_gradients(own, alone[rank], where)
                        count += 1
    return count


@pytest.mark.sample(4)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failure_on_one_rank_reaches_all_and_the_next_step_runs(backend: str, world_size: int) -> None:
    cases = 2 * 2 * 2 * 3 * world_size
    assert run_ranks(_fail_everywhere, world_size, backend, timeout=120) == [cases] * world_size


def _fail_in_what_is_handed_over(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    stages: list[nn.Module] = [Fragile() for _ in range(world_size)]
    batch, target = torch.randn(2 * MICROBATCHES, 4), torch.randn(2 * MICROBATCHES, 4)
    alone, _, _ = train_alone(copy.deepcopy(stages), nn.MSELoss(), batch, target, MICROBATCHES)
    own = stages[rank]
    for learned in (False, True):
        schedule = Schedule1F1B(PipelineStage(own, rank, world_size, DEVICE), MICROBATCHES, nn.MSELoss())
        if learned:
            assert _step(schedule, batch, target) is None
        own.calls, own.fail_in, own.fail_at = 0, "gradient", 2 if rank == 1 else -1
        error = _step(schedule, batch, target)
        assert "rank 1, stage 1, microbatch 2: backward: the gradient of input 0: ConnectionError" in str(error), error
        own.fail_at = -1
        own.zero_grad()
        assert _step(schedule, batch, target) is None
        assert_same_gradients(own, alone[rank], f"learned {learned}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_cannot_be_sent_is_an_error_of_its_stage(backend: str) -> None:
    run_ranks(_fail_in_what_is_handed_over, 3, backend)


def _fail_at_length(rank: int, world_size: int) -> None:
    # Of a byte more or less in front, one has the cut fall into a character.
    for prefix in ("x", "xx"):
        _fail_with(prefix + "\u00e9" * 3000, rank, world_size)


def _fail_with(text: str, rank: int, world_size: int) -> None:
    module = Raises(text if rank == 0 else "")
    schedule = ScheduleGPipe(PipelineStage(module, rank, world_size, DEVICE), 2, nn.MSELoss())
    error = _step(schedule, torch.randn(2, 4), torch.randn(2, 4))
    assert type(error) is RuntimeError and f"stage 0, microbatch 0: forward: ValueError: {text[:9]}" in str(error), (
        error
    )
    schedule = ScheduleGPipe(PipelineStage(Raises(""), rank, world_size, DEVICE), 2, nn.MSELoss())
    assert _step(schedule, torch.randn(2, 4), torch.randn(2, 4)) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_error_is_cut_between_two_characters(backend: str) -> None:
    run_ranks(_fail_at_length, 2, backend)


class Boundless(nn.Module):
    """Returns at its n-th call what has no memory of its own, and more elements than there is memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fail_at, self.calls = -1, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.calls += 1
        return y.sum().expand(2**50) if self.calls - 1 == self.fail_at else y


def _fail_to_hand_over(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Boundless() for _ in range(world_size)]
    batch, target = torch.randn(2 * MICROBATCHES, 4), torch.randn(2 * MICROBATCHES, 4)
    alone, _, _ = train_alone(copy.deepcopy(modules), nn.MSELoss(), batch, target, MICROBATCHES)
    own = modules[rank]
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        for microbatch in (0, MICROBATCHES - 1):
            where = (schedule_class.__name__, microbatch)
            schedule = schedule_class(PipelineStage(own, rank, world_size, DEVICE), MICROBATCHES, nn.MSELoss())
            own.calls, own.fail_at = 0, microbatch if rank == 0 else -1
            error = str(_step(schedule, batch, target))
            assert f"rank 0, stage 0, microbatch {microbatch}: what the module returned: " in error, error
            own.fail_at = -1
            own.zero_grad()
            assert _step(schedule, batch, target) is None, where
            assert_same_gradients(own, alone[rank], where)


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_that_cannot_be_sent_fail_their_stage_and_the_next_step_runs(backend: str) -> None:
    run_ranks(_fail_to_hand_over, 3, backend)


def _fail_twice(rank: int, world_size: int) -> None:
    stage = Fragile()
    schedule = ScheduleGPipe(PipelineStage(stage, rank, world_size, DEVICE), 3, nn.MSELoss())
    stage.fail_in, stage.fail_at = "forward", 1
    error = _step(schedule, torch.randn(6, 4), torch.randn(6, 4))
    # Rank 1 does not even compute once it knows that what it would get is void.
    assert str(error).count("forward broke") == 1
    assert "rank 0, stage 0, microbatch 1" in str(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_failure_that_caused_the_others_is_the_one_reported(backend: str) -> None:
    run_ranks(_fail_twice, 2, backend)


def _interrupt(rank: int, world_size: int) -> None:
    stage = Fragile()
    schedule = Schedule1F1B(PipelineStage(stage, rank, world_size, DEVICE), 3, nn.MSELoss())
    stage.fail_in, stage.fail_at = "interrupt", 1 if rank == 0 else -1
    error = _step(schedule, torch.randn(6, 4), torch.randn(6, 4))
    assert type(error) is (KeyboardInterrupt if rank == 0 else RuntimeError)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_is_raised_as_itself_where_it_came_from(backend: str) -> None:
    run_ranks(_interrupt, 2, backend)


def _change_output_shape(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    stage = Fragile()
    schedule = Schedule1F1B(PipelineStage(stage, rank, world_size, DEVICE), 3, nn.MSELoss())
    batch, target = torch.randn(6, 4), torch.randn(6, 4)
    assert _step(schedule, batch, target) is None
    stage.calls, stage.fail_in, stage.fail_at = 0, "shape", 1 if rank == 0 else -1
    text = str(_step(schedule, batch, target))
    assert "rank 0, stage 0, microbatch 1: the outputs are (float32[4, 4] requires grad)" in text, text
    assert "expected (float32[2, 4] requires grad)" in text, text
    stage.fail_at = -1
    assert _step(schedule, batch, target) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_that_changes_its_shape_is_an_error_not_wrong_data(backend: str) -> None:
    run_ranks(_change_output_shape, 2, backend)


class Returns(nn.Module):
    def __init__(self, value) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.value = value

    def forward(self, x):
        return self.value if self.value is not None else self.linear(x)


def _return_no_tensor(rank: int, world_size: int) -> None:
    batch, target = torch.randn(4, 4), torch.randn(4, 4)
    for value, text in (
        (3, "returned a int without a tensor"),
        ([{}], "a list without a tensor"),
        (torch.eye(2).to_sparse(), "Sparse"),
    ):
        module = Returns(value if rank == 0 else None)
        schedule = ScheduleGPipe(PipelineStage(module, rank, world_size, DEVICE), 2, nn.MSELoss())
        error = str(_step(schedule, batch, target))
        assert all(part in error for part in ("rank 0, stage 0, microbatch 0", text, "expected a")), error
        module.value = None
        assert _step(schedule, batch, target) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stage_that_returns_no_tensor_or_none_that_can_be_sent_is_named(backend: str) -> None:
    run_ranks(_return_no_tensor, 2, backend)


def _return_bad_loss(rank: int, world_size: int) -> None:
    batch, target = torch.randn(4, 4), torch.randn(4, 4)
    for loss_fn, text in (
        (lambda x, y: (x - y) ** 2, "a tensor of shape [2, 4]"),
        (lambda x, y: 1.0, "returned a float"),
        (lambda x, y: (x - y).detach().sum(), "expected a tensor of one element that requires grad"),
        (lambda x: x.sum(), "TypeError"),
    ):
        module = nn.Linear(4, 4)
        schedule = Schedule1F1B(PipelineStage(module, rank, world_size, DEVICE), 2, loss_fn)
        error = str(_step(schedule, batch, target))
        assert f"rank {world_size - 1}, stage {world_size - 1}, microbatch 0" in error, error
        assert text in error, error


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_is_no_scalar_is_named(backend: str) -> None:
    run_ranks(_return_bad_loss, 2, backend)


def _mismatch_declaration(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    batch, target = torch.randn(4, 4), torch.randn(4, 4)
    good, bad = torch.empty(2, 4), torch.empty(2, 5, dtype=torch.float64)
    for declared, where, expected in (
        ({1: {"input_args": bad}}, "stage 1, microbatch 0: the inputs", "(float64[2, 5])"),
        ({0: {"output_args": (bad,)}}, "stage 0, microbatch 0: the outputs", "(float64[2, 5])"),
        ({1: {"output_args": bad}}, "stage 1, microbatch 0: forward: ", "(float64[2, 5])"),
        ({0: {"output_args": (good, good)}}, "stage 0, microbatch 0", "(float32[2, 4], float32[2, 4])"),
    ):
        stage = PipelineStage(nn.Linear(4, 4), rank, world_size, DEVICE, **declared.get(rank, {}))
        text = str(_step(ScheduleGPipe(stage, 2, nn.MSELoss()), batch, target))
        for part in (where, "are (float32[2, 4] requires grad)", f"expected as declared {expected}"):
            assert part in text, text
    stage = PipelineStage(nn.Linear(4, 4), rank, world_size, DEVICE, input_args=good, output_args=good)
    schedule = ScheduleGPipe(stage, 2, nn.MSELoss())
    assert _step(schedule, batch, target) is None
    assert _step(schedule, batch[:3], target[:3]) is not None  # microbatches of 2 and 1 rows, declared 2
    assert _step(schedule, batch, target) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_declared_shapes_that_do_not_hold_are_an_error_on_both_sides(backend: str) -> None:
    run_ranks(_mismatch_declaration, 2, backend)


def _pass_bad_arguments(rank: int, world_size: int) -> None:
    last = world_size - 1
    batch, target = torch.randn(4, 4), torch.randn(4, 4)
    schedule = Schedule1F1B(PipelineStage(nn.Linear(4, 4), rank, world_size, DEVICE), 3, nn.MSELoss())

    def check(culprit: int, kind: type, text: str, *args, **kwargs) -> None:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
            schedule.step(*args, **kwargs)
        assert text in str(raised.value), raised.value
        assert type(raised.value) is (kind if rank == culprit else RuntimeError), raised.value
        if rank != culprit:
            assert f"the step cannot run: rank {culprit}: stage {culprit}: {kind.__name__}: " in str(raised.value)
        schedule.step(batch, target=target)  # the group is as good as before

    own = {"target": target} if rank == last else {}
    check(
        0, ValueError, "argument 0 has 2 rows along dimension 0, expected at least n_microbatches=3", batch[:2], **own
    )
    check(last, ValueError, "target has 1 rows", batch, **({"target": target[:1]} if rank == last else {}))
    check(last, ValueError, "target is None, expected", batch)
    check(last, TypeError, "target is a int", batch, **({"target": 3} if rank == last else {}))
    check(0, ValueError, "arg_mbs is a list of 1", **({"arg_mbs": [(batch,)]} if rank == 0 else own))
    check(0, TypeError, "losses is a tuple", batch, **({"losses": ()} if rank == 0 else own))
    with torch.set_grad_enabled(rank != 0):
        own_step = schedule.step
        with pytest.raises(RuntimeError, match="gradients disabled"):
            own_step(batch, target=target)
    schedule.step(batch, target=target)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_arguments_on_one_rank_are_an_error_on_all(backend: str) -> None:
    run_ranks(_pass_bad_arguments, 2, backend)


def _run_different_things(rank: int, world_size: int) -> None:
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    stage = PipelineStage(nn.Linear(4, 4), rank, world_size, DEVICE)
    schedule = ScheduleGPipe(stage, 2 + rank, nn.MSELoss())
    text = str(_step(schedule, batch, target))
    for other in range(world_size):
        assert f"rank {other} runs ScheduleGPipe step, stage {other}, n_microbatches={2 + other}" in text, text
    same = Schedule1F1B(stage, 2, nn.MSELoss())
    with pytest.raises(RuntimeError, match="rank 1 runs Schedule1F1B forward only"):
        same.step(batch, target=target) if rank == 0 else same.eval(batch)
    same.step(batch, target=target)
    dist.barrier()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_run_different_steps_are_told_so(backend: str) -> None:
    run_ranks(_run_different_things, 2, backend)
