"""Models as users have them: wrapped, split into encoder and decoder, in replicas, asking where they are."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from farandole import megatron
from farandole.ddp import DistributedDataParallel
from farandole.megatron import parallel_state
from farandole.megatron._models import set_current_microbatch
from megatron_api import megatron_support as support
from support.devices import DEVICE, only_on_cpu
from support.megatrons import check_version, environment_of, every_megatron, import_schedules, needs_megatron
from support.processes import run_ranks


def _train(models: list[nn.Module], count: int, seed: int) -> None:
    iterators = [support.batches(seed, count) for _ in models]
    interleaved = len(models) > 1
    given = support.arguments(
        models if interleaved else models[0],
        count,
        data_iterator=iterators if interleaved else iterators[0],
    )
    megatron.get_forward_backward_func()(**given)


class Float16Module(nn.Module):
    """Wraps as Megatron's does, with another dtype."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def _wrap(kind: str, chunk: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    if kind == "ours":
        return DistributedDataParallel(chunk, process_group=group)
    if kind == "sharded":
        return fully_shard(chunk, mesh=DeviceMesh.from_group(group, DEVICE))
    if kind == "torch":
        return nn.parallel.DistributedDataParallel(chunk, process_group=group)
    if kind == "ours over Float16Module":
        return DistributedDataParallel(Float16Module(chunk), process_group=group)
    return torch.compile(chunk, backend="eager") if kind == "compiled" else Float16Module(chunk)


def _wrapped(rank: int, world_size: int, virtual: int | None) -> None:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual
    )
    stage, size = parallel_state.get_pipeline_model_parallel_rank(), 2
    replicas = parallel_state.get_data_parallel_group()
    chunks = virtual or 1
    kinds = (
        ["ours", "torch", "ours over Float16Module", "sharded"] if world_size == 4 else ["compiled", "Float16Module"]
    )
    for kind in kinds:
        for hooked in (False, True):
            config = support.config_of()
            own = [support.Chunk(config, c * size + stage, size * chunks) for c in range(chunks)]
            models = [_wrap(kind, chunk, replicas) for chunk in own]
            if hooked and kind.startswith("ours"):
                config.no_sync_func = [model.no_sync for model in models]
            seeds = [5 + replica for replica in range(replicas.size())]
            for _ in range(2):
                _train(models, 4, seeds[replicas.rank()])
            alone, _ = support.train_alone(size * chunks, 4, seeds)
            for chunk in own:
                support.assert_gradients(chunk, alone[chunk.stage], factor=2)  # of two steps
    parallel_state.destroy_model_parallel()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "virtual"), [(2, None), (2, 2), (4, None), (4, 2)])
def test_wrapped_models_train_and_replicas_average(size, virtual):
    run_ranks(_wrapped, size, "farandole", timeout=120, virtual=virtual)


class EncoderDecoder(nn.Module):
    """A rank's layer of an encoder, or of a decoder that looks at what the encoder made."""

    def __init__(self, rank: int, split: int, size: int):
        super().__init__()
        torch.manual_seed(40 + rank)
        self.model_type = megatron.ModelType.encoder_and_decoder
        self.rank, self.split, self.size = rank, split, size
        self.linear = nn.Linear(support.HIDDEN, support.HIDDEN, dtype=torch.double)
        self.config: Any = None
        self.tensors: list[Any] = [None]

    def set_input_tensor(self, tensors: list[Any]) -> None:
        assert len(tensors) == (2 if self.rank > self.split else 1)
        self.tensors = tensors

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.rank < self.split:
            return torch.tanh(self.linear(source if self.rank == 0 else self.tensors[0]))
        own = target if self.rank == self.split else self.tensors[0]
        return torch.tanh(self.linear(own)) * self.tensors[-1].mean(0)


def _encode_decode(rank: int, world_size: int, split: int, variable: bool, seed: int) -> None:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=world_size, pipeline_model_parallel_split_rank=split
    )
    assert parallel_state.is_pipeline_stage_before_split() == (rank < split)
    source_length, target_length, count = 7, 3, 5
    rng = random.Random(seed)
    lengths = [(source_length, target_length)] * count
    if variable:
        lengths = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]
    model = EncoderDecoder(rank, split, world_size)
    model.config = support.config_of(variable_seq_lengths=variable)
    alone = [EncoderDecoder(i, split, world_size) for i in range(world_size)]
    torch.manual_seed(1)
    shape = support.BATCH, support.HIDDEN
    pairs = [
        (torch.randn(source, *shape, dtype=torch.double), torch.randn(target, *shape, dtype=torch.double))
        for source, target in lengths
    ]

    def forward_step(iterator: Iterator[Any], model: nn.Module) -> Any:
        return model(*next(iterator)), lambda output: (output.square().mean(), {"mean": output.mean().item()})

    step = megatron.get_forward_backward_func()
    arguments: dict[str, Any] = dict(
        forward_step_func=forward_step,
        model=model,
        num_microbatches=count,
        seq_length=source_length,
        decoder_seq_length=target_length,
        micro_batch_size=support.BATCH,
    )
    reduced = step(data_iterator=iter(pairs), **arguments)
    means = []
    for source, target in pairs:
        encoded, decoded = source, target
        for one in alone:
            one.set_input_tensor([decoded, encoded] if one.rank > split else [encoded])
            output = one(source, target)
            encoded, decoded = (output, decoded) if one.rank < split else (encoded, output)
        means.append(decoded.mean().item())
        (decoded.square().mean() / count).backward()
    support.assert_gradients(model, alone[rank])
    assert len(reduced) == (count if rank == world_size - 1 else 0)
    for one, mean in zip(reduced, means):
        assert one["mean"] == pytest.approx(mean, rel=1e-9)
    with torch.no_grad():
        evaluated = step(data_iterator=iter(pairs), forward_only=True, **arguments)
    for one, mean in zip(evaluated, means):
        assert one["mean"] == pytest.approx(mean, rel=1e-9)
    parallel_state.destroy_model_parallel()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("size", "split"), [(2, 1), (4, 1), (4, 2), (4, 3)])
@pytest.mark.parametrize("variable", [False, True])
def test_decoder_stages_relay_what_the_encoder_made_and_its_gradients_add_up(size, split, variable):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    run_ranks(_encode_decode, size, "farandole", split=split, variable=variable, seed=seed)


def _asks_where_it_is(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=world_size, virtual_pipeline_model_parallel_size=2
    )
    import_schedules()
    from megatron.core import parallel_state as theirs

    config = support.config_of()
    seen: list[Any] = []
    models = [support.Chunk(config, c * world_size + rank, 2 * world_size) for c in range(2)]

    def where(kind: str, stage: int) -> None:
        seen.append((kind, stage))
        assert parallel_state.is_pipeline_first_stage(ignore_virtual=False) == (stage == 0)
        assert parallel_state.is_pipeline_last_stage(ignore_virtual=False) == (stage == 2 * world_size - 1)
        chunk = parallel_state.get_virtual_pipeline_model_parallel_rank()
        assert chunk == stage // world_size == theirs.get_virtual_pipeline_model_parallel_rank()

    for model in models:
        model.register_forward_pre_hook(lambda module, _: where("F", module.stage))
        model.linear.weight.register_hook(lambda grad, stage=model.stage: where("B", stage))
    _train(models, 2 * world_size, 3)
    assert len(seen) == 2 * 2 * 2 * world_size
    parallel_state.destroy_model_parallel()


@needs_megatron
def test_user_functions_learn_which_chunk_runs_in_forward_and_backward():
    run_ranks(_asks_where_it_is, 2, "farandole")


def _lets_outputs_go(rank: int, world_size: int) -> list[int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    model = support.chunk_of(rank, world_size)
    outputs: list[Any] = []
    alive: list[int] = []

    def forward_step(iterator: Iterator[Any], model: nn.Module) -> Any:
        alive.append(support.count_held(outputs, most=2))
        batch = next(iterator)
        output = model(batch["x"])
        # What a linear layer returns is saved by nothing: only the schedule may hold it.
        output = output if rank == world_size - 1 else output @ torch.eye(support.HIDDEN, dtype=torch.double)
        outputs.append(weakref.ref(output.untyped_storage()))
        return output, partial(support.loss_func, "mean", batch["weights"])

    for _ in range(2):
        alive.clear()
        outputs.clear()
        megatron.get_forward_backward_func()(**support.arguments(model, 12, forward_step_func=forward_step))
    parallel_state.destroy_model_parallel()
    return alive


def test_outputs_that_have_been_sent_are_let_go():
    # The first of four stages keeps the graphs of four microbatches, and at most the outputs still on their way.
    alive = run_ranks(_lets_outputs_go, 4, "farandole")
    assert max(alive[0]) <= 2, alive


def _held_outputs_stay(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    model = support.chunk_of(rank, world_size, deallocate_pipeline_outputs=True)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward_step(iterator: Iterator[Any], model: nn.Module) -> Any:
        batch = next(iterator)
        output = model(batch["x"])
        if rank < world_size - 1:
            output = output.view(support.SEQUENCE, -1).view(output.shape)  # a view of what else is held
        held.append((output, output.detach().clone()))
        return output, partial(support.loss_func, "mean", batch["weights"])

    megatron.get_forward_backward_func()(**support.arguments(model, 6, forward_step_func=forward_step))
    if rank < world_size - 1:
        for output, copied in held:
            assert torch.equal(output, copied)
    parallel_state.destroy_model_parallel()


def test_views_and_outputs_that_the_user_holds_keep_their_values():
    run_ranks(_held_outputs_stay, 2, "farandole")


def _frozen_first_stage(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    model = support.chunk_of(rank, world_size)
    alone, _ = support.train_alone(world_size, 3, [2])
    if rank == 0:
        model.requires_grad_(False)
    _train([model], 3, 2)
    if rank == 0:
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        support.assert_gradients(model, alone[rank])
    parallel_state.destroy_model_parallel()


def test_a_stage_without_gradients_passes_its_output_on():
    run_ranks(_frozen_first_stage, 3, "gloo")


def _evaluates(rank: int, world_size: int, virtual: int | None) -> None:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=world_size, virtual_pipeline_model_parallel_size=virtual
    )
    chunks = virtual or 1
    models = [support.chunk_of(c * world_size + rank, chunks * world_size) for c in range(chunks)]
    for model in models:  # as Megatron-core's transformer block, whatever the mode is
        model.register_forward_hook(lambda module, _, output: output if module.is_last else output.requires_grad_())
    _, expected = support.train_alone(world_size * chunks, 4, [3])
    iterators = [support.batches(3, 4) for _ in models]
    given = support.arguments(
        models if virtual else models[0], 4, data_iterator=iterators if virtual else iterators[0], forward_only=True
    )
    losses = megatron.get_forward_backward_func()(**given)
    if rank == world_size - 1:
        assert [one["loss"].item() for one in losses] == pytest.approx(expected, rel=1e-9)
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("virtual", [None, 2])
def test_a_forward_only_step_takes_outputs_that_say_they_require_a_gradient(virtual):
    run_ranks(_evaluates, 2, "farandole", virtual=virtual)


class _Layers(nn.Module):
    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)


def _numbered_model(mtp_layer: str) -> nn.Module:
    """With what Megatron-core's functions look for in a model: all are told the microbatch."""
    model = nn.Module()
    model.decoder = _Layers([nn.Linear(1, 1), nn.Linear(1, 1)])
    predictor = nn.Module()
    setattr(predictor, mtp_layer, nn.Linear(1, 1))
    model.mtp = _Layers([predictor])
    model.vision_model = nn.Module()
    model.vision_model.decoder = _Layers([nn.Linear(1, 1)])
    return Float16Module(model)


def _numbers_layers(rank: int, world_size: int, version: str) -> None:
    schedules = import_schedules()
    check_version(version)
    told = []
    for tell in (schedules.set_current_microbatch, set_current_microbatch):
        model = _numbered_model("transformer_layer" if version < "0.17" else "mtp_model_layer")
        tell(model, 3)
        told.append({name: getattr(module, "current_microbatch", None) for name, module in model.named_modules()})
    theirs, ours = told
    expected = {name: number for name, number in theirs.items() if number is not None}
    assert expected
    assert {name: ours[name] for name in expected} == expected


@only_on_cpu("no tensors")
@every_megatron
def test_layers_are_told_the_microbatch_as_megatrons_schedules_tell_them(version):
    run_ranks(_numbers_layers, 1, "gloo", env=environment_of(version), version=version)
