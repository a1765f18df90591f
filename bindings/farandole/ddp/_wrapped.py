"""What a distributed optimizer must know of the optimizer that it wraps."""

from __future__ import annotations

import torch

from farandole.ddp._wrapper import DistributedDataParallel

# Those that update an element by what they know of that element alone, so that neighbours can be one tensor.
_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
# Those that look at the whole of a parameter, or at its shape.
_BY_PARAMETER = ("Adafactor", "LAMB", "LARS", "Muon", "SOAP", "Shampoo")
_REFUSED = {
    "LBFGS": "looks at all parameters at once",
    "SparseAdam": "takes sparse gradients",
}


def is_elementwise_of(optimizer: torch.optim.Optimizer, is_elementwise: bool | None) -> bool:
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise ValueError(
            f"optimizer is a {name}, which {_REFUSED[name]}: expected a model that is wrapped with "
            "use_distributed_optimizer=False"
        )
    if is_elementwise is not None:
        return is_elementwise
    if name not in _ELEMENTWISE and name not in _BY_PARAMETER:
        raise ValueError(
            f"optimizer is a {name}: expected is_elementwise=True if it updates each element of a tensor by itself, as "
            "Adam does, False if it looks at whole parameters, each by itself, as Adafactor does"
        )
    return name in _ELEMENTWISE


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
