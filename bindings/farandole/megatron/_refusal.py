"""What a call on one rank refuses is told to the other ranks of its pipeline, which would wait for it in their step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from farandole.megatron._topology import parallel_state
from farandole.pipelining._refusal import tell_others


@contextlib.contextmanager
def refusal_of_call(pipelined: bool, p2p_communicator: Any = None, pg_collection: Any = None) -> Iterator[None]:
    """What is raised inside reaches the other ranks of the pipeline, where there is one to be found."""
    try:
        yield
    except Exception as error:
        if pipelined:
            tell_others(_group_of(p2p_communicator, pg_collection), error)
        raise


def refused_on_all_ranks(call: Callable[..., Any]) -> Callable[..., Any]:
    """Of a method of what has ``pipelined``: arguments that it does not know, or lacks, are told, too."""

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:  # raised inside, which has told
                raise
            name = getattr(self, "__name__", type(self).__name__)
            refused = TypeError(f"{name}{str(error).removeprefix(call.__qualname__)}")
        with refusal_of_call(self.pipelined, kwargs.get("p2p_communicator"), kwargs.get("pg_collection")):
            raise refused

    return checked


def _group_of(p2p_communicator: Any, pg_collection: Any) -> Any:
    for given, name in ((p2p_communicator, "pp_group"), (pg_collection, "pp")):
        if getattr(given, name, None) is not None:
            return getattr(given, name)
    state = parallel_state()
    return None if state is None else state.get_pipeline_model_parallel_group()
