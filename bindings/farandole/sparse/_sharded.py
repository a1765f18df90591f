"""Which modules of a model are sharded, and the model inside its wrappers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from torch import nn

# What the pipeline calls; torchrec's abstract class has the same.
_STAGES = ("create_context", "input_dist", "compute_and_output_dist")

# Under which name wrappers keep their module. Those that call it "module" are known by their class.
_PRIVATE_NAMES = ("_dmp_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"),
    ("farandole.ddp._wrapper", "DistributedDataParallel"),
)
_FSDP = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
)


def is_sharded(module: nn.Module) -> bool:
    """Whether it is torchrec's ShardedModule, or has the methods of one that a train pipeline calls."""
    if is_torchrec(module):
        return True
    return all(callable(getattr(type(module), name, None)) for name in _STAGES)


def is_torchrec(module: nn.Module) -> bool:
    """Whether it is torchrec's ShardedModule."""
    return _is_one_of(module, (("torchrec.distributed.types", "ShardedModule"),))


def is_object_pool(module: nn.Module) -> bool:
    """Whether it is a sharded module of torchrec's that does nothing in the stages of one, but all in its forward."""
    return _is_one_of(module, (("torchrec.distributed.object_pool", "ShardedObjectPool"),))


def is_two_dimensional(model: nn.Module) -> bool:
    """Whether it is torchrec's DMPCollection, whose tables have replicas."""
    return _is_one_of(model, (("torchrec.distributed.model_parallel", "DMPCollection"),))


def is_fsdp(module: nn.Module) -> bool:
    """Whether its parameters are there in its own forward only (FSDP of either version)."""
    return _is_one_of(module, _FSDP)


def unwrap(model: nn.Module) -> tuple[nn.Module, str]:
    """The model inside DDP, FSDP, torchrec's DistributedModelParallel and torch.compile, and the prefix of its names."""
    prefix = ""
    while (name := wrapped_name(model)) is not None:
        model, prefix = getattr(model, name), f"{prefix}{name}."
    return model, prefix


def sharded_modules(model: nn.Module, is_sharded: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """By name, in order of registration; not those inside another one. One with several names has the first."""

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if is_sharded(module):
            yield name, module
            return
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}" if name else child_name)

    seen: set[int] = set()
    return dict(walk(model, ""))


def wrapped_name(model: nn.Module) -> str | None:
    """Under which it has the module that it wraps; None where it is no wrapper."""
    for name in _PRIVATE_NAMES:
        if name in model._modules:
            return name
    return "module" if _is_one_of(model, _WRAPPERS) else None


def _is_one_of(module: nn.Module, classes: tuple[tuple[str, str], ...]) -> bool:
    """Only classes whose source was imported: of others there can be no object."""
    for source, name in classes:
        found = getattr(sys.modules.get(source), name, None)
        if isinstance(found, type) and isinstance(module, found):
            return True
    return False
