"""The state of a distributed optimizer, saved and loaded: in memory, and through torch.distributed.checkpoint by other
numbers of ranks and other bucket sizes."""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_models import BACKENDS
from optimizer_oracle import OPTIMIZERS, Oracle, SmallModel, batch_of, draw, groups_of
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from farandole.ddp._optimizer_state import FlatPart
from support.devices import DEVICE, seeded
from support.processes import run_ranks

BEFORE, AFTER = 5, 5


def _make(seed: int, bucket_size: int | None) -> tuple[DistributedDataParallel, DistributedOptimizer, Oracle]:
    rng = random.Random(seed)
    dtype = rng.choice([torch.float64, torch.bfloat16])
    make = draw(rng, dtype)
    in_fp32 = dtype == torch.bfloat16
    model = DistributedDataParallel(
        SmallModel(seed, dtype),
        bucket_size=bucket_size,
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=in_fp32,
        overlap_param_gather=rng.random() < 0.5,
    )
    optimizer = DistributedOptimizer(make(groups_of(model.module)), model)
    return model, optimizer, Oracle(SmallModel(seed, dtype), make, torch.float32 if in_fp32 else dtype)


def _step(seed: int, step: int, replicas: int, model: Any, optimizer: Any) -> None:
    """The same batches whatever the number of ranks: each rank takes its share of four."""
    optimizer.zero_grad()
    share = [batch_of(seed, step, other, 0, model.module) for other in range(dist.get_rank(), 4, replicas)]
    for index, batch in enumerate(share):
        with model.no_sync() if index < len(share) - 1 else contextlib.nullcontext():
            (model(batch) / len(share)).backward()
    optimizer.step()


def _oracle_step(seed: int, step: int, oracle: Oracle) -> None:
    oracle.step([[batch_of(seed, step, other, 0, oracle.module)] for other in range(4)], None, 2.0)


def _save(rank: int, world_size: int, seed: int, folder: str) -> None:
    model, optimizer, _ = _make(seed, 300)
    for step in range(BEFORE):
        _step(seed, step, world_size, model, optimizer)
    model.start_param_sync(force_sync=True)
    dcp.save({"model": model.module.state_dict(), "optimizer": optimizer}, checkpoint_id=folder)


def _load(rank: int, world_size: int, seed: int, folder: str, bucket_size: int | None) -> None:
    model, optimizer, oracle = _make(seed, bucket_size)
    state = {"model": model.module.state_dict(), "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder)
    for step in range(BEFORE + AFTER):
        _oracle_step(seed, step, oracle)
    for step in range(BEFORE, BEFORE + AFTER):
        _step(seed, step, world_size, model, optimizer)
    model.start_param_sync(force_sync=True)
    oracle.check(model.module, f"seed {seed} rank {rank}")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [("gloo", 2, 1), *((BACKENDS[-1], before, after) for before, after in [(2, 2), (1, 4), (4, 2)])],
)
def test_training_goes_on_from_a_checkpoint_of_another_number_of_ranks(backend, before, after, tmp_path: Path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    run_ranks(_save, before, backend, timeout=60, seed=seed, folder=str(tmp_path))
    for bucket_size in (1, None):
        run_ranks(_load, after, backend, timeout=60, seed=seed, folder=str(tmp_path), bucket_size=bucket_size)


def _in_memory(rank: int, world_size: int, seeds: list[int]) -> None:
    for seed in seeds:
        for whole in (False, True):
            model, optimizer, oracle = _make(seed, 300)
            for step in range(BEFORE):
                _step(seed, step, world_size, model, optimizer)
            model.start_param_sync(force_sync=True)
            other, into, _ = _make(seed, 1 if whole else 300)
            other.module.load_state_dict(model.module.state_dict())
            if whole:
                into.load_state_dict(optimizer.full_state_dict())
            else:
                into.load_state_dict(optimizer.state_dict())
            for step in range(BEFORE + AFTER):
                _oracle_step(seed, step, oracle)
            for step in range(BEFORE, BEFORE + AFTER):
                _step(seed, step, world_size, other, into)
            other.start_param_sync(force_sync=True)
            oracle.check(other.module, f"seed {seed} whole {whole} rank {rank}")


def test_state_is_loaded_in_memory_whole_or_in_parts():
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds {first} to {first + 3}")
    run_ranks(_in_memory, 2, BACKENDS[-1], timeout=60, seeds=list(range(first, first + 4)))


def _strided(rank: int, world_size: int, folder: str) -> None:
    """Not sharded, in float32: the optimizer has the parameters themselves, of which one is not contiguous."""
    make = OPTIMIZERS[0]

    def pair() -> tuple[DistributedDataParallel, DistributedOptimizer]:
        model = DistributedDataParallel(SmallModel(3, torch.float32))
        assert not model.module.mix.is_contiguous()
        return model, DistributedOptimizer(make(groups_of(model.module)), model)

    oracle = Oracle(SmallModel(3, torch.float32), make, torch.float32)
    for step in range(BEFORE + AFTER):
        _oracle_step(3, step, oracle)
    model, optimizer = pair()
    for step in range(BEFORE):
        _step(3, step, world_size, model, optimizer)
    dcp.save({"model": model.module.state_dict(), "optimizer": optimizer}, checkpoint_id=folder)
    moments = optimizer.state[optimizer._runs[0].tensor].keys()
    mix = optimizer.full_state_dict()["state"]["mix"]
    run = next(run for run in optimizer._runs if run.pieces[0].name == "mix")
    for key in moments - {"step"}:
        assert mix[key].view(model.module.mix.shape).cpu().equal(optimizer.state[run.tensor][key].cpu())
    for way in ("checkpoint", "parts", "whole"):
        other, into = pair()
        if way == "checkpoint":
            dcp.load({"model": other.module.state_dict(), "optimizer": into}, checkpoint_id=folder)
        else:
            other.module.load_state_dict(model.module.state_dict())
            into.load_state_dict(optimizer.state_dict() if way == "parts" else optimizer.full_state_dict())
        for step in range(BEFORE, BEFORE + AFTER):
            _step(3, step, world_size, other, into)
        oracle.check(other.module, f"{way} rank {rank}")


def test_state_of_parameters_that_are_not_contiguous_is_saved_and_loaded(tmp_path: Path):
    run_ranks(_strided, 2, BACKENDS[-1], timeout=60, folder=str(tmp_path))


def _loaded(path: str) -> Any:
    return torch.load(path, map_location=DEVICE)


class _Experts(torch.nn.Module):
    """A dense layer and two experts, which differ from one group of ranks to the next."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = torch.nn.Linear(6, 6)
        torch.manual_seed(100 + number)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        for parameter in self.experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.dense(x))
        return sum(torch.tanh(expert(x)) for expert in self.experts).square().mean()


def _expert_pair(
    rank: int, sets: list[list[int]], sharded: bool, make: Any
) -> tuple[DistributedDataParallel, DistributedOptimizer, list[int]]:
    number = next(index for index, ranks in enumerate(sets) if rank in ranks)
    groups = [dist.new_group(ranks) for ranks in sets]
    model = DistributedDataParallel(
        _Experts(number), expert_process_group=groups[number], use_distributed_optimizer=sharded, bucket_size=20
    )
    return model, DistributedOptimizer(make(model.parameters(), lr=1e-2), model), sets[number]


def _train_experts(rank: int, model: Any, optimizer: Any, steps: range, world_size: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        # Each number of experts' groups sees the same batches, whoever has it: all ranks have the same.
        model(torch.randn(4, 6, generator=seeded(step))).backward()
        optimizer.step()
    if model._param_sync is not None:
        model.start_param_sync(force_sync=True)


def _save_experts(rank: int, world_size: int, sets: list[list[int]], sharded: bool, kind: str, folder: str) -> None:
    model, optimizer, mine = _expert_pair(rank, sets, sharded, getattr(torch.optim, kind))
    _train_experts(rank, model, optimizer, range(3), world_size)
    number = sets.index(mine)
    whole = optimizer.full_state_dict()["state"]
    for other in range(len(sets)):
        assert f"experts.1.weight[{other}/{len(sets)}]" in whole
    assert "dense.weight" in whole
    again, into, _ = _expert_pair(rank, sets, sharded, getattr(torch.optim, kind))
    again.module.load_state_dict(model.module.state_dict())
    into.load_state_dict(optimizer.full_state_dict())
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
    torch.save(model.module.state_dict(), f"{folder}-model-{number}-of-rank-{rank}")
    for one, its_optimizer in ((model, optimizer), (again, into)):
        _train_experts(rank, one, its_optimizer, range(3, 6), world_size)
        if rank == mine[0] and one is model:
            torch.save(one.module.state_dict(), f"{folder}-wanted-{number}")
    for (name, want), got in zip(model.module.state_dict().items(), again.module.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, msg=f"in memory: {name}")
    if rank == mine[0]:
        torch.save(_loaded(f"{folder}-model-{number}-of-rank-{rank}"), f"{folder}-model-{number}")


def _load_experts(rank: int, world_size: int, sets: list[list[int]], sharded: bool, kind: str, folder: str) -> None:
    model, optimizer, mine = _expert_pair(rank, sets, sharded, getattr(torch.optim, kind))
    number = sets.index(mine)
    model.module.load_state_dict(_loaded(f"{folder}-model-{number}"))
    dcp.load({"optimizer": optimizer}, checkpoint_id=folder)
    _train_experts(rank, model, optimizer, range(3, 6), world_size)
    for name, want in _loaded(f"{folder}-wanted-{number}").items():
        torch.testing.assert_close(
            model.module.state_dict()[name], want, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_experts_of_different_ranks_keep_their_state_apart(sharded, kind, tmp_path: Path):
    folder = str(tmp_path / "state")
    saving, loading = [[0, 2], [1, 3]], [[0], [1]]
    arguments = {"sharded": sharded, "kind": kind, "folder": folder}
    run_ranks(_save_experts, 4, BACKENDS[-1], timeout=60, sets=saving, **arguments)
    run_ranks(_load_experts, 2, BACKENDS[-1], timeout=60, sets=loading, **arguments)


def _layers(names: list[str], seed: int) -> torch.nn.ModuleDict:
    layers = torch.nn.ModuleDict()
    for index, name in enumerate(names):
        torch.manual_seed(seed + index)
        layers[name] = torch.nn.Linear(6, 6)
    return layers


def _train_stage(model: Any, optimizer: Any, number: int, steps: range) -> None:
    """The layers of a stage learn by themselves; ``number`` is that of its first."""
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=seeded(step))
        layers = enumerate(model.module.values(), number)
        sum((1 + index) * torch.tanh(layer(x)).square().mean() for index, layer in layers).backward()
        optimizer.step()
    if model._param_sync is not None:
        model.start_param_sync(force_sync=True)


def _stages(
    rank: int, world_size: int, stages: int, same: bool, sharded: bool, folder: str, saves: bool
) -> list[list[Any]]:
    """Two layers, in one stage or in two, whose modules have one name for both (``same``)."""
    replicas = world_size // stages
    replica_groups = [dist.new_group(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages)]
    stage_groups = [dist.new_group(range(replica, world_size, replicas)) for replica in range(replicas)]
    stage, replica = divmod(rank, replicas)
    names = ["first", "last"] if stages == 1 else [["first", "last"][0 if same else stage]]
    model = DistributedDataParallel(
        _layers(names, 10 + stage), process_group=replica_groups[stage], use_distributed_optimizer=sharded
    )
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, model_parallel_group=stage_groups[replica]
    )
    if saves:
        _train_stage(model, optimizer, stage, range(3))
        torch.save(list(model.module.state_dict().values()), f"{folder}-{stage}-of-{rank}")
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
    else:
        saved = [_loaded(f"{folder}-{i}-of-{2 * i}") for i in range(2)]
        mine = saved[0] + saved[1] if stages == 1 else saved[stage]
        for parameter, value in zip(model.module.parameters(), mine, strict=True):
            parameter.data.copy_(value)
        dcp.load({"optimizer": optimizer}, checkpoint_id=folder)
    _train_stage(model, optimizer, stage, range(3, 6))
    return [value.tolist() for value in model.module.state_dict().values()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("same", "stages"), [(False, 2), (True, 2), (False, 1)])
def test_stages_and_tensor_parallel_ranks_share_a_checkpoint(sharded, same, stages, tmp_path: Path):
    arguments = {"same": same, "sharded": sharded, "folder": str(tmp_path / "state")}
    saved = run_ranks(_stages, 4, BACKENDS[-1], timeout=60, stages=2, saves=True, **arguments)
    loaded = run_ranks(_stages, stages, BACKENDS[-1], timeout=60, stages=stages, saves=False, **arguments)
    want = [*saved[0], *saved[2]]
    for one, other in zip(itertools.chain.from_iterable(loaded), want, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-5)


def _loose_experts(rank: int, world_size: int) -> None:
    """Experts that replicas share with ranks that are no replicas of the rest: nobody could number them."""
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    experts = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = DistributedDataParallel(
        _Experts(0), process_group=within, expert_process_group=experts, use_distributed_optimizer=True
    )
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    _train_experts(rank, model, optimizer, range(2), world_size)
    for use in (optimizer.state_dict, optimizer.full_state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(NotImplementedError, match="groups of experts that are parts of process_group"):
            use()


def test_experts_that_nobody_could_number_are_refused():
    run_ranks(_loose_experts, 4, BACKENDS[-1], timeout=60)


def _asked_for(rank: int, world_size: int) -> None:
    """State that was made to be loaded into, and was not, leaves no trace: dampening takes the first gradient whole."""
    make = OPTIMIZERS[4]
    model = DistributedDataParallel(SmallModel(1, torch.float64), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(make(groups_of(model.module)), model)
    oracle = Oracle(SmallModel(1, torch.float64), make, torch.float64)
    optimizer.state_dict()
    for step in range(3):
        _oracle_step(1, step, oracle)
        _step(1, step, world_size, model, optimizer)
    oracle.check(model.module, f"rank {rank}")


def test_asking_for_the_state_before_the_first_step_changes_nothing():
    run_ranks(_asked_for, 2, BACKENDS[-1], timeout=60)


def _by_parameter(rank: int, world_size: int) -> None:
    for stepped in (False, True):
        model, optimizer, _ = _make(6, 300)
        if stepped:
            _step(6, 0, world_size, model, optimizer)
        state = optimizer.full_state_dict()
        weights = model.module.state_dict()
        for use, given in (
            (get_state_dict, {}),
            (get_optimizer_state_dict, {}),
            (set_optimizer_state_dict, {"optim_state_dict": state}),
            (set_state_dict, {"model_state_dict": weights, "optim_state_dict": state}),
        ):
            with pytest.raises(
                NotImplementedError, match=r"has parts of them: pass it itself to .*save\(\) and load\(\)"
            ):
                use(model.module, optimizers=[optimizer], **given)
        assert optimizer.param_groups[0]["lr"] > 0
        assert get_model_state_dict(model.module).keys() == weights.keys()


def test_torchs_functions_for_states_by_parameter_say_what_to_use_instead():
    run_ranks(_by_parameter, 2, "gloo", timeout=60)


def _refusals(rank: int, world_size: int) -> None:
    model, optimizer, _ = _make(5, 300)
    _step(5, 0, world_size, model, optimizer)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="state_dict has 1 param groups: expected 2"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:1]})
    name = next(iter(state["state"]))
    missing = {key: value for key, value in state["state"].items() if key != name}
    with pytest.raises(ValueError, match=f"state_dict has nothing of parameter '{name}', of which this rank owns"):
        optimizer.load_state_dict({**state, "state": missing})
    groups = [dict(group, params=["x"]) for group in state["param_groups"]]
    with pytest.raises(ValueError, match=r"param group 0 has the parameters \['x'\]: expected \['mix'"):
        optimizer.load_state_dict({**state, "param_groups": groups})
    key, part = next((key, value) for key, value in state["state"][name].items() if isinstance(value, FlatPart))
    short = {
        **state["state"],
        name: {**state["state"][name], key: FlatPart(part.tensor[1:], part.begin + 1, part.whole)},
    }
    with pytest.raises(ValueError, match=r"which this rank owns\. Was it saved by another number of ranks"):
        optimizer.load_state_dict({**state, "state": short})


def test_state_that_does_not_fit_is_refused_by_name():
    run_ranks(_refusals, 2, "gloo", timeout=60)
