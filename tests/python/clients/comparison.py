"""Runs a program of torch.distributed over farandole and over gloo and compares what it returns."""

from __future__ import annotations

import importlib
import io
import os
from typing import Any

import torch
import torch.distributed as dist

from support.processes import run_ranks


def _run(rank: int, world_size: int, module: str, programs: list[str], folder: str) -> bytes:
    functions = importlib.import_module(module)
    results = {name: getattr(functions, name)(rank, world_size, folder) for name in programs}
    # As bytes: a tensor in a pipe is shared memory that is gone with its process.
    stream = io.BytesIO()
    torch.save(results, stream)
    return stream.getvalue()


def _run_checked(rank: int, world_size: int, name: str, folder: str, **kwargs: Any) -> bytes:
    # torch was imported without it.
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size)
    results = _run(rank, world_size, folder=folder, **kwargs)
    dist.destroy_process_group()
    return results


def compare_backends(
    module: str,
    programs: list[str],
    folder: Any,
    world_size: int = 2,
    tolerance: float = 1e-6,
    is_checked: bool = False,
    timeout: float = 60,
) -> None:
    """Runs ``module.program(rank, world_size, folder)`` for each program, on every rank, in one launch per backend.

    A program returns tensors in lists, tuples and dicts, or values that compare
    with ``==``; farandole's must be gloo's, floats within ``tolerance``.
    ``is_checked`` sets torch's debug level to DETAIL. ``timeout`` is for each backend, in seconds.
    """
    results = {}
    for backend in ("farandole", "gloo"):
        place = folder / backend
        place.mkdir()
        work = {"module": module, "programs": programs, "folder": str(place)}
        if is_checked:
            saved = run_ranks(_run_checked, world_size, None, timeout=timeout, name=backend, **work)
        else:
            saved = run_ranks(_run, world_size, backend, timeout=timeout, **work)
        results[backend] = [torch.load(io.BytesIO(data), weights_only=False) for data in saved]
    for rank in range(world_size):
        for program in programs:
            ours, theirs = results["farandole"][rank][program], results["gloo"][rank][program]
            _same(ours, theirs, tolerance, f"{program} on rank {rank}")


def _same(ours: Any, theirs: Any, tolerance: float, where: str) -> None:
    assert type(ours) is type(theirs), f"{where}: {type(ours)} against {type(theirs)}"
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where}: {m}")
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            _same(ours[key], theirs[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, (mine, other) in enumerate(zip(ours, theirs)):
            _same(mine, other, tolerance, f"{where}[{index}]")
    else:
        assert ours == theirs, f"{where}: {ours!r} against {theirs!r}"
