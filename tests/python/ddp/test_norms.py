"""Clipping over pipeline stages and tensor-parallel ranks is torch's clip_grad_norm_ of the whole model in one process,
and so many elements of its gradients are zero."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import run_ranks

NORMS = [2.0, 1.0, torch.inf]
# How stages tie a weight: Megatron's mark of the copy that does not count, or the same mark on both.
TIES = ["shared", "shared_embedding"]


def _weight(*seed: int) -> torch.nn.Parameter:
    generator = seeded(hash(seed))
    values = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    values[: torch.randint(1, 4, (), generator=generator)] = 0  # and so are their gradients
    return torch.nn.Parameter(values)


class Stage(torch.nn.Module):
    """Weights of its own (``layer``), of its replica alone (``expert``), and one that all stages have (``common``)."""

    def __init__(self, stage: int, replica: int, kind: str) -> None:
        super().__init__()
        self.common = _weight(1)
        self.layer = _weight(2, stage)
        self.expert = _weight(3, stage, replica)
        if kind in TIES:
            self.common.shared_embedding = True
            if kind == "shared" and stage > 0:
                self.common.shared = True
        if kind == "tensor":
            self.layer.tensor_model_parallel = self.expert.tensor_model_parallel = True
        self.expert.allreduce = False

    def forward(self, *seed: int) -> torch.Tensor:
        return sum(
            (weight * _weight(4, i, *seed).detach()).square().sum() for i, weight in enumerate(self.parameters())
        )


def _zeros_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() - int(torch.count_nonzero(parameter.grad)) for parameter in model.parameters())


def _whole(kind: str, max_norm: float, norm_type: float) -> tuple[torch.Tensor, int, list[list[Stage]]]:
    """The norm in one process, the zeros in gradients, and the stages by replica after a step of SGD with a rate of 1."""
    stages = [[Stage(stage, replica, kind) for replica in range(2)] for stage in range(2)]
    first = stages[0][0]
    for stage, replica in itertools.product(range(2), range(2)):
        stages[stage][replica].layer = stages[stage][0].layer
        stages[stage][replica].common = first.common
    model = torch.nn.ModuleList(module for row in stages for module in row)
    seeds = itertools.product(range(2), range(2))
    loss = sum(stages[stage][replica](_input(kind, stage), replica) for stage, replica in seeds) / 2
    if kind == "tensor":  # both have the whole gradient of what both have
        loss = loss - sum(_of_common(stages[1][replica], _input(kind, 1), replica) for replica in range(2)) / 2
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    zeros = _zeros_of(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return norm, zeros, stages


def _input(kind: str, stage: int) -> int:
    """Tensor-parallel ranks have the same input, stages each their own."""
    return 0 if kind == "tensor" else stage


def _of_common(module: Stage, *seed: int) -> torch.Tensor:
    return (module.common * _weight(4, 0, *seed).detach()).square().sum()


def _clipped(rank: int, world_size: int, kind: str) -> None:
    stage, replica = divmod(rank, 2)
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][replica]
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    for norm_type, (sharded, whole) in itertools.product(NORMS, ((False, False), (True, False), (True, True))):
        max_norm, where = 1.0, f"{kind} norm {norm_type} sharded {sharded} whole {whole} rank {rank}: "
        want_norm, want_zeros, want = _whole(kind, max_norm, norm_type)
        model = DistributedDataParallel(
            Stage(stage, replica, kind),
            process_group=replicas,
            expert_process_group=alone,
            use_distributed_optimizer=sharded,
            bucket_size=1,
        )
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model,
            model_parallel_group=stages,
            tensor_parallel_group=stages if kind == "tensor" else None,
            is_elementwise=not whole,
        )
        optimizer.zero_grad()
        model(_input(kind, stage), replica).backward()
        if kind in TIES:
            dist.all_reduce(model.module.common.main_grad, group=stages)
        before = optimizer.grad_norm(norm_type)
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        assert norm.item() == pytest.approx(want_norm.item(), rel=1e-9), where
        assert torch.equal(before, norm), where
        assert optimizer.count_zeros() == want_zeros > 0, where
        optimizer.step()
        for (name, got), parameter in zip(
            model.module.named_parameters(), want[stage][replica].parameters(), strict=True
        ):
            assert torch.allclose(got, parameter, rtol=1e-6, atol=1e-9), where + name


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [*TIES, "tensor"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_norms_over_stages_count_each_weight_of_the_model_once(backend, kind):
    run_ranks(_clipped, 4, backend, timeout=60, kind=kind)


def _embeddings(rank: int, world_size: int) -> None:
    """Two stages of two tensor-parallel ranks: each has its part of the embedding, the last stage a copy of it."""
    stage, part = divmod(rank, 2)
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
    module = torch.nn.Module()
    module.embedding = _weight(part)
    module.embedding.tensor_model_parallel = module.embedding.shared_embedding = True
    model = DistributedDataParallel(module, process_group=alone)
    for how in ("group", "mark"):
        if how == "mark" and stage == 1:
            module.embedding.shared = True
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model,
            model_parallel_group=dist.group.WORLD,
            tensor_parallel_group=tensor,
        )
        optimizer.zero_grad()
        module.embedding.square().sum().backward()
        want = torch.cat([2 * _weight(0), 2 * _weight(1)]).norm()
        assert optimizer.grad_norm().item() == pytest.approx(want.item())
    if stage == 1:
        module.embedding.shared = False
    with pytest.raises(
        ValueError, match=r"4 ranks or chunks have an embedding of shape \(5, 7\).*tensor_parallel_group"
    ):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, model_parallel_group=dist.group.WORLD)
    others = [dist.new_group([0, 1]), dist.new_group([2, 3])][1 - stage]
    for name in ("model_parallel_group", "tensor_parallel_group"):
        with pytest.raises(ValueError, match=rf"{name}=.*: expected a ProcessGroup that this rank \({rank}\) is in"):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, **{name: others})


def test_parts_of_an_embedding_are_told_from_its_copies():
    run_ranks(_embeddings, 4, BACKENDS[-1], timeout=60)


class _Heads(torch.nn.Module):
    """A trunk; the last stage has heads whose norms are their own, beside a weight that is neighbour to both."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.trunk = _weight(2, stage)
        if stage == 1:
            self.first, self.between, self.second = _weight(3), _weight(4), _weight(5)
            self.first.grad_norm_group = "mtp"
            self.second.grad_norm_group = "other"

    def forward(self, replica: int) -> torch.Tensor:
        # The second head's gradients are small ones.
        return sum(
            (weight * _weight(6, i, replica).detach()).square().sum() * (1e-4 if i == 3 else 1.0)
            for i, weight in enumerate(self.parameters())
        )


def _clipped_apart(rank: int, world_size: int) -> None:
    stage, replica = divmod(rank, 2)
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][replica]
    for norm_type, (sharded, whole), bucket_size in itertools.product(
        NORMS, ((False, False), (True, False), (True, True)), (1, None)
    ):
        where = f"norm {norm_type} sharded {sharded} whole {whole} bucket_size {bucket_size} rank {rank}: "
        want = [_Heads(0), _Heads(1)]
        (sum(module(0) + module(1) for module in want) / 2).backward()
        clip = torch.nn.utils.clip_grad_norm_
        norm = clip([want[0].trunk, want[1].trunk, want[1].between], 1.0, norm_type)
        of_groups = [clip(weight, 1.0, norm_type) for weight in (want[1].first, want[1].second)]
        assert of_groups[0] > 1 > of_groups[1]
        zeros = sum(_zeros_of(module) for module in want)
        torch.optim.SGD([*want[0].parameters(), *want[1].parameters()], lr=1.0).step()

        model = DistributedDataParallel(
            _Heads(stage), process_group=replicas, use_distributed_optimizer=sharded, bucket_size=bucket_size
        )
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, model_parallel_group=stages, is_elementwise=not whole
        )
        optimizer.zero_grad()
        model(replica).backward()
        assert optimizer.grad_norm(norm_type).item() == pytest.approx(norm.item(), rel=1e-9), where
        assert optimizer.clip_grad_norm_(1.0, norm_type).item() == pytest.approx(norm.item(), rel=1e-9), where
        got = {name: value.item() for name, value in optimizer.grad_norms_by_group.items()}
        assert optimizer.count_zeros() == zeros, where
        assert got == pytest.approx({"mtp": of_groups[0].item(), "other": of_groups[1].item()}, rel=1e-9), where
        optimizer.step()
        for (name, mine), parameter in zip(model.module.named_parameters(), want[stage].parameters(), strict=True):
            assert torch.allclose(mine, parameter, rtol=1e-6, atol=1e-9), where + name


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_with_a_grad_norm_group_are_measured_and_clipped_apart(backend):
    run_ranks(_clipped_apart, 4, backend, timeout=60)


def _unlike_groups(rank: int, world_size: int) -> None:
    module = torch.nn.Linear(2, 2)
    if rank == 0:
        module.bias.grad_norm_group = "mtp"
    model = DistributedDataParallel(module)
    with pytest.raises(ValueError, match=r"grad_norm_group.*mtp"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    if rank == 1:
        module.bias.grad_norm_group = "mtp"
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    optimizer.zero_grad()
    (model(torch.ones(1, 2)).sum() + module.bias.sum() * torch.nan).backward()
    assert torch.isfinite(optimizer.grad_norm())
    with pytest.raises(RuntimeError, match=r"with grad_norm_group 'mtp', of order 2\.0, is nan: expected a finite one"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_replicas_that_do_not_agree_on_norm_groups_are_refused_and_a_group_that_is_not_finite_is_named():
    run_ranks(_unlike_groups, 2, BACKENDS[-1], timeout=60)


def _after_nan(rank: int, world_size: int, spoils: str) -> None:
    makes = [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.Adafactor(parameters),
    ]
    for make, dtype in itertools.product(makes, (torch.float32, torch.bfloat16)):
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)
        model = DistributedDataParallel(module, use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        optimizer = DistributedOptimizer(make(model.parameters()), model)
        for step in range(3):
            where = f"{make} {dtype} step {step} rank {rank}"
            optimizer.zero_grad()
            is_spoilt = step == 1
            x = torch.full((2, 3), torch.nan if is_spoilt and spoils == "gradient" else 1.0, dtype=dtype)
            model(x).float().square().sum().backward()
            if is_spoilt and spoils == "factor":
                model.scale_gradients(torch.inf)
            norm = optimizer.clip_grad_norm_(0.5)
            assert norm.isfinite().item() != is_spoilt, where
            if is_spoilt:
                continue
            grads = torch.autograd.grad(module(x).float().square().sum(), list(module.parameters()))
            expected = torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]))
            torch.testing.assert_close(
                norm, expected, rtol=2e-2, atol=0, msg=lambda text, where=where: f"{where}: {text}"
            )


@pytest.mark.parametrize("spoils", ["gradient", "factor"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_is_gone_in_the_next_step(backend, spoils):
    """A gradient that is NaN when it is clipped, or one that is multiplied by infinity: neither it nor what lies between
    gradients in a bucket counts afterwards."""
    run_ranks(_after_nan, 2, backend, timeout=60, spoils=spoils)


def _wrong_arguments(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 2), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(1, 3)).sum().backward()
    for limit in ("x", None, True, -1, float("nan")):
        with pytest.raises(ValueError, match=f"max_norm={limit!r}: expected a number, at least 0"):
            optimizer.clip_grad_norm_(limit)
    for norm_type in ("inf", None, 0, -2.0, float("nan")):
        for measure in (lambda: optimizer.clip_grad_norm_(1, norm_type), lambda: optimizer.grad_norm(norm_type)):  # noqa: B023
            with pytest.raises(ValueError, match=f"norm_type={norm_type!r}: expected a number above 0"):
                measure()
    for factor in ("a", None, torch.ones(2)):
        with pytest.raises(TypeError, match=r"scaling_factor=.*: expected a number"):
            model.scale_gradients(factor)
    for factor in (0.5, torch.tensor([4.0]), torch.tensor(0.5)):
        model.scale_gradients(factor)
    before = optimizer.grad_norm()
    for limit in (float("inf"), torch.tensor(1e9)):  # to measure
        assert torch.equal(optimizer.clip_grad_norm_(limit), before)
    assert torch.equal(optimizer.grad_norm(), before)


def test_norms_and_limits_that_are_none_are_refused_by_name():
    run_ranks(_wrong_arguments, 2, BACKENDS[-1])
