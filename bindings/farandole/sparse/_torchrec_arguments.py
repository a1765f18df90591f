"""torchrec's arguments that have no counterpart, for calls that were written for its pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# What is taken, and why nothing else is. Both values of some do the same here.
_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "apply_jit": ((False,), "modules are not scripted; torch.compile the dense ones"),
    "pipeline_postproc": ((False, True), "post-processing without trained parameters always goes ahead"),
    "enqueue_batch_after_forward": ((False,), "a batch is loaded before the forward, or beside it: load_on_thread"),
    "enable_inplace_copy_batch": ((False,), "a batch gets new memory on its device"),
    "context_type": ((None,), "batches in flight have no contexts of torchrec's, so that no other class is used"),
}


def by_name(kind: str, names: Sequence[str], positional: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a pipeline with those by name that torchrec has by position.

    Raises:
        TypeError: more of these than there are names, or one that is given by name, too.
    """
    if len(positional) > len(names):
        raise TypeError(
            f"{kind}() takes up to {len(names) + 3} arguments by position (model, optimizer, device, "
            f"{', '.join(names)}), got {len(positional) + 3}"
        )
    given = dict(zip(names, positional, strict=False))
    for name in given:
        if name in options:
            raise TypeError(f"{kind}() got multiple values for argument '{name}'")
    return {**given, **options}


def refuse_torchrecs(**given: Any) -> None:
    """
    Raises:
        ValueError: an argument asks for what is not done.
    """
    for name, value in given.items():
        taken, reason = _TAKEN[name]
        if name == "context_type" and _is_torchrecs_default(value):
            continue
        if not any(value is each or (type(value) is type(each) and value == each) for each in taken):
            raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, taken))}: {reason}")


def refuse_interval(name: str, value: Any) -> None:
    """
    Raises:
        ValueError: neither a number of batches nor None.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r}: expected None or an int above 0")


def _is_torchrecs_default(context_type: Any) -> bool:
    source, name = (getattr(context_type, key, None) for key in ("__module__", "__qualname__"))
    return name == "TrainPipelineContext" and str(source).startswith("torchrec.")
