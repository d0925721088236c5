"""Pictures that scikit-image ships; the first is that of `make demo`: `python -m texvlm.cli.photo` says where."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from texvlm.cli import Complaint

PHOTO = "motorcycle_left.png"  # Middlebury stereo 2014, 741 x 500, in the public domain (CC0)
EXAMPLES = (PHOTO, "coffee.png", "rocket.jpg", "page.png")


def shipped(names: Sequence[str]) -> list[Path]:
    """Where those of these pictures are that are there; scikit-image itself is not imported for it."""
    spec = importlib.util.find_spec("skimage")
    folders = [Path(folder) / "data" for folder in (spec.submodule_search_locations or [])] if spec else []
    return [folder / name for name in names for folder in folders if (folder / name).exists()]


def photo() -> Path:
    """Where the photograph is."""
    if found := shipped([PHOTO]):
        return found[0]
    raise Complaint("the demo's photograph comes with scikit-image: pip install scikit-image, or name a picture")


if __name__ == "__main__":
    try:
        print(photo())
    except Complaint as complaint:
        raise SystemExit(str(complaint)) from None
