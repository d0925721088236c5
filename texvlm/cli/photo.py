"""The photograph of `make demo`, one that scikit-image ships: `python -m texvlm.cli.photo` says where."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from texvlm.cli import Complaint

PHOTO = "data/motorcycle_left.png"  # Middlebury stereo 2014, 741 x 500, in the public domain (CC0)


def photo() -> Path:
    """Where the photograph is; scikit-image itself is not imported for it."""
    spec = importlib.util.find_spec("skimage")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / PHOTO).exists():
            return path
    raise Complaint("the demo's photograph comes with scikit-image: pip install scikit-image, or name a picture")


if __name__ == "__main__":
    try:
        print(photo())
    except Complaint as complaint:
        raise SystemExit(str(complaint)) from None
