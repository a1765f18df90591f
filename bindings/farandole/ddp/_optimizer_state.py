"""The state of a distributed optimizer by the names of its parameters: what is saved, loaded and compared."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_leaves

from farandole.ddp._own_steps import step_held
from farandole.ddp._runs import Piece, Run
from farandole.ddp._settings import counters_of, kept_settings, restore_settings

MASTER = "param"  # Megatron-core's name of the float32 copy
HAS_STEPPED = "has_stepped"  # in param groups, and of each parameter: some may be unused while others are stepped

# Of torch's optimizers: one number for all elements of a parameter, whose shape it has where that is without dimensions.
_NUMBERS = ("step", "mu_product", "eta", "mu")

# The module whose functions take states apart by the parameters of a model. The first that they read is ``state``.
BY_PARAMETER = "torch.distributed.checkpoint.state_dict"


class FlatPart(torch.Tensor):
    """Elements [begin, begin + numel of ``tensor``) of a flat tensor of ``whole`` elements.

    torch.distributed.checkpoint saves it as that part of one tensor, and loads into it whatever parts were saved
    (the protocol of torch.distributed._checkpointable).
    """

    tensor: torch.Tensor
    begin: int
    whole: int

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, begin: int, whole: int) -> FlatPart:
        self = torch.Tensor._make_subclass(cls, tensor.detach())
        self.tensor, self.begin, self.whole = tensor.detach(), begin, whole
        return self

    def size(self, dim: int | None = None) -> Any:
        """Of the whole."""
        return torch.Size([self.whole]) if dim is None else self.whole

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(self.tensor), size=self.size()
        )
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([self.begin]), sizes=self.tensor.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatPart:
        return memo.setdefault(id(self), FlatPart(self.tensor.clone(), self.begin, self.whole))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return FlatPart, (self.tensor, self.begin, self.whole)

    # What stages an asynchronous save makes an empty tensor, gives it a copy of the memory in our size, which is that of
    # the whole, and copies of the attributes, which are all that counts.
    def new_empty(self, *unused: Any, **kwargs: Any) -> Any:
        return FlatPart(self.tensor.new_empty(0, **kwargs), self.begin, self.whole)

    def set_(self, *unused: Any, **kwargs: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return f"FlatPart([{self.begin}, {self.begin + self.tensor.numel()}) of {self.whole}, {self.tensor.dtype})"


torch.serialization.add_safe_globals([FlatPart])  # of what state_dict() gives, which torch.load would refuse else


def take_over(optimizer: torch.optim.Optimizer, runs: list[Run]) -> None:
    """Turns the state of parameters into that of runs: of an optimizer that makes it at once (Adagrad), or has stepped."""
    before = dict(optimizer.state)
    optimizer.state.clear()
    for run in runs:
        for piece in run.pieces:
            for key, value in before.get(piece.parameter, {}).items():
                state = optimizer.state[run.tensor]
                if (
                    run.has_master
                    and isinstance(value, torch.Tensor)
                    and value.is_floating_point()
                    and key not in _NUMBERS
                ):
                    value = value.to(run.tensor.dtype)
                has_elements = isinstance(value, torch.Tensor) and value.shape == piece.parameter.shape
                if not has_elements or key == "step" or (value.dim() == 0 and key in _NUMBERS):
                    state[key] = value
                    continue
                if run.tensor.shape == value.shape:
                    state[key] = value
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(run.tensor, dtype=value.dtype)
                piece.put(state[key], value.reshape(-1)[piece.begin : piece.begin + piece.numel])


def check_counts(optimizer: torch.optim.Optimizer, runs: list[Run]) -> None:
    """Before take_over(): a ValueError where parameters of one run were stepped unequally. It has one count of steps."""
    for run in runs:
        steps = [optimizer.state.get(piece.parameter, {}).get("step", 0) for piece in run.pieces]
        for piece, step in zip(run.pieces, steps, strict=True):
            check_same("optimizer's state has", run, piece, "step", steps[0], step)


def check_same(what: str, run: Run, piece: Piece, key: str, first: Any, value: Any) -> None:
    if first is value:
        return
    first, value = torch.as_tensor(first).detach().cpu(), torch.as_tensor(value).detach().cpu()
    if not torch.equal(first.to(value.dtype), value):
        raise ValueError(
            f"{what} {key!r} of parameters '{run.pieces[0].name}' and '{piece.name}' as {first.tolist()} and "
            f"{value.tolist()}: expected the same, since they are updated together as one tensor"
        )


def initialize(optimizer: torch.optim.Optimizer, runs: list[Run], has_stepped: bool) -> bool:
    """Makes the state of an optimizer that has not stepped, by a step with zero gradients that changes nothing.

    True when it did. One that has may be without state on this rank, where all its parameters are frozen.
    """
    may_be_frozen = has_stepped and any(run.is_whole for run in runs)
    if optimizer.state or may_be_frozen or all(run.stand_in is not None for run in runs):
        return False
    _make(optimizer, runs, runs)
    for run in runs:
        if not optimizer.state.get(run.tensor):
            run.stand_in = {}  # it has none, as plain SGD
    return True


def forget(optimizer: torch.optim.Optimizer, runs: list[Run]) -> None:
    """As before initialize()."""
    optimizer.state.clear()
    for run in runs:
        run.stand_in = None


def initialize_lacking(optimizer: torch.optim.Optimizer, runs: list[Run], state_dict: dict[str, Any]) -> list[Run]:
    """So that of parameters that this optimizer has never stepped, and that which was saved has. Returns these."""
    lacking = [run for run in _never_stepped(optimizer, runs) if not is_unused_in(state_dict, run)]
    if lacking:
        _make(optimizer, runs, lacking)
    return lacking


def _never_stepped(optimizer: torch.optim.Optimizer, runs: list[Run]) -> list[Run]:
    """Each parameter by itself may be frozen, or used by no rank, where others are stepped."""
    return [run for run in runs if run.is_whole and not optimizer.state.get(run.tensor)]


def is_unused_in(state_dict: dict[str, Any], run: Run) -> bool:
    if not run.is_whole:
        return False
    values = state_dict["state"].get(run.pieces[0].name, {})
    return not values[HAS_STEPPED] if HAS_STEPPED in values else values.keys() <= {MASTER}


def _make(optimizer: torch.optim.Optimizer, runs: list[Run], wanted: list[Run]) -> None:
    settings = kept_settings(optimizer.param_groups)
    counters = counters_of(optimizer)
    before = [run.tensor.detach().clone() for run in wanted]
    grads = [run.tensor.grad for run in runs]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for run in runs:
        run.tensor.grad = None
    for run in wanted:
        run.tensor.grad = torch.zeros_like(run.tensor)
    try:
        step_held(optimizer)
    except Exception:
        for run in wanted:
            optimizer.state.pop(run.tensor, None)
        raise
    finally:
        vars(optimizer).update(counters)
        restore_settings(optimizer.param_groups, settings)
        for run, data in zip(wanted, before, strict=True):
            run.tensor.detach().copy_(data)
        for run, grad in zip(runs, grads, strict=True):
            run.tensor.grad = grad
    for run in wanted:
        state = optimizer.state.get(run.tensor, {})
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0


def values_of(optimizer: torch.optim.Optimizer, run: Run) -> dict[str, Any]:
    values = dict(optimizer.state.get(run.tensor, {}))
    if run.has_master:
        values[MASTER] = run.tensor.detach()
    return values


def is_parted(key: str, value: Any, run: Run) -> bool:
    """Whether it has an element for each of the run's."""
    if not isinstance(value, torch.Tensor) or value.numel() != run.tensor.numel():
        return False
    return value.dim() > 0 or (run.tensor.dim() == 0 and key not in _NUMBERS)


def _check_cut(key: str, value: Any, run: Run) -> None:
    """Of a tensor with parts of parameters nothing else is of one parameter than what has an element for each."""
    if run.is_whole or is_parted(key, value, run):
        return
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]
    if found:
        raise ValueError(
            f"the optimizer's {key!r} of parameter '{run.pieces[0].name}' is a {type(value).__name__} with elements of shape "
            f"{tuple(found[0].shape)}, of parts of parameters with {run.tensor.numel()} elements: expected one tensor with "
            "an element for each, one number, or is_elementwise=False of DistributedOptimizer"
        )


def collect(
    optimizer: torch.optim.Optimizer, runs: list[Run], names: list[list[str]], has_stepped: bool
) -> dict[str, Any]:
    """By parameter: parts of what has an element for each of the run's, other values as they are.

    Numbers as tensors: torch.distributed.checkpoint saves others of rank 0 only. What an optimizer that has not stepped
    has is not what it begins with, so param groups say which it is. Of parameters that were never stepped while others
    were there is as much, made once, and a word that they were not: a checkpoint is loaded into what is there.
    """
    state: dict[str, dict[str, Any]] = {}
    never = set(_never_stepped(optimizer, runs))
    lacking = [run for run in runs if run in never and run.stand_in is None]
    if lacking:
        _make(optimizer, runs, lacking)
        for run in lacking:
            run.stand_in = optimizer.state.pop(run.tensor, {})
    for run in runs:
        for piece in run.pieces:
            state.setdefault(piece.name, {})[HAS_STEPPED] = torch.tensor(has_stepped and run not in never)
        values = values_of(optimizer, run) | ((run.stand_in or {}) if run in never else {})
        for key, value in values.items():
            if isinstance(value, (int, float)):
                value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
            _check_cut(key, value, run)
            for piece in run.pieces:
                has_parts = is_parted(key, value, run)
                part = FlatPart(piece.of(value), piece.begin, piece.parameter.numel()) if has_parts else value
                state.setdefault(piece.name, {})[key] = part
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": list(group_names), HAS_STEPPED: has_stepped}
        for group, group_names in zip(optimizer.param_groups, names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def gather(state_dict: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Whole tensors of all parameters, on the CPU, from what each rank of the group has."""
    ranks = [_on_cpu(state_dict["state"])]
    if group is not None:
        ranks *= group.size()
        dist.all_gather_object(ranks, ranks[0], group=group)
    state: dict[str, dict[str, Any]] = {}
    for mine in ranks:
        for name, values in mine.items():
            for key, value in values.items():
                if not isinstance(value, FlatPart):
                    state.setdefault(name, {})[key] = value
                    continue
                values_here = state.setdefault(name, {})
                if key not in values_here:
                    values_here[key] = torch.zeros(value.whole, dtype=value.tensor.dtype, device="cpu")
                values_here[key][value.begin : value.begin + value.tensor.numel()] = value.tensor
    return state_dict | {"state": state}


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Copies."""
    return {name: {key: _copy_on_cpu(value) for key, value in values.items()} for name, values in state.items()}


def _copy_on_cpu(value: Any) -> Any:
    if isinstance(value, FlatPart):
        return FlatPart(_copy_on_cpu(value.tensor), value.begin, value.whole)
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
