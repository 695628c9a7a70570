# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Pictures of the lattice and the walk: traces, a page that draws them, a rendering for terminals."""

from .trace import BlockTrace, Trace


__all__ = ["BlockTrace", "Trace"]
