"""torch's ``_set_static_graph()``, which programs call where DistributedDataParallel was made without static_graph."""

from __future__ import annotations

import warnings

from farandole import _C
from farandole.ddp._options import unused_policy


class SetsStaticGraph:
    """The part of the wrapper that learns later that every backward will be like the first one."""

    _reducer: _C.GradReducer
    _options: _C.ReducerOptions
    static_graph = False
    _unused_parameters: str | None = None  # the argument of that name

    def _set_static_graph(self) -> None:
        """As ``static_graph=True``. To be called before the first backward that synchronizes, on all ranks.

        Raises:
            RuntimeError: gradients have been reduced.
            ValueError: ``unused_parameters`` is given, as something else than "skip".
        """
        if self.static_graph:
            warnings.warn("static_graph is True already: _set_static_graph() has no effect", stacklevel=2)
            return
        unused = self._options.unused
        if unused != _C.UnusedParameters.error_in_used_group:  # Megatron-core's, which has no other
            unused = unused_policy(self._unused_parameters, find_unused_parameters=False, static_graph=True)
        self._reducer.set_graph_static(unused)
        # For copies, and for a reducer that is made in the place of this one.
        self._options.unused, self._options.is_graph_static = unused, True
        self.static_graph = True
