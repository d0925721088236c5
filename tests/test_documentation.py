"""The documentation builds without a warning and without a network, and everything public is on its pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

for needed in ("sphinx", "furo", "myst_nb", "transformers"):
    pytest.importorskip(needed)

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
def test_documentation_builds(tmp_path: Path) -> None:
    nowhere = {f"{name}{proxy}": "http://127.0.0.1:9" for name in ("http", "https") for proxy in ("_proxy", "_PROXY")}
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "notebooks", str(tmp_path / "pages")]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "parsed")],
        cwd=ROOT,
        env=os.environ | nowhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    pages = {path.relative_to(tmp_path / "pages"): path.read_text() for path in (tmp_path / "pages").glob("**/*.html")}
    assert 'id="texvlm.select"' in pages[Path("docs/api.html")]
    assert "torch.ops.texvlm.sample_lod" in pages[Path("docs/ops.html")]
    assert {Path(f"{path.stem}.html") for path in ROOT.glob("notebooks/*.ipynb")} <= set(pages)
    assert not [str(path) for path, text in pages.items() if '<script src="http' in text or 'rel="stylesheet" href="http' in text]
