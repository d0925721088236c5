"""The shape of the source: layers know only what is below them, names are where they are looked for, examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import itertools
import pkgutil
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import texvlm

ROOT = Path(__file__).resolve().parent.parent
STAGES = [
    "tiles",
    "pyramid",
    "sample",
    "footprint",
    "hardware",
    "patches",
    "pictures",
    "texture",
    "gl",
    "laplacian",
    "fovea",
    "distance",
    "salience",
    "flow",
    "warping",
    "carrying",
    "history",
    "superpixel",
    "text",
    "pca",
    "retrieval",
    "embedding",
    "channel_sources",
    "channels",
    "features",
    "quadtree",
    "prediction",
    "packing",
    "soft_selection",
    "reading",
    "allocation",
    "pretrained",
    "learned",
    "selection",
    "paths",
    "stages",
    "cascade",
    "perturbation",
    "attention",
]
PYTHON_ALONE = {
    "pictures",
    "texture",
    "pca",
    "retrieval",
    "channel_sources",
    "reading",
    "allocation",
    "pretrained",
    "learned",
    "selection",
    "paths",
    "stages",
}
PINNED = [
    "CHANNELS",
    "FoveaLayout",
    "Texture",
    "boundaries",
    "build_channels",
    "distance_transform",
    "generate_mipmaps",
    "reference",
    "saliency",
    "text_regions",
]
PINNED += ["sample_foveated", "select", "superpixels", "topk"]
CALLABLE = [n for n in PINNED if n not in ("CHANNELS", "reference")]
MAX_LINES = 560


def sources(*patterns: str) -> list[Path]:
    return sorted(p for pattern in patterns for p in ROOT.glob(pattern) if "build" not in p.parts)


def includes(path: Path) -> list[str]:
    return re.findall(r'#include\s*[<"]([^>"]+)[>"]', path.read_text())


@pytest.mark.parametrize("path", sources("csrc/math/*.h"), ids=lambda p: p.name)
def test_formulas_know_neither_torch_nor_cuda(path: Path) -> None:
    strangers = [i for i in includes(path) if re.match(r"(ATen|torch|c10|cuda|\.\.)", i)]
    assert not strangers


@pytest.mark.parametrize("path", sources("csrc/cuda/*"), ids=lambda p: p.name)
def test_cuda_sources_do_not_know_torch(path: Path) -> None:
    assert not [i for i in includes(path) if re.match(r"(ATen|torch|c10)", i)]


@pytest.mark.parametrize("path", sources("csrc/gl/*"), ids=lambda p: p.name)
def test_gl_sources_know_neither_torch_nor_a_gl_header(path: Path) -> None:
    assert not [i for i in includes(path) if re.match(r"(ATen|torch|c10|EGL/|GL/|cuda_)", i)]


def test_every_stem_is_in_every_layer() -> None:
    stems = (
        {p.stem for p in sources("csrc/math/*.h")}
        & {p.stem for p in sources("csrc/*.cpp")}
        & {p.stem for p in sources("texvlm/*.py")}
    )
    compiled = set(STAGES) - PYTHON_ALONE - {"embedding"}  # those have no op
    assert stems >= compiled
    for stem in compiled:
        for path in ("csrc/cuda/{}.cu", "texvlm/reference/{}.py", "tests/cases/{}.py", "tests/test_{}.py", "benchmarks/{}.py"):
            assert (ROOT / path.format(stem)).exists(), path.format(stem)


def test_the_guide_lists_the_stems() -> None:
    listed = re.search(r"^Stems: ([^.]+)\.", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)[1]
    assert re.split(r",\s+", listed) == [stage for stage in STAGES if stage not in PYTHON_ALONE]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_earlier_stages_only(stage: str) -> None:
    """At the top and inside functions. Only `generate_mipmaps` looks ahead, inside: it returns a Texture, and may ask gl for it."""
    # `digits` and `providers` hold models for embedding
    allowed = {*STAGES[: STAGES.index(stage)], "_ext", "_constants", "digits", "providers"}
    if stage == "attention":
        allowed.add("towers")  # which stand on it, and are reached through it
    body = ast.parse((ROOT / "texvlm" / f"{stage}.py").read_text()).body
    body = [node for node in body if not isinstance(node, ast.If)]  # if TYPE_CHECKING
    for node in body if stage == "pyramid" else itertools.chain(*map(ast.walk, body)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("texvlm"):
            names = {node.module.split(".")[1]} if "." in node.module else {a.name for a in node.names}
            assert names <= allowed, f"{stage} imports {names - allowed}"


@pytest.mark.parametrize(
    "path", sources("csrc/**/*.*", "texvlm/**/*.py", "tests/**/*.py", "benchmarks/*.py"), ids=lambda p: p.name
)
def test_no_file_is_too_long(path: Path) -> None:
    if path.suffix in (".h", ".cpp", ".cu", ".cuh", ".py"):
        assert len(path.read_text().splitlines()) <= MAX_LINES


def test_pinned_names_after_importing_every_module() -> None:
    for module in pkgutil.walk_packages(texvlm.__path__, "texvlm."):
        if not module.name.endswith("__main__") and module.name != "texvlm.vllm.models":  # whose bases are vLLM's
            importlib.import_module(module.name)
    for name in PINNED:
        assert hasattr(texvlm, name), name
    for name in CALLABLE:
        assert callable(getattr(texvlm, name)), f"texvlm.{name} is {getattr(texvlm, name)}"
    for name in ("sample", "sample_footprint", "patches", "level", "from_data", "to", "index"):
        assert callable(getattr(texvlm.Texture, name))


PUBLIC = {
    getattr(module, n): None  # once
    for module in (texvlm, importlib.import_module("texvlm.training"), importlib.import_module("texvlm.video"))
    for n in getattr(module, "__all__", dir(module))
    if inspect.isfunction(getattr(module, n)) or inspect.isclass(getattr(module, n))
}


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda t: t.__name__)
def test_docstrings_and_their_examples(thing) -> None:
    """Those of methods too."""
    assert thing.__doc__ and len(thing.__doc__.split()) > 5
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(thing, thing.__name__, globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_a_parameter_costs_what_the_guide_says(tmp_path: Path) -> None:
    """The guide's diff applies to the sources as they are, and has as many edits as it says."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a parameter")[1].split("\n## ")[0]
    diff = re.search(r"```diff\n(.*?)```", section, re.DOTALL)[1]
    names = re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    if not shutil.which("git"):
        pytest.skip("no git to apply the diff with")
    done = subprocess.run(["git", "apply", "-"], input=diff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    edits = len(re.findall(r"^\+[^+]", diff, re.MULTILINE))
    assert f"{edits} edits in {len(names)} files" in section
    assert edits <= 20
    assert len(names) <= 6


def test_benchmarks_begin_with_a_question() -> None:
    for path in sources("benchmarks/*.py"):
        if not path.stem.startswith("_"):
            first = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
            assert first.endswith("?"), f"{path.name}: {first}"
