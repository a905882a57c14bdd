"""What this version does not do yet: one line a feature, to be deleted by the change that brings the feature."""

from __future__ import annotations

from collections.abc import Sequence

# knob -> the values that work; a knob that is not here works with all its legal values
AVAILABLE: dict[str, Sequence[object]] = {}
