"""Finds the compiled extension, or says why it does not load. Standard library only: it speaks when nothing else does.

Python looks into the working directory first, so in a checkout in which nothing is built, `./texvlm` hides the texvlm that pip has
installed. Where the two are the same, the checkout steps aside for it.
"""

from __future__ import annotations

import filecmp
import importlib
import importlib.metadata
import os
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
INSTALL = "pip install --no-build-isolation --force-reinstall --no-deps ."


def extension() -> ModuleType:
    """`texvlm._C`; in an unbuilt checkout that of the installed package, from which all later modules then come as well."""
    if refused := mismatch():
        raise ImportError(refused[0])
    try:
        return importlib.import_module("texvlm._C")
    except ModuleNotFoundError as error:
        if error.name != "texvlm._C" or (other := installed()) is None or difference(other):
            raise
    package = sys.modules["texvlm"]
    package.__path__[:] = [str(other)]
    package.__file__ = str(other / "__init__.py")
    return importlib.import_module("texvlm._C")


def mismatch() -> tuple[str, str] | None:
    """In a line, that this package came as a wheel for another minor version of torch than is there, and what helps.

    Such a wheel has its torch in its version, and so in the name of the folder beside this one. Metadata are read only where there is one:
    what was built here is for the torch that is here.
    """
    beside = os.listdir(HERE.parent)  # glob takes 300 us for its pattern, this 10
    wheel = next(
        (name for name in beside if name.startswith("texvlm-") and name.endswith(".dist-info") and "+torch" in name), None
    )
    if wheel is None:
        return None
    requires = importlib.metadata.PathDistribution(HERE.parent / wheel).requires
    needs = [found[1] for need in requires or () if (found := re.fullmatch(r"torch==(\d+\.\d+)\.\*", need))]
    version = sys.modules["torch"].__version__
    minor = ".".join(version.split(".")[:2])
    if not needs or needs == [minor]:
        return None
    return (
        f"this wheel of it is for torch {needs[0]}, and you run {version}",
        f"the wheel for torch {minor}, or pip install 'torch=={needs[0]}.*'",
    )


def installed() -> Path | None:
    """The folder of a texvlm with an extension for this Python, other than this one."""
    for folder in (Path(entry).resolve() / "texvlm" for entry in sys.path):
        if folder != HERE and built(folder):
            return folder
    return None


def built(folder: Path) -> bool:
    """Whether there is an extension for this Python in it; it may not load all the same."""
    return any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def difference(other: Path) -> str | None:
    """The first of the Python modules here that the other folder has not got in the same words."""
    names = sorted(str(path.relative_to(HERE)) for path in HERE.rglob("*.py"))
    _, different, absent = filecmp.cmpfiles(HERE, other, names, shallow=False)
    return min((*different, *absent), default=None)


def explain(error: BaseException) -> tuple[str, str]:
    """Why the extension does not load, in a line, and what helps."""
    checkout = (HERE.parent / "setup.py").exists()
    build = f"make clean build, or {INSTALL}" if checkout else INSTALL
    if "torch" not in sys.modules:
        return "it needs torch, which does not load itself", "pip install torch==2.13.0"
    if refused := mismatch():
        return refused
    other = installed()
    if built(HERE):
        why = f"{first_line(error)}. It is built for one version of PyTorch: you run {sys.modules['torch'].__version__}"
    elif other is not None:
        why = f"it has not been built in {HERE}, which hides the texvlm installed in {other}, and {difference(other)} is another there"
    else:
        why = f"it has not been built in {HERE}"
    return why, build + (f"; or run in another folder, to use the texvlm of {other}" if other else "")


def first_line(error: BaseException) -> str:
    """Its message up to the first line break, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
