"""Names, arguments and defaults beside Megatron-core's own."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch.distributed as dist

from farandole import megatron
from farandole.megatron import parallel_state
from support.devices import only_on_cpu
from support.megatrons import check_version, environment_of, every_megatron, import_distributed, import_schedules
from support.processes import run_ranks

pytestmark = only_on_cpu("no tensors")
_LEFT_BEHIND = {"moe_extended_tp", "async_tensor_model_parallel_allreduce", "independent_all_gather"}  # of 0.16.1


def _defaults(config: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(config) if not field.name.startswith("_")}


def _configs(rank: int, world_size: int, version: str) -> None:
    theirs = import_distributed()
    check_version(version)
    from megatron.core.model_parallel_config import ModelParallelConfig

    for their_config, ours in (
        (ModelParallelConfig, megatron.ModelParallelConfig),
        (theirs.DistributedDataParallelConfig, megatron.DistributedDataParallelConfig),
    ):
        mine = _defaults(ours)
        for name, default in _defaults(their_config).items():
            assert name in _LEFT_BEHIND or mine[name] == default, name


@every_megatron
def test_configs_have_megatrons_fields_and_defaults(version):
    run_ranks(_configs, 1, "gloo", env=environment_of(version), version=version)


def _functions(rank: int, world_size: int, version: str) -> None:
    import_schedules()
    check_version(version)
    from megatron.core import parallel_state as theirs

    compared = 0
    for name, function in inspect.getmembers(parallel_state, inspect.isfunction):
        peer = getattr(theirs, name, None)
        if name.startswith("_") or peer is None or name == "initialize_model_parallel":
            continue
        mine = inspect.signature(function).parameters
        for parameter in inspect.signature(peer).parameters.values():
            if parameter.name not in _LEFT_BEHIND:
                assert mine[parameter.name].default == parameter.default, (name, parameter.name)
        compared += 1
    assert compared > 25
    # What asks for nothing goes in.
    parameters = inspect.signature(theirs.initialize_model_parallel).parameters.values()
    given = {parameter.name: parameter.default for parameter in parameters}
    parallel_state.initialize_model_parallel(**given)
    parallel_state.destroy_model_parallel()
    for name, value in (("context_parallel_size", 2), ("order", "tp-pp-dp")):
        with pytest.raises(NotImplementedError, match=name):
            parallel_state.initialize_model_parallel(**{name: value})
    with pytest.raises(TypeError, match="tensor_parallel"):
        parallel_state.initialize_model_parallel(tensor_parallel=2)


@every_megatron
def test_functions_of_parallel_state_have_megatrons_arguments(version):
    run_ranks(_functions, 1, "gloo", env=environment_of(version), version=version)


def _ranks(rank: int, world_size: int, version: str) -> None:
    import_schedules()
    from megatron.core import parallel_state as theirs

    for tp, pp in ((1, 4), (2, 2), (4, 1), (1, 1)):
        virtual = 2 if pp > 1 else None
        answers = []
        for state in (theirs, parallel_state):
            state.initialize_model_parallel(tp, pp, virtual)
            names = [name for name in dir(parallel_state) if name.startswith(("get_", "is_pipeline_"))]
            got = {}
            for name in names:
                if hasattr(theirs, name) and not name.endswith(("_group", "virtual_pipeline_model_parallel_rank")):
                    got[name] = getattr(state, name)()
            for chunk in range(virtual or 0):
                got["first", chunk] = state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
                got["last", chunk] = state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
            for name in ("data_parallel", "tensor_model_parallel", "pipeline_model_parallel", "model_parallel"):
                got[name] = dist.get_process_group_ranks(getattr(state, f"get_{name}_group")())
            answers.append(got)
            state.destroy_model_parallel()
        assert answers[0] == answers[1]


@every_megatron
def test_groups_and_ranks_are_megatrons(version):
    run_ranks(_ranks, 4, "gloo", env=environment_of(version), version=version)


def test_a_field_that_is_not_known_and_not_at_its_default_is_refused():
    @dataclasses.dataclass
    class Later(megatron.DistributedDataParallelConfig):
        reduces_twice: bool = False

    Later()
    with pytest.raises(NotImplementedError, match="reduces_twice"):
        Later(reduces_twice=True)
