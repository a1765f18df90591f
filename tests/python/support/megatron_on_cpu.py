"""All of Megatron-core, models and optimizers included: the oracle of whole training programs.

Where the tests are on the CPU it works there, too.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import re
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from farandole.bench._megatron_core import find
from support.devices import ON_CPU

_PACKAGE = "megatron.core"
_ON_CPU = [
    (re.compile(r"torch\.cuda\.(Float|Half|BFloat16)Tensor"), r"torch.\1Tensor"),  # names of types
    (re.compile(r"""device\s*=\s*['"]cuda['"]"""), "device='cpu'"),
    (re.compile(r"\.cuda\([^()]*\)"), ""),
]


class _Loader(importlib.machinery.SourceFileLoader):
    """Of a module that names CUDA: it names the CPU instead."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        source = self.get_data(path).decode()
        if "cuda" not in source:
            return super().get_code(fullname)
        for pattern, replacement in _ON_CPU:
            source = pattern.sub(replacement, source)
        return self.source_to_code(source.encode(), path)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Stream:
    """A stream, or an event, of a machine that has none: nothing is under way."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def synchronize(self) -> None: ...

    def record(self, stream: Any = None) -> None: ...


class _Tracker:
    """Of random numbers: weights are initialized without it, and nothing is dropped."""

    def fork(self, name: str = "") -> Any:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}


def prepare() -> None:
    """In a rank, before anything of Megatron-core is imported: it will work on the tests' device.

    Raises:
        RuntimeError: something was.
    """
    if _PACKAGE in sys.modules:
        raise RuntimeError(f"{_PACKAGE} was imported before")
    find()
    warnings.simplefilter("ignore")  # of what else it would use
    logging.disable(logging.WARNING)
    if ON_CPU:
        _use_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    if not parallel_state.HAVE_EINOPS:
        # It asks for "(l s u) -> (l u) s" only.
        rearrange = lambda ranks, pattern, l, s, u: ranks.reshape(l, s, u).swapaxes(1, 2).reshape(l * u, s)  # noqa: E731, E741
        parallel_state.einops, parallel_state.HAVE_EINOPS = SimpleNamespace(rearrange=rearrange), True
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 reads it where there is no TransformerEngine, too
        moe_utils.te_general_gemm = None
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = _Tracker(), True
    random.initialize_rng_tracker = lambda *args, **kwargs: None


def _use_cpu() -> None:
    sys.meta_path.insert(0, _Finder())
    for name in ("current_stream", "default_stream", "Stream", "Event"):
        setattr(torch.cuda, name, lambda *args, **kwargs: _Stream())
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.Tensor.record_stream = lambda *args: None  # type: ignore[assignment, method-assign]
    _take_tensors_as_splits()


def _take_tensors_as_splits() -> None:
    """Token dispatchers give tensors for numbers, which gloo does not take."""
    plain = dist.all_to_all_single

    def numbers(splits: Any) -> Any:
        return splits.tolist() if isinstance(splits, torch.Tensor) else splits

    def all_to_all_single(
        output: Any, given: Any, output_splits: Any = None, input_splits: Any = None, **more: Any
    ) -> Any:
        output_splits = more.pop("output_split_sizes", output_splits)
        input_splits = more.pop("input_split_sizes", input_splits)
        return plain(output, given, numbers(output_splits), numbers(input_splits), **more)

    dist.all_to_all_single = all_to_all_single  # type: ignore[assignment]
