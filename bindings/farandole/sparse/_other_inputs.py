"""Whether a forward gives a sharded module what went ahead for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farandole.sparse._in_flight import InFlight
from farandole.sparse._input_equality import are_same_arguments, is_alike, is_equal_input, is_same_part

CUSTOM_FORWARD = (
    "torch.fx takes the model to be called with the batch: where custom_model_fwd gives it something else, a part of the "
    'batch say, expected tracing="hooks"'
)


def refuse_other_inputs(
    name: str,
    flying: InFlight,
    now: tuple[Any, Any],
    compares: bool,
    is_recorded: bool,
    changed: Callable[[], list[str]],
) -> None:
    """
    Args:
        name: of the module, which is called with ``now``.
        compares: values, too, as where the forward may be another one than fx has seen; they are wherever parts of the
            batch, or attributes of the model, that inputs were computed from were written to.
        is_recorded: by hooks, which take parts of batches.
        changed: gives names of attributes of the modules that fx went through, which may be why.

    Raises:
        RuntimeError: these are others.
    """
    overwritten = [] if flying.read is None else flying.read.overwritten(compares)
    if overwritten:
        raise RuntimeError(
            f"{', '.join(map(repr, overwritten))}, with which inputs of {name} were computed ahead of the forward, had other "
            "values on this rank than DDP gives it in each forward: expected the same ones on all ranks, or DDP with "
            "broadcast_buffers=False, or that tells it to ignore them"
        )
    # Of inputs that are the same objects ahead and now, values tell nothing.
    if flying.writes[name].found_any():
        raise RuntimeError(
            f"tensors among the inputs of {name} have been written to since these went ahead, maybe by the forward "
            "a second time: expected nothing that works in place on what a sharded module is given, but in a module "
            "without parameters, which runs once for a batch"
        )
    ahead = flying.calls[name]
    if are_same_arguments(ahead, now):
        return
    read = [] if flying.read is None else flying.read.changed()
    if is_recorded:
        is_same = is_same_part(ahead, now)
    else:
        compares = compares or bool(read) or (flying.source_writes is not None and flying.source_writes.found_any())
        is_same = (is_equal_input if compares else is_alike)(ahead, now)
    if is_same:
        return
    if read:
        raise RuntimeError(
            f"{name} is called with other inputs than those that went ahead, since its forward changes "
            f"{', '.join(map(repr, read))}, with which they are computed, before it reads that (DDP's broadcast_buffers "
            "does, where ranks differ): expected a change between two steps, on all ranks, or what changes in a forward to "
            "be a part of the batch"
        )
    more = f". {CUSTOM_FORWARD}" if flying.has_custom_forward else ""
    if hasattr(flying.batch, "to_proxy"):
        more += ". What its to_proxy() leaves as it is a forward may ask for: give such a batch as example_batch"
    raise RuntimeError(
        f"{name} is called with other inputs than those that were computed from the batch and went ahead: "
        "expected a forward that treats all batches alike, and asks no part of one whether it is None or of "
        f"what type; that changes nothing in the batch; and that draws no random numbers for inputs{_settled(changed())}. "
        f'tracing="hooks" takes parts of batches as they come{more}'
    )


def _settled(changed: list[str]) -> str:
    if not changed:
        return ""
    named = ", ".join(map(repr, changed))
    return (
        f"; and that {named}, which has changed since the last forward, is no part of what they are computed with, but "
        "where it is a buffer, or in the batch"
    )
