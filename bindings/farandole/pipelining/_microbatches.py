"""Splits a batch into microbatches and merges their outputs, as torch.distributed.pipelining does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def split_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int,
    args_spec: tuple[Any, ...] | None,
    kwargs_spec: dict[str, Any] | None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]] | None]:
    """``count`` tuples of arguments and dicts of keyword arguments.

    Tensors are split along dimension 0, or as their chunk spec says, into parts whose sizes differ
    by at most one; what is no tensor is given to every microbatch. None for no keyword arguments.
    """
    _check_specs(args, args_spec, "args_chunk_spec")
    kwargs_spec = kwargs_spec if kwargs else None  # they may be given on some ranks only
    if kwargs_spec is not None and set(kwargs_spec) != set(kwargs):
        raise ValueError(
            f"kwargs_chunk_spec names {sorted(kwargs_spec)}, expected those of the keyword arguments {sorted(kwargs)}"
        )
    if args and not kwargs and args_spec is None and all(type(arg) is torch.Tensor for arg in args):
        columns = [split_tensor(arg, count, 0, f"argument {i}") for i, arg in enumerate(args)]
        return list(zip(*columns, strict=True)), None
    if not args and not kwargs:
        return [()] * count, None
    # As costly to import as torch itself: only for what needs it.
    from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

    _check_rows(args, args_spec, count, "argument")
    _check_rows(kwargs, kwargs_spec, count, "keyword argument")
    arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, kwargs, count, args_spec, kwargs_spec)
    if len(arg_mbs) != count:
        raise ValueError(f"the arguments split into {len(arg_mbs)} microbatches, expected n_microbatches={count}")
    return arg_mbs, kwarg_mbs if kwargs else None


def split_target(target: torch.Tensor, count: int) -> list[torch.Tensor]:
    """``count`` parts along dimension 0, of the rows that those of the arguments are of."""
    parts = split_tensor(target, count, 0, "target")
    if type(target) is torch.Tensor:
        return list(parts)
    # Of a DTensor torch takes parts of what each rank has, which are other rows than those of its parts.
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _split_tensor

    return list(_split_tensor(target, TensorChunkSpec(0), count))


def split_tensor(tensor: torch.Tensor, count: int, dim: int, name: str) -> tuple[torch.Tensor, ...]:
    """``count`` parts along ``dim`` whose sizes differ by at most one."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected a dimension {dim} to split along")
    if tensor.shape[dim] < count:
        raise ValueError(
            f"{name} has {tensor.shape[dim]} rows along dimension {dim}, expected at least n_microbatches={count}"
        )
    return tensor.tensor_split(count, dim)


def merge_outputs(chunks: list[Any], spec: Any) -> Any:
    """The outputs of all microbatches as one, along dimension 0 or as the spec says.

    Raises:
        TypeError: they cannot be; the step is done.
    """
    try:
        if spec is None and all(type(chunk) is torch.Tensor for chunk in chunks):
            return torch.cat(chunks)
        from torch.distributed.pipelining.microbatch import merge_chunks

        return merge_chunks(chunks, spec)
    except Exception as error:
        raise TypeError(
            f"output_merge_spec is {spec!r}, expected one by which what the last stage returns can be merged, or "
            f"return_outputs=False: {type(error).__name__}: {error}"
        ) from error


def signature(*trees: Any) -> list[Any]:
    """What decides the shapes that flow through a pipeline: equal for two steps if theirs are."""
    described: list[Any] = []
    for leaf in tree_leaves(trees):
        if isinstance(leaf, torch.Tensor):
            described.append((leaf.shape, leaf.dtype, leaf.requires_grad))
        else:
            described.append(leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf))
    return described


def _check_specs(args: tuple[Any, ...], spec: Any, name: str) -> None:
    if spec is not None and len(spec) != len(args):
        raise ValueError(f"{name} has {len(spec)} entries, expected {len(args)} as there are arguments")


def _check_rows(values: Any, specs: Any, count: int, kind: str) -> None:
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

    for key, value in enumerate(values) if isinstance(values, tuple) else values.items():
        spec = None if specs is None else specs[key]
        if isinstance(value, torch.Tensor) and (spec is None or isinstance(spec, TensorChunkSpec)):
            split_tensor(value, count, 0 if spec is None else spec.split_dim, f"{kind} {key}")
