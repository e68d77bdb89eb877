"""Run Mixture-of-Experts models larger than memory: experts stream from the SSD."""

from __future__ import annotations

import logging

from aprefetch._version import __version__

__all__ = ["__version__"]

logging.getLogger(__name__).addHandler(logging.NullHandler())
