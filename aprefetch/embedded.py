"""The model that ships with the package. Its name and files are known here and nowhere else.

To replace it, put the new files into `assets/` and change the constants below.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["GOLDENS_PATH", "MODEL_PATH", "NAME"]

_ASSETS = Path(__file__).resolve().parent / "assets"

NAME = "ember-47m"
MODEL_PATH = _ASSETS / "ember-47m-deepseek4-mxfp4.gguf"
GOLDENS_PATH = _ASSETS / "ember-47m-goldens.json"
