"""The demo model and its four adapters, shipped inside the package.

Only says where the files are; loads nothing and needs no network.
"""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"


def model_path() -> Path:
    """Folder of the demo base model, in Hugging Face layout."""
    return ASSETS / "base"


def adapters() -> dict[str, Path]:
    """Adapter name to its folder, in PEFT layout; sorted by name."""
    configs = sorted((ASSETS / "adapters").glob("*/adapter_config.json"))
    return {config.parent.name: config.parent for config in configs}
