"""torchrec's arguments that have no counterpart, for calls that were written for its pipelines."""

from __future__ import annotations

from typing import Any

# What is taken, and why nothing else is. Both values of some do the same here.
_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "apply_jit": ((False,), "modules are not scripted; torch.compile the dense ones"),
    "pipeline_postproc": ((False, True), "post-processing without trained parameters always goes ahead"),
    "dmp_collection_sync_interval_batches": ((None, 1), "a DMPCollection is not taken"),
    "enqueue_batch_after_forward": ((False,), "a batch is loaded before the forward, or beside it: load_on_thread"),
    "enable_inplace_copy_batch": ((False,), "a batch gets new memory on its device"),
}


def take_torchrecs(pipeline: str, given: dict[str, Any]) -> None:
    """
    Raises:
        TypeError: an argument that torchrec's pipelines do not have either.
        ValueError: one that asks for what is not done.
    """
    for name, value in given.items():
        if name not in _TAKEN:
            raise TypeError(f"{pipeline}() got an unexpected keyword argument {name!r}")
        taken, reason = _TAKEN[name]
        if not any(value is each or (type(value) is type(each) and value == each) for each in taken):
            raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, taken))}: {reason}")
