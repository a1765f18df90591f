"""What the tests of farandole.megatron share: models of chunks, and recorders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from farandole import megatron
from support.devices import ON_CPU, seeded

HIDDEN, SEQUENCE, BATCH = 6, 4, 2


class _Note(torch.autograd.Function):
    """The identity; notes when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note()
        return grad, None


class Chunk(nn.Module):
    """One chunk of a model as Megatron's are: it takes its input by set_input_tensor."""

    def __init__(self, config: Any, stage: int, num_stages: int, log: list[Any] | None = None):
        super().__init__()
        torch.manual_seed(100 + stage)
        self.config = config
        self.model_type = config.model_type
        self.stage, self.is_first, self.is_last = stage, stage == 0, stage == num_stages - 1
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.double)
        self.input_tensor: torch.Tensor | None = None
        self.log = [] if log is None else log
        self.microbatch = 0

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        assert isinstance(tensors, list) and len(tensors) == 1 and (tensors[0] is None) == self.is_first
        self.input_tensor = tensors[0]

    def set_is_first_microbatch(self) -> None:
        self.log.append(("first microbatch", self.stage))

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        number, self.microbatch = self.microbatch, self.microbatch + 1
        self.log.append(("F", self.stage, number))
        given = x if self.is_first else self.input_tensor
        assert given is not None
        y = torch.tanh(self.linear(given))
        if torch.is_grad_enabled():
            y = _Note.apply(y, lambda: self.log.append(("B", self.stage, number)))
        return y.sum(-1) if self.is_last else y * 1.25


def forward_step(kind: str, log: list[Any], iterator: Iterator[Any], model: nn.Module, *checkpoint: bool) -> Any:
    """Whatever the kind of its loss function says."""
    log.append(("step", *checkpoint))
    batch = next(iterator)
    x, weights = (batch["x"], batch["weights"]) if batch is not None else (None, None)
    output = model(x)
    return output, partial(loss_func, kind, weights)


def loss_func(kind: str, weights: torch.Tensor, output: torch.Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return {"max": output.detach().max()}
    total = (output**2 * weights).sum()
    if kind == "mean":
        loss = total / weights.sum().clamp(min=1)
        return loss, {"loss": loss.detach().clone()}
    tokens = weights.sum()  # int64, where the count of all of them has int32
    return total, tokens, {"total": total.detach().clone(), "tokens": tokens}


def batches(seed: int, count: int, length: int = SEQUENCE, varies: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """`varies`: each microbatch has a length of its own, up to twice the given one."""
    generator = seeded(seed)
    for _ in range(count):
        own = int(torch.randint(1, 2 * length + 1, (), generator=generator)) if varies else length
        x = torch.randn(own, BATCH, HIDDEN, generator=generator, dtype=torch.double)
        yield {"x": x, "weights": torch.randint(0, 3, (own, BATCH), generator=generator)}


@dataclass
class Recorder:
    """Timers, synchronization and finalization that note when they are called."""

    log: list[Any] = field(default_factory=list)

    def timers(self, name: str, log_level: int | None = None) -> Any:
        note = self.log.append
        return SimpleNamespace(
            start=lambda barrier=False: note(("start", name, log_level, barrier)), stop=lambda: note(("stop", name))
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.log.append("no sync")
        yield
        self.log.append("sync")

    def grad_sync(self, parameters: Any) -> None:
        self.log.append(("grad sync", [tuple(p.shape) for p in parameters]))

    def param_sync(self, chunk: int, parameters: Any) -> None:
        self.log.append(("param sync", chunk, len(list(parameters))))

    def finalize(
        self, models: Any, num_tokens: Any = None, pg_collection: Any = None, force_all_reduce: Any = None
    ) -> None:
        tokens = None if num_tokens is None else (int(num_tokens), num_tokens.dtype)
        self.log.append(("finalize", len(models), tokens, pg_collection is not None, force_all_reduce))


def collection_of(tp: int = 1, cp: int = 1) -> Any:
    """What stands for process groups by Megatron-core's names: of the sizes that shapes and losses depend on."""
    groups = {"tp": SimpleNamespace(size=lambda: tp), "cp": SimpleNamespace(size=lambda: cp)}
    return SimpleNamespace(**groups, embd=None, pos_embd=None, pp=None, dp_cp=None)


def gradients(models: list[nn.Module]) -> list[torch.Tensor | None]:
    return [p.grad for model in models for p in model.parameters()]


def config_of(**options: Any) -> Any:
    """For chunks of these tests."""
    config = megatron.ModelParallelConfig(hidden_size=HIDDEN, pipeline_dtype=torch.double, **options)
    config.model_type = megatron.ModelType.encoder_or_decoder  # type: ignore[attr-defined]
    return config


def chunk_of(stage: int, num_stages: int, **options: Any) -> Chunk:
    """A chunk with such a config."""
    return Chunk(config_of(**options), stage, num_stages)


def arguments(model: Any, count: int, **changed: Any) -> dict[str, Any]:
    """Of a forward-backward function."""
    given = dict(
        forward_step_func=partial(forward_step, "mean", []),
        data_iterator=batches(1, count),
        model=model,
        num_microbatches=count,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    return given | changed


def train_alone(num_stages: int, count: int, seeds: list[int]) -> tuple[list[Chunk], list[float]]:
    """All chunks in one process, with gradients that are means over the seeds' batches; and the losses."""
    chunks = [chunk_of(stage, num_stages) for stage in range(num_stages)]
    losses = []
    for seed in seeds:
        for batch in batches(seed, count):
            x = batch["x"]
            for chunk in chunks:
                chunk.set_input_tensor([None if chunk.is_first else x])
                x = chunk(x)
            loss, _ = loss_func("mean", batch["weights"], x)
            losses.append(loss.item())
            (loss / count / len(seeds)).backward()
    return chunks, losses


def assert_gradients(model: nn.Module, expected: nn.Module, factor: float = 1) -> None:
    """Those of the model are so many times those that are expected."""
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        torch.testing.assert_close(grad, factor * other.grad, rtol=1e-9, atol=1e-12)


def assert_equal(ours: Any, theirs: Any, context: Any) -> None:
    """Also of tensors within lists, tuples and dicts; these within 1e-12."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), context
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=lambda text: f"{context}: {text}")
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), context
        for key, value in theirs.items():
            assert_equal(ours[key], value, (context, key))
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs), context
        for i, value in enumerate(theirs[: len(ours)]):
            assert_equal(ours[i], value, (context, i))
        assert len(ours) == len(theirs), (context, ours[len(theirs) :], theirs[len(ours) :])
    else:
        assert ours == theirs, (context, ours, theirs)


def count_held(storages: Sequence[Callable[[], Any]], most: int) -> int:
    """How many of what is weakly referred to are there still. On a GPU once the device has done what it was told, and
    until those who look for that have let go all but ``most``: seconds, if need be.
    """
    deadline = time.monotonic()
    if not ON_CPU:
        torch.cuda.synchronize()
        deadline = time.monotonic() + 5
    while (held := sum(storage() is not None for storage in storages)) > most and time.monotonic() < deadline:
        time.sleep(0.001)
    return held


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
