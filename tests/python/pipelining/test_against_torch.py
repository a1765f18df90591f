"""Arguments of steps mean what they mean in torch.distributed.pipelining: both run them, in the same processes."""

from __future__ import annotations

import copy
import inspect
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, get_schedule_class
from pipelining.pipeline_support import BACKENDS, assert_same_gradients
from support.devices import DEVICE, backend_for
from support.processes import run_ranks

IN, WIDTH, MICROBATCHES = 4, 3, 4
SINGLE = ["GPipe", "1F1B"]
MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]


class Stage(nn.Module):
    """The first stage takes its input with the batch in another dimension where it is asked to, and the last one so gives
    its output.
    """

    def __init__(self, in_features: int, transposes_input: bool, transposes_output: bool, returns_pair: bool = False):
        super().__init__()
        self.returns_pair = returns_pair
        self.linear = nn.Linear(in_features, WIDTH, dtype=torch.double)
        self.transposes_input, self.transposes_output = transposes_input, transposes_output

    def forward(
        self, x: torch.Tensor, *, scale: Any = None, shift: Any = None, times: float = 1.0, note: Any = None
    ) -> Any:
        y = torch.tanh(self.linear(x.t() if self.transposes_input else x)) * times
        if scale is not None:
            y = y * scale
        if shift is not None:
            y = y + shift
        assert note in (None, "note")
        output = y.t() if self.transposes_output else y
        return (output, y.sum()) if self.returns_pair else output


@dataclass(frozen=True)
class Options:
    name: str
    batch_is_second: bool  # of the input
    output_is_second: bool
    output_is_pair: bool  # the second is summed over microbatches
    scale: bool  # keyword arguments: a tensor that is split, one that is not, and what is no tensor
    shift: bool
    times: bool
    names_kwargs: bool  # in a chunk spec
    pre_split: bool
    losses: bool
    return_outputs: bool
    loss_kwargs: str
    scale_grads: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Options:
        def flip() -> bool:
            return rng.random() < 0.5

        # torch 2.11 has no arg_mbs or loss_kwargs, refuses parts along another dimension for their strides, and with
        # several stages on a rank sends to itself, which gloo does not.
        is_newer = "arg_mbs" in inspect.signature(_torchs_class("GPipe").step).parameters
        name = rng.choice(SINGLE + (MULTI if is_newer else []))
        shift = flip()
        return cls(
            name=name,
            batch_is_second=flip() and is_newer,
            output_is_second=flip(),
            output_is_pair=flip(),
            scale=flip(),
            shift=shift,
            times=flip(),
            names_kwargs=shift or flip(),  # it would be split otherwise
            pre_split=flip() and is_newer,
            losses=flip(),
            return_outputs=flip(),
            loss_kwargs=rng.choice(["none", "empty", "number", "tensor"]) if is_newer else "none",
            scale_grads=flip(),
        )


def _torchs_class(name: str) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class as torchs

    return torchs(name)


def _loss(output: Any, target: torch.Tensor, power: float = 2.0, weight: Any = 1.0) -> torch.Tensor:
    output = output[0] if isinstance(output, tuple) else output
    y = output if output.shape == target.shape else output.t()
    return ((y - target).abs() ** power * weight).mean()


def _construct(options: Options, kwargs: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate, sum_reducer

    given: dict[str, Any] = {"n_microbatches": MICROBATCHES, "scale_grads": options.scale_grads}
    given["loss_fn"] = _loss
    if options.name != "LoopedBFS":  # whose class in torch takes no specs of arguments
        if options.batch_is_second:
            given["args_chunk_spec"] = (TensorChunkSpec(1),)
        if options.names_kwargs and kwargs:
            given["kwargs_chunk_spec"] = {key: TensorChunkSpec(0) if key == "scale" else _Replicate for key in kwargs}
    dim = 1 if options.output_is_second else 0
    if options.output_is_pair:
        given["output_merge_spec"] = (TensorChunkSpec(dim), sum_reducer)
    elif dim != 0:
        given["output_merge_spec"] = TensorChunkSpec(dim)
    return given


def _run_both(rank: int, world_size: int, seed: int, cases: int) -> None:
    from torch.distributed.pipelining import PipelineStage as TorchsStage

    torchs_group = dist.new_group(backend=backend_for("gloo"))
    for case in range(seed, seed + cases):
        rng = random.Random(case)
        options = Options.draw(rng)
        if options.name == "LoopedBFS":
            options = Options(**{**vars(options), "batch_is_second": False, "shift": False})
        context = f"seed {case}, rank {rank}, {options}"
        torch.manual_seed(case)
        count = world_size if options.name in SINGLE else 2 * world_size
        modules = [
            Stage(
                IN if i == 0 else WIDTH,
                i == 0 and options.batch_is_second,
                i == count - 1 and options.output_is_second,
                i == count - 1 and options.output_is_pair,
            )
            for i in range(count)
        ]
        owner = [i % world_size for i in range(count)]
        if options.name == "ZBVZeroBubble":
            owner = [*range(world_size), *reversed(range(world_size))]
        mine = [i for i in range(count) if owner[i] == rank]
        rows = MICROBATCHES * rng.randint(1, 3)
        batch, target = torch.randn(rows, IN, dtype=torch.double), torch.randn(rows, WIDTH, dtype=torch.double)
        kwargs: dict[str, Any] = {}
        if options.scale:
            kwargs["scale"] = torch.rand(rows, 1, dtype=torch.double)
        if options.shift:
            kwargs["shift"] = torch.rand(1, WIDTH, dtype=torch.double)
        if options.times:
            kwargs |= {"times": 1.5, "note": "note"}
        results = []
        # Ours first: of a GPU it may wait for kernels to be loaded, which torch's may wait for in a circle.
        for stage_class, get_class, group in (
            (PipelineStage, get_schedule_class, None),
            (TorchsStage, _torchs_class, torchs_group),
        ):
            own = copy.deepcopy(modules)
            stages = [stage_class(own[i], i, count, torch.device(DEVICE), group=group) for i in mine]
            given = stages[0] if options.name in SINGLE else stages
            schedule = get_class(options.name)(given, **_construct(options, kwargs))
            results.append(
                (own, *_steps(schedule, options, batch, target, kwargs, rank == owner[0], count - 1 in mine))
            )
        (ours, our_output, our_losses), (theirs, their_output, their_losses) = results
        for i in mine:
            assert_same_gradients(ours[i], theirs[i], f"{context}, stage {i}", tolerance=1e-9)
        assert (our_output is None) == (their_output is None), context
        if our_output is not None:
            torch.testing.assert_close(our_output, their_output, msg=context)
        assert len(our_losses) == len(their_losses), context
        for ours_one, theirs_one in zip(our_losses, their_losses, strict=True):
            torch.testing.assert_close(ours_one.detach(), theirs_one.detach(), msg=context)


def _steps(
    schedule: Any, options: Options, batch: Any, target: Any, kwargs: dict[str, Any], is_first: bool, is_last: bool
) -> tuple[Any, list[Any]]:
    """Two steps, whose gradients add up where they are not scaled (torch scales those of earlier steps again): what the
    last one returns, and its losses.
    """
    loss_kwargs: dict[str, Any] = {"empty": {}, "number": {"power": 3.0}, "tensor": {"weight": torch.full((), 2.0)}}
    x = batch.t().contiguous() if options.batch_is_second else batch
    losses: list[Any] | None = ["left over"] if options.losses else None
    given: dict[str, Any] = {"losses": losses, "return_outputs": options.return_outputs}
    if options.loss_kwargs != "none":
        given["loss_kwargs"] = loss_kwargs[options.loss_kwargs]
    if options.pre_split:
        dim = 1 if options.batch_is_second else 0
        if is_first:
            given["arg_mbs"] = [(part,) for part in x.tensor_split(MICROBATCHES, dim)]
        if is_last:
            given["target_mbs"] = list(target.tensor_split(MICROBATCHES))
        if kwargs:
            scales = kwargs["scale"].tensor_split(MICROBATCHES) if "scale" in kwargs else [None] * MICROBATCHES
            rest = {key: value for key, value in kwargs.items() if key != "scale"}
            given["kwarg_mbs"] = [rest | ({} if one is None else {"scale": one}) for one in scales]
        args: tuple[Any, ...] = ()
    else:
        args = (x,) if is_first else ()
        given |= kwargs
        if is_last:
            given["target"] = target
    output = None
    for _ in range(1 if options.scale_grads else 2):
        output = schedule.step(*args, **given)
    return output, [] if losses is None or not is_last else losses


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_of_steps_mean_what_they_mean_in_torch(backend: str, world_size: int) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    run_ranks(_run_both, world_size, backend, timeout=150, seed=seed, cases=16)


def _refuse(rank: int, world_size: int) -> None:
    """Both refuse, with errors of one kind: those of torch's are raised on the rank alone."""
    from torch.distributed.pipelining import PipelineStage as TorchsStage

    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    pre_split: dict[str, Any] = {"arg_mbs": [(one,) for one in x.split(1)], "target_mbs": list(y.split(1))}
    for given, kind in (
        (dict(pre_split, target=y), ValueError),
        (dict(pre_split, scale=y), ValueError),
        (dict(pre_split, arg_mbs=pre_split["arg_mbs"][:3]), ValueError),
        (dict(pre_split, target_mbs=pre_split["target_mbs"][:3]), ValueError),
        (dict(pre_split, arg_mbs=x.split(1)), (TypeError, ValueError)),
        (dict(pre_split, arg_mbs=list(x.split(1))), TypeError),
        (dict(pre_split, kwarg_mbs=[()] * 4), TypeError),
        (dict(pre_split, losses=()), TypeError),
    ):
        for stage_class, get_class in ((TorchsStage, _torchs_class), (PipelineStage, get_schedule_class)):
            stage = stage_class(nn.Linear(WIDTH, WIDTH), 0, 1, torch.device(DEVICE))
            schedule = get_class("GPipe")(stage, 4, nn.MSELoss())
            if "arg_mbs" not in inspect.signature(type(schedule).step).parameters:
                continue
            with pytest.raises(kind):
                schedule.step(**given)
            with torch.no_grad(), pytest.raises(RuntimeError, match="gradients"):
                schedule.step(x, target=y)
            losses: list[Any] = []
            assert schedule.step(x, target=y, losses=losses).shape == y.shape and len(losses) == 4


def test_what_torch_refuses_of_a_step_is_refused() -> None:
    run_ranks(_refuse, 1, "gloo")


def _fail_in_a_loss(rank: int, world_size: int) -> None:
    """Keyword arguments that the loss does not take, or that are none: all ranks raise, and the next step runs."""
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, world_size, DEVICE)
    schedule = get_schedule_class("1F1B")(stage, 2, lambda output, target, power=2: ((output - target) ** power).mean())
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    for wrong in ({"unknown": 1}, [1], {1: 2}):
        with pytest.raises((RuntimeError, TypeError)) as raised:
            schedule.step(x, target=y, loss_kwargs=wrong if rank == world_size - 1 else None)  # type: ignore[arg-type]
        assert f"rank {world_size - 1}" in str(raised.value) or rank == world_size - 1, raised.value
    for step in (schedule.step, schedule.eval):
        losses: list[Any] = []
        outputs = step(x, target=y, losses=losses, return_outputs=False, loss_kwargs={"power": 4})
        assert outputs is None
        assert len(losses) == (2 if rank == world_size - 1 else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keyword_arguments_that_a_loss_does_not_take_are_an_error_of_all_ranks(backend: str) -> None:
    run_ranks(_fail_in_a_loss, 2, backend)


class _WithNumber(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return {"y": super().forward(x), "number": 3}


class _Sum(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


def _merge(rank: int, world_size: int) -> None:
    module = _WithNumber(WIDTH, WIDTH) if rank == world_size - 1 else nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(module, rank, world_size, DEVICE)
    schedule = get_schedule_class("1F1B")(stage, 2, lambda output, target: (output["y"] - target).square().mean())
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    if rank == world_size - 1:
        with pytest.raises(
            TypeError, match=r"output_merge_spec is None, expected one by which .* return_outputs=False"
        ):
            schedule.step(x, target=y)
    else:
        schedule.step(x)
    assert schedule.step(x, target=y, return_outputs=False) is None
    assert module.weight.grad is not None

    # Tensors alone: of other shapes in each microbatch, or with no dimension to merge along.
    lengths, scalars = [torch.randn(2, rows, WIDTH) for rows in (3, 5)], [torch.randn(WIDTH)] * 2
    for parts, last in ((lengths, nn.Linear(WIDTH, WIDTH)), (scalars, _Sum(WIDTH, WIDTH))):
        stage = PipelineStage(last if rank == world_size - 1 else nn.Linear(WIDTH, WIDTH), rank, world_size, DEVICE)
        schedule = get_schedule_class("1F1B")(stage, 2, lambda output, _: output.sum())
        given: dict[str, Any] = {"arg_mbs": [(part,) for part in parts], "target_mbs": [None, None]}
        if rank == world_size - 1:
            with pytest.raises(TypeError, match=r"output_merge_spec is None, expected .*: RuntimeError: "):
                schedule.step(**given)
        else:
            schedule.step(**given)
        assert schedule.step(**given, return_outputs=False) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_that_cannot_be_merged_are_told_and_need_not_be_returned(backend: str) -> None:
    run_ranks(_merge, 2, backend)
