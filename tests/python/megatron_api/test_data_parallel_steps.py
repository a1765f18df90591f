"""What farandole.megatron.DistributedDataParallel does beside Megatron-core's: errors, optimizer steps, instances, groups."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole import ddp, megatron
from farandole.megatron import parallel_state
from megatron_api import data_parallel_support as support
from megatron_api.megatron_support import world
from support.megatrons import needs_megatron
from support.processes import await_all, run_ranks


def _wrap(module: nn.Module, collection: Any, config: Any = None, **options: Any) -> Any:
    config = megatron.ModelParallelConfig() if config is None else config
    ddp_config = megatron.DistributedDataParallelConfig(**options)
    return megatron.DistributedDataParallel(config, ddp_config, module, pg_collection=collection)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: float, both: bool) -> torch.Tensor:
        return x * (self.used.sum() + (self.left_out.sum() if both else 0))


def _unused(rank: int, world_size: int) -> None:
    collection = support.collection_of(world(), None)
    model = _wrap(_Branches(), collection, overlap_grad_reduce=True)
    model(1.0, both=rank == 0).backward()
    with pytest.raises(RuntimeError, match=r"rank 1 of the group.*'left_out'"):
        model.finish_grad_sync()
    model.zero_grad_buffer()
    model(1.0, both=True).backward()
    model.finish_grad_sync()
    model.finish_grad_sync()  # nothing is left to do
    assert model.module.left_out.main_grad.tolist() == [1.0] * 3
    late = _wrap(_Branches(), collection)
    late(1.0, both=rank == 0).backward()
    late.finish_grad_sync()
    assert late.module.left_out.main_grad.tolist() == [0.5] * 3
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_an_unused_parameter_is_an_error_on_all_ranks_where_reductions_overlap(backend):
    run_ranks(_unused, 2, backend)


def _never_used(rank: int, world_size: int, pp_rank: int) -> None:
    collection = support.collection_of(world(), None, pp_rank)  # of later stages without a bucket size
    module = _Branches()
    module.left_out.shared_embedding = True  # of multi-token prediction, on the last stage: a bucket of its own
    model = _wrap(module, collection, overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=1)
    for _ in range(3):
        model.zero_grad_buffer()
        model(1.0, both=False).backward()
        model.finish_grad_sync(force_all_reduce=True)
        assert module.used.main_grad.tolist() == [1.0] * 3
        assert module.left_out.main_grad.tolist() == [0.0] * 3
    for both in (True, False):
        model.zero_grad_buffer()
        model(1.0, both=both).backward()
        if both:
            model.finish_grad_sync()
    with pytest.raises(RuntimeError, match=r"'left_out'.*pass overlap_grad_reduce=False"):
        model.finish_grad_sync()
    await_all(rank, world_size)


@pytest.mark.parametrize("pp_rank", [0, 1])
@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_a_bucket_group_may_go_unused_until_its_first_gradient(backend, pp_rank):
    run_ranks(_never_used, 2, backend, pp_rank=pp_rank)


def _not_a_number(rank: int, world_size: int) -> None:
    collection = support.collection_of(world(), None)
    for overlap in (False, True):
        options = {"check_for_nan_in_grad": True, "check_for_large_grads": 100.0, "overlap_grad_reduce": overlap}
        model = _wrap(_Branches(), collection, **options)
        for value, what in ((float("nan"), "NaN"), (1000.0, "check_for_large_grads")):
            model.zero_grad_buffer()
            model(value if rank == 1 else 1.0, both=True).backward()
            with pytest.raises(RuntimeError, match=f"rank 1 of the group.*{what}"):
                model.finish_grad_sync()
    await_all(rank, world_size)


def test_gradients_that_are_nan_or_large_are_an_error_on_all_ranks():
    run_ranks(_not_a_number, 2, "gloo")


def _optimizer_steps(rank: int, world_size: int, overlap: bool, sharded: bool) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    alone = copy.deepcopy(module)
    model = _wrap(
        module,
        support.collection_of(world(), None),
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=sharded,
        overlap_param_gather=sharded and overlap,
        bucket_size=20,
    )
    optimizer = ddp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    reference = torch.optim.Adam(alone.parameters(), lr=0.1)
    data = torch.randn(5, world_size, 2, 4)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            model(data[step, rank, :1]).square().sum().backward()
        model(data[step, rank, 1:]).square().sum().backward()
        megatron.finalize_model_grads([model], pg_collection=_finalize_groups())
        optimizer.step()
        reference.zero_grad()
        (alone(data[step].flatten(0, 1)).square().sum() / world_size).backward()
        reference.step()
    if sharded and overlap:
        model.disable_forward_pre_hook()
    for mine, other in zip(model.module.parameters(), alone.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    await_all(rank, world_size)


def _finalize_groups() -> Any:
    return SimpleNamespace(tp=None, pp=None, embd=None, pos_embd=None, dp_cp=world())


@pytest.mark.sample(2)
@pytest.mark.parametrize(("overlap", "sharded"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_distributed_optimizer_steps_a_model_that_is_wrapped_megatrons_way(overlap, sharded):
    run_ranks(_optimizer_steps, 2, "gloo", overlap=overlap, sharded=sharded)


def _instances(rank: int, world_size: int) -> None:
    intra = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    inter = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    alone = support.alone_groups(rank, world_size)
    collection = support.collection_of(world(), inter)
    options = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
    with pytest.raises(ValueError, match="intra_dp_cp"):
        _wrap(_Branches(), collection, **options)
    collection.intra_dp_cp, collection.intra_expt_dp, collection.inter_dist_opt = intra, alone, inter
    for overlap in (False, True):
        for average in (False, True):
            model = _wrap(_marked(), collection, overlap_grad_reduce=overlap, average_in_collective=average, **options)
            model(1.0 + rank, both=True).backward()
            model.finish_grad_sync(force_all_reduce=True)
            # All four, and an expert's two, by the number of replicas.
            assert model.module.used.main_grad.tolist() == [2.5] * 3
            expert = (1.0 + rank) + (1.0 + (rank + 2) % 4)
            assert model.module.left_out.main_grad.tolist() == [expert / 4] * 3
    await_all(rank, world_size)


def _marked() -> _Branches:
    module = _Branches()
    module.left_out.allreduce = False  # type: ignore[attr-defined]
    return module


def test_several_optimizer_instances_average_over_all_replicas():
    run_ranks(_instances, 4, "gloo")


def _layout_given(rank: int, world_size: int) -> None:
    collection = support.collection_of(world(), None)
    module = _Branches()
    spans = {module.left_out: (0, 3, 0), module.used: (64, 67, 0)}
    layout = SimpleNamespace(layouts={"key": SimpleNamespace(param_index_map=spans)})
    config, ddp_config = (
        megatron.ModelParallelConfig(),
        megatron.DistributedDataParallelConfig(use_distributed_optimizer=True),
    )
    megatron.DistributedDataParallel(config, ddp_config, module, pg_collection=collection, full_param_layout=layout)
    other = _Branches()
    layout.layouts["key"].param_index_map = {other.left_out: (0, 3, 0), other.used: (3, 6, 0)}
    with pytest.raises(ValueError, match=r"'used' at \(3, 6\), expected \(64, 67\)"):
        megatron.DistributedDataParallel(config, ddp_config, other, pg_collection=collection, full_param_layout=layout)


def test_a_given_layout_must_be_the_one_that_is_made():
    run_ranks(_layout_given, 1, "gloo")


def _groups(rank: int, world_size: int) -> None:
    with pytest.raises(RuntimeError, match="not initialized"):
        _wrap(_Branches(), None)
    with pytest.raises(ValueError, match="pg_collection has no dp"):
        _wrap(_Branches(), SimpleNamespace())
    with pytest.raises(ValueError, match="'left_out' is an expert"):
        _wrap(_marked(), SimpleNamespace(dp=world()))
    parallel_state.initialize_model_parallel()
    assert _wrap(_Branches(), None).dp_group is parallel_state.get_data_parallel_group()
    parallel_state.destroy_model_parallel()

    from megatron.core import parallel_state as theirs

    theirs.initialize_model_parallel(create_gloo_process_groups=False)
    model = _wrap(_marked(), None)
    assert model.dp_group is theirs.get_data_parallel_group()
    model(1.0 + rank, both=True).backward()
    megatron.finalize_model_grads([model])
    assert model.module.used.main_grad.tolist() == [1.5] * 3
    assert model.module.left_out.main_grad.tolist() == [1.5] * 3
    theirs.destroy_model_parallel()


@needs_megatron
def test_groups_are_those_given_or_those_of_the_parallel_state_that_is_initialized():
    run_ranks(_groups, 2, "gloo")


def _saved(rank: int, world_size: int) -> None:
    """As Megatron-LM's training loop does before it saves gradients; and names of weights by a prefix."""
    model = _wrap(_Branches(), support.collection_of(world(), None), use_distributed_optimizer=True, bucket_size=1)
    for is_forced in (True, False):
        model.zero_grad_buffer()
        model.force_all_reduce = is_forced
        model(1.0 + rank, both=True).backward()
        model.finish_grad_sync()
        mine = [parameter.main_grad.tolist() for parameter in model.params_with_grad]
        assert (mine == [[1.5] * 3] * 2) == is_forced
    assert list(model.state_dict("model.", True)) == ["model.used", "model.left_out"]
    assert model.state_dict(keep_vars=True)["used"] is model.module.used
    await_all(rank, world_size)


def test_what_a_training_loop_says_before_it_saves_gradients_and_weights():
    run_ranks(_saved, 2, "farandole")  # gloo gives all to all in any case
