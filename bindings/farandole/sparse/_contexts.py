"""The context manager of a step that has nothing to enter."""

from __future__ import annotations

from farandole._C import Nothing

# Any call of it gives itself.
NOTHING = Nothing()
