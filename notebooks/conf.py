"""How Sphinx makes the documentation: `make docs`. Nothing is fetched and no notebook is run; a warning is an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import texvlm  # noqa: E402
from texvlm._ext import ops  # noqa: E402

project = "texvlm"
author = copyright = "texvlm contributors"
release = texvlm.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = [".ipynb_checkpoints"]
html_theme = "furo"
html_title = f"texvlm {release}"
html_show_copyright = html_show_sphinx = False

nb_execution_mode = "off"  # tests run them
myst_heading_anchors = 3

default_role = "py:obj"  # a name between backticks: a link where it has a place
add_module_names = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True


SECTION = re.compile(r"(Args|Attributes|Example|Raises|Returns|Yields):$")


def escaped(line: str) -> str:
    """Outside backticks, an asterisk and a bar are themselves."""
    return re.sub(r"(`[^`]*`|^ +[*]+\w+:)|([|*])", lambda found: found[1] or f"\\{found[2]}", line)


def plain_text(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read as they are; here they become reST, before napoleon reads their sections.

    An indented block in their text is a table or a formula, and stays as it is. What is returned is no type and text, but text.
    """
    out: list[str] = []
    section, block = "", False
    for line in lines:
        if SECTION.match(line):
            section, block = line, False
            out += [":returns:"] if section == "Returns:" else [line]
        elif line and not line[0].isspace() and line[0] != "|":
            section, block = "", False
            out.append(escaped(line))
        elif section == "Example:" or block:
            out.append(f" {line}" if block else line)
        elif section == "Returns:":
            out += [""] * bool(re.match(r" {4}\w+: ", line)) + [f"    {escaped(line.strip())}"]
        elif not section and line and not out[-1]:
            block = True
            out += ["::", "", f" {line}"]
        else:
            out.append(escaped(line))
    lines[:] = out


def no_alias(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """The fields of a named tuple are in its own docstring."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


class Ops(Directive):
    """`.. ops::` is every op of torch.ops.texvlm, by name: what it does, and its schema."""

    def run(self) -> list[nodes.Node]:
        text: list[str] = []
        for name in sorted(name for name in ops if not name.endswith("_backward")):
            what, schema, called_by = getattr(ops, name).__doc__.split("\n\n")
            text += [f".. py:function:: torch.ops.texvlm.{name}", "", f"   {escaped(what)}", "", "   .. code-block:: text", ""]
            text += [f"      {schema}", "", f"   {called_by.partition(',')[0]}.", ""]
        section = nodes.Element()
        self.state.nested_parse(StringList(text, source="texvlm._ext"), self.content_offset, section)
        return section.children


def nothing_is_forgotten(app: Sphinx, env: BuildEnvironment) -> None:
    """Everything public is on a page."""
    domain = env.get_domain("py")
    assert isinstance(domain, PythonDomain)
    values = {"CHANNELS", "LOCAL", "MINIMAL", "cmake_prefix_path"}
    public = {name for name in dir(texvlm) if name[0] != "_"}
    for name in sorted(public - values - {entry[0].removeprefix("texvlm.") for entry in domain.get_objects()}):
        logging.getLogger(__name__).warning("texvlm.%s is on no page: notebooks/docs/api.rst", name)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("ops", Ops)
    app.connect("autodoc-process-docstring", plain_text, priority=400)
    app.connect("autodoc-skip-member", no_alias)
    app.connect("env-check-consistency", nothing_is_forgotten)
    return {"parallel_read_safe": True}
