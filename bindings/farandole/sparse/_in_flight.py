"""A batch between its loading and its forward; what is there by sharded module is by its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from farandole.sparse._ahead_run import AheadRun
from farandole.sparse._attributes_ahead import ReadAttributes
from farandole.sparse._input_writes import InputWrites
from farandole.sparse._post_processing import Noted


@dataclass(slots=True)
class InFlight:
    number: int
    batch: Any
    has_custom_forward: bool = False  # which calls the model, maybe with something else
    # Whose input_dist has the batch, and in which mode of the model; None where it stays in the forward.
    owner: Any = None
    is_training: bool = True
    in_forward: bool = False  # nothing has gone ahead for it, nor does
    results: Noted | None = None  # of post-processing modules
    run: AheadRun | None = None  # of these modules
    read: ReadAttributes | None = None  # of the model, which inputs were computed with
    calls: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict)  # what the modules are to be given
    writes: dict[str, InputWrites] = field(default_factory=dict)  # to these
    source_writes: InputWrites | None = None  # to parts of the batch that these were computed from
    contexts: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    is_sent: bool = False  # the data is under way, or here
    is_prefetched: bool = False
    prefetched: set[str] = field(default_factory=set)  # modules whose caches hold rows for its forward, to come
    error: Exception | None = None  # what a stage raised beside the batch before
