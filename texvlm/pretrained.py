"""Modules that are saved as a folder: config.json says what to build, weights.safetensors what it has learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

CONFIG, WEIGHTS = "config.json", "weights.safetensors"

SHIPPED = Path(__file__).parent / "allocators"
"""Folders that come with the package, by name."""

Kind = TypeVar("Kind", bound="Pretrained")


class Pretrained(nn.Module):
    """A module that can be saved and loaded. A subclass keeps the keyword arguments that it was built from in `self.config`.

    Attributes:
        version: of what the weights mean; raised by a subclass when older ones no longer fit. Newer ones than this are refused.
        config: what `type(self)(**config)` builds this module from, all of it JSON.

    Example:
        >>> import tempfile, torch
        >>> from texvlm.pretrained import Pretrained
        >>> class Scale(Pretrained):
        ...     def __init__(self, size=3):
        ...         super().__init__()
        ...         self.config = {"size": size}
        ...         self.weight = torch.nn.Parameter(torch.randn(size))
        >>> scale = Scale(size=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     scale.save_pretrained(folder)
        ...     same = Scale.from_pretrained(folder)
        >>> torch.equal(same.weight, scale.weight)
        True
    """

    version: int = 1
    config: dict[str, Any]

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config.json and weights.safetensors there; the folder is made, files of the same names are replaced."""
        from safetensors.torch import save_file

        folder = Path(folder)
        text = json.dumps({"class": type(self).__name__, "version": self.version, **self.config}, indent=1, allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(text + "\n")

    @classmethod
    def from_pretrained(cls: type[Kind], folder: str | Path) -> Kind:
        """The module that was saved there, on the CPU.

        Args:
            folder: where `save_pretrained` wrote, or the name of one that comes with the package ("default"); a folder goes first.

        Raises:
            FileNotFoundError: no such folder or name, or one of its two files is missing.
            ValueError: it holds another class, a newer version, or weights that do not fit its configuration.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = _found(Path(folder))
        for name in (CONFIG, WEIGHTS):
            if not (path / name).is_file():
                raise FileNotFoundError(f"folder must hold {CONFIG} and {WEIGHTS}, but {path} has no {name}")
        try:
            config = json.loads((path / CONFIG).read_text())
            kind, version = config.pop("class"), int(config.pop("version"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path / CONFIG} must be JSON with class and version, got {type(error).__name__}: {error}"
            ) from None
        if kind != cls.__name__:
            raise ValueError(f"{path} must hold a {cls.__name__}, got a {kind}")
        if version > cls.version:
            raise ValueError(f"{path} must be of version {cls.version} or older, got {version}: a newer texvlm reads it")
        try:
            module = cls(**config)
        except TypeError as error:  # an argument that this class does not take
            raise ValueError(f"{path / CONFIG} does not fit {cls.__name__}: {error}") from None
        try:
            module.load_state_dict(load_file(path / WEIGHTS))
        except (RuntimeError, SafetensorError) as error:
            raise ValueError(f"{path / WEIGHTS} does not fit its configuration: {' '.join(str(error).split())}") from None
        return module


def _found(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    if len(folder.parts) == 1 and (SHIPPED / folder).is_dir():
        return SHIPPED / folder
    names = sorted(p.name for p in SHIPPED.iterdir() if p.is_dir()) if SHIPPED.is_dir() else []
    raise FileNotFoundError(
        f"folder must be a folder or one of {', '.join(names) or 'no shipped names yet'}, got {str(folder)!r}"
    )
