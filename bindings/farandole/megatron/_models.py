"""Finds what a step needs of a model beneath its wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def get_attr_wrapped_model(model: nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """An attribute of a model or of what it wraps: by ``.module`` (data parallelism, Float16Module) or torch.compile.

    Args:
        model: of which the outermost with the attribute is taken.
        attr: its name.
        allow_none: whether an attribute that is None counts.
        return_model_obj: return what has the attribute instead.

    Raises:
        RuntimeError: none has it.
    """
    if isinstance(model, list):
        raise RuntimeError("model is a list, expected one of its entries")
    for inner in _layers(model):
        if hasattr(inner, attr) and (allow_none or getattr(inner, attr) is not None):
            return inner if return_model_obj else getattr(inner, attr)
    raise RuntimeError(f"model is a {type(model).__name__} without {attr}, expected one here or in what it wraps")


def get_model_config(model: nn.Module) -> Any:
    """The model's ``config``."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def is_encoder_and_decoder(model: nn.Module) -> bool:
    """Whether its ``model_type`` says so; False without one."""
    for inner in _layers(model):
        if hasattr(inner, "model_type"):
            return getattr(inner.model_type, "name", None) == "encoder_and_decoder"
    return False


def set_current_microbatch(model: nn.Module, microbatch: int) -> None:
    """Tells the layers of Megatron-core's models which microbatch comes, where the model has such."""
    for layer in _numbered_layers(model):
        layer.current_microbatch = microbatch


def _numbered_layers(model: nn.Module) -> Iterator[Any]:
    inner = next((one for one in _layers(model) if getattr(one, "decoder", None) is not None), None)
    if inner is not None:
        yield from getattr(inner.decoder, "layers", ())
        for layer in getattr(getattr(inner, "mtp", None), "layers", ()):
            # Its name up to Megatron-core 0.16, and from 0.17 on.
            yield getattr(layer, "transformer_layer" if hasattr(layer, "transformer_layer") else "mtp_model_layer")
    vision = next((one.vision_model for one in _layers(model) if hasattr(one, "vision_model")), None)
    yield from getattr(getattr(vision, "decoder", None), "layers", ())


def _layers(model: Any) -> Iterator[Any]:
    while model is not None:
        yield model
        inner = getattr(model, "_orig_mod", None)  # of torch.compile
        model = getattr(model, "module", None) if inner is None else inner
