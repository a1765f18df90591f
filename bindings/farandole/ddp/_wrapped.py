"""What a distributed optimizer must know of the optimizer that it wraps."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from farandole.ddp._agreement import Facts
from farandole.ddp._options import group_of
from farandole.ddp._own_memory import check_own_memory
from farandole.ddp._runs import MASTERED
from farandole.ddp._tuning import TUNED_ROUNDS
from farandole.ddp._wrapper import DistributedDataParallel

# Those of torch's that update an element by what they know of that element alone, so that neighbours can be one tensor.
_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
# Those of anybody's that look at the whole of a parameter, or at its shape.
_BY_PARAMETER = ("Adafactor", "LAMB", "LARS", "Muon", "SOAP", "Shampoo")
# Settings of param groups that say how, not what.
_WAYS = ("params", "foreach", "fused", "capturable", "differentiable")


def check_models(models: Sequence[Any]) -> None:
    if not models:
        raise ValueError("model=[]: expected at least one DistributedDataParallel")
    for one in models:
        if not isinstance(one, DistributedDataParallel):
            raise TypeError(
                f"model has a {type(one).__name__}: expected farandole.ddp.DistributedDataParallel, or several"
            )
        one._reducer.check_grads()
        if one._tuner is not None and one._tuner.is_pending:
            raise ValueError(
                "model has bucket_size='auto' and has not chosen a size yet, which gives parameters another main_grad: "
                f"expected {2 * TUNED_ROUNDS + 1} steps before, or a bucket_size in elements"
            )
    if len(set(models)) < len(models):
        raise ValueError("model has one DistributedDataParallel several times: expected each once")
    if len({one._param_sync is None for one in models}) > 1:
        raise ValueError("model: expected all with use_distributed_optimizer=True, or none")


def check_copied(models: Sequence[DistributedDataParallel], wanted: Collection[torch.Tensor]) -> None:
    """Of the parameters that an optimizer has."""
    named = (item for model in models for item in model._trainable.items())
    copied = ((name, one) for name, one in named if one in wanted and one.dtype in MASTERED)
    check_own_memory(copied, (), "a DistributedOptimizer, which has float32 copies of them,")


def facts_of_groups(**groups: Any) -> Facts:
    """Of groups that ranks give to the constructor, by its arguments: other ranks in each, but of one size."""
    sizes = []
    for name, group in groups.items():
        if group is not None:
            group_of(name, group)
        sizes.append((name, "None" if group is None else f"of {dist.get_world_size(group)} ranks"))
    return sizes


def facts_of(optimizer: Any, names: list[list[str]]) -> Facts:
    """What all replicas update alike, with the names of parameters by param group."""
    facts = [("optimizer", type(optimizer).__name__)]
    facts += [(f"param group {index}", ", ".join(group)) for index, group in enumerate(names)]
    for index, group in enumerate(optimizer.param_groups):
        settings = (f"{key}={value}" for key, value in sorted(group.items()) if key not in _WAYS)
        facts.append((f"settings of param group {index}", ", ".join(settings)))
    return facts


def check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: expected a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, which takes sparse gradients alone: expected one that takes dense "
            "ones, as Adam does, for what is reduced is dense"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, whose step() needs a closure, to run backwards by itself: "
            "expected it without a DistributedOptimizer, over a model that is wrapped with neither "
            "use_distributed_optimizer nor grad_reduce_in_fp32"
        )


def is_elementwise_of(optimizer: torch.optim.Optimizer, is_elementwise: bool | None) -> bool:
    kind = type(optimizer)
    name = kind.__name__
    if is_elementwise is not None:
        return is_elementwise
    is_torchs = getattr(torch.optim, name, None) is kind
    if is_torchs and name in _ELEMENTWISE:
        return True
    if name in _BY_PARAMETER:  # which does for those that would need less
        return False
    whose = name if is_torchs else f"{name} of {kind.__module__}"  # which may have the name of one of torch's
    raise ValueError(
        f"optimizer is a {whose}: expected is_elementwise=True if it updates each element of a tensor by itself, as "
        "torch's Adam does, False if it looks at whole parameters, each by itself, as Adafactor does"
    )


def groups_of(
    optimizer: torch.optim.Optimizer, models: list[DistributedDataParallel], prefixes: list[str]
) -> tuple[dict[torch.Tensor, int], list[list[str]]]:
    """The param group of each parameter, and the names of the parameters by param group."""
    name_of = {
        parameter: prefix + name
        for prefix, model in zip(prefixes, models, strict=True)
        for name, parameter in model._trainable.items()
    }
    group_of: dict[torch.Tensor, int] = {}
    names: list[list[str]] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in name_of and parameter.requires_grad:
                raise ValueError(
                    f"optimizer has a parameter of shape {tuple(parameter.shape)} in param group {index} that is none "
                    "of the model's: expected one made over model.parameters()"
                )
            group_of[parameter] = index
        names.append([name_of[parameter] for parameter in group["params"] if parameter in name_of])
    return group_of, names
