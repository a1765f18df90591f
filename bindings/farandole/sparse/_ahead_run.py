"""What post-processing modules were before they ran for a batch, for batches that are not to have run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from farandole.sparse._input_equality import has_same_values, version_of
from farandole.sparse._model_state import ModelState

# Of the pipeline and of the caller, who may change the mode before the batch's forward.
_BESIDES = ("forward", "training")


class AheadRun:
    """One run of these modules, from when it is made to ``has_run()``.

    Tensors that no run has written to so far are not copied, but all buffers are before the first run.

    Args:
        modules: by name.
        written: where tensors lie that a run has written to, None before the first; ``has_run()`` returns it anew.
        calls: how often any of the modules has run so far, for whomever.
        last: the run before.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        written: frozenset[str] | None,
        calls: Callable[[], int],
        last: AheadRun | None = None,
    ) -> None:
        self.modules = dict(modules)
        self._written = written
        self._calls = calls
        self._calls_after = 0
        self._now: dict[str, ModelState]
        self._known: dict[str, torch.Tensor] | None = None  # what these have
        if last is not None and last.modules == self.modules:
            self._now, self._known = last._now, last._known
        else:
            self._now = {name: ModelState(module, _BESIDES, True) for name, module in self.modules.items()}
        self._tensors = {
            name: (tensor, version_of(tensor), tensor.detach().clone() if self._is_copied(name, tensor) else None)
            for name, tensor in self._all().items()
        }
        self._before = self._after = self._now
        self._versions: dict[str, int] = {}
        self._noted: dict[str, int] = {}  # versions behind the last forward of the model
        self._values: dict[str, torch.Tensor] = {}  # of what it has written

    def has_run(self) -> frozenset[str]:
        self._calls_after = self._calls()
        tensors = self._all()
        self._after = self._now
        self._versions = self._noted = {name: version_of(tensor) for name, tensor in tensors.items()}
        changed = {
            name for name, (tensor, version, _) in self._tensors.items() if version != self._versions.get(name, version)
        }
        self._values = {name: tensors[name].detach().clone() for name in changed}
        return (self._written or frozenset()) | changed

    def is_overwritten(self) -> bool:
        """Whether others have since written to what it has written."""
        tensors = self._all()
        return any(self._is_other(name, tensors.get(name)) for name in self._values)

    def note_forward(self) -> None:
        """Of a batch before it, in which torch's DDP may write buffers, with what they hold."""
        if self._noted:  # else one that has come since is a change, as any other attribute
            self._noted = {name: version_of(tensor) for name, tensor in self._all().items()}

    def is_stale(self) -> bool:
        """Whether it would be another one by now, since the modules were changed, by a load of their state say. Not by
        calls of others, for which what it has written counts."""
        is_noted = all(version_of(tensor) == self._noted.get(name) for name, tensor in self._all().items())
        if is_noted and (self._now == self._after or not self._has_changed()):
            return False
        return not self._has_others() or not self._has_written()

    def take_back(self) -> str | None:
        """As if it had not been; what was changed since stays. Else nothing is done, and what it returns says why: others
        have called the modules since, and changed them; or it is not known any more how it was."""
        if self._has_others() and self._has_written() and (self.is_overwritten() or self._has_changed()):
            return "other calls have changed their state since: expected such modules to be called by its pipeline only"
        written = {
            name: (tensor, before)
            for name, (tensor, version, before) in self._tensors.items()
            if self._versions.get(name, version) != version
        }
        late = ", ".join(repr(name) for name, (_, before) in written.items() if before is None)
        if late:
            return (
                f"nothing is kept of {late} before that: expected such modules to write to it for the first batch, too"
            )
        tensors = self._all()
        kept = [
            tensor for name, (tensor, _) in written.items() if name in tensors and self._is_other(name, tensors[name])
        ]
        for name, state in self._before.items():
            state.restore_but_for(self._after[name])
        with torch.no_grad():
            for tensor, before in written.values():
                if before is not None and not any(tensor is other for other in kept):
                    tensor.copy_(before)
        return None

    def _has_others(self) -> bool:
        return self._calls() != self._calls_after

    def _has_changed(self) -> bool:
        return any(state.has_changed() for state in self._after.values())

    def _has_written(self) -> bool:
        return bool(self._values) or any(after.differs(self._before[name]) for name, after in self._after.items())

    def _is_other(self, name: str, tensor: torch.Tensor | None) -> bool:
        # torch's DDP writes buffers in each forward, mostly with what they hold already, and may not count that.
        return tensor is None or not has_same_values(tensor, self._values[name])

    def _is_copied(self, name: str, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, nn.Parameter) if self._written is None else name in self._written

    def _all(self) -> dict[str, torch.Tensor]:
        for name, state in self._now.items():
            now = state.as_now()
            if now is not state:
                self._now, self._known = self._now | {name: now}, None
        if self._known is None:
            self._known = {
                f"{name}.{key}": tensor for name, state in self._now.items() for key, tensor in state.tensors().items()
            }
        return self._known
