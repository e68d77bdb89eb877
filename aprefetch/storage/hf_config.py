"""The `config.json` of a published checkpoint, as far as a text model has use for it.

A multimodal checkpoint keeps the language model's settings in a section of their own; that section
is lifted out and the others (vision, audio, projectors) are ignored. A config that lies beside a
GGUF only serves to notice that the two are of different models: the GGUF's metadata are what runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aprefetch.errors import SourceError

__all__ = ["check_config_beside", "read_text_config", "text_config"]

_TEXT_SECTIONS = ("text_config", "language_config", "llm_config")
_OTHER_SECTIONS = ("vision_config", "audio_config", "visual")

# A GGUF key and the names that checkpoints use for the same number.
_SAME: Mapping[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "attention.head_count": ("num_attention_heads",),
    "expert_count": ("num_experts", "n_routed_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_token", "num_experts_per_tok"),
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's settings of a parsed config, without the sections of other parts.

    Raises:
        SourceError: there are two text sections, one is no object, or only other parts are there.
    """
    found = [name for name in _TEXT_SECTIONS if config.get(name) is not None]
    if len(found) > 1:
        raise SourceError(f"the config has several text sections: {', '.join(found)}", key=found[1])
    if not found:
        if "num_hidden_layers" not in config and any(name in config for name in _OTHER_SECTIONS):
            raise SourceError(
                "the config describes no language model, only other parts; give the folder of a"
                " checkpoint that can write text",
                key="text_config",
            )
        return {key: value for key, value in config.items() if key not in _OTHER_SECTIONS}
    section = config[found[0]]
    if not isinstance(section, Mapping):
        raise SourceError(f"the config's {found[0]} is no object", key=found[0])
    return dict(section)


def read_text_config(path: Path) -> dict[str, Any]:
    """`text_config` of a `config.json`, or of the one in a folder. Raises SourceError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SourceError(f"cannot be read: {error}", path=file) from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"is not JSON: {error}", path=file) from error
    if not isinstance(config, dict):
        raise SourceError("is not a JSON object", path=file)
    try:
        return text_config(config)
    except SourceError as error:
        raise SourceError(str(error), path=file, key=error.key) from None


def check_config_beside(metadata: Mapping[str, Any], paths: Sequence[Path]) -> Path | None:
    """Compare the `config.json` beside a GGUF, if there is one, and return where it lies.

    Raises:
        SourceError: it cannot be read, or is of another model than the GGUF.
    """
    for folder in dict.fromkeys(path.parent for path in paths):
        file = folder / "config.json"
        if not file.is_file():
            continue
        config, prefix = read_text_config(file), f"{metadata.get('general.architecture')}."
        for key, names in _SAME.items():
            ours = metadata.get(prefix + key)
            theirs = next((config[name] for name in names if name in config), None)
            if not isinstance(ours, int | np.integer) or not isinstance(theirs, int):
                continue  # left out, or told for each layer apart
            if int(ours) != theirs:
                raise SourceError(
                    f"says {theirs} where the model file beside it says {ours} for {key}; they are"
                    " of different models, move one of them away",
                    path=file,
                    key=prefix + key,
                )
        return file
    return None
