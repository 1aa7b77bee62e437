"""Sphinx builds these pages: ``sphinx-build -W --keep-going -b html docs build/docs``. Pages are Markdown (MyST), the API
reference comes from the docstrings, the command line reference from argparse."""

import importlib.util

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import packattn
from packattn import ops

project = "packattn"
author = "packattn contributors"
copyright = "packattn contributors"
version = release = packattn.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_argparse_cli",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"packattn {release}"
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
templates_path: list[str] = []
exclude_patterns: list[str] = []

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"show-inheritance": True}
# The adapters for transformers are documented where it is not installed too.
autodoc_mock_imports = [name for name in ("transformers",) if importlib.util.find_spec(name) is None]
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

copybutton_prompt_text = "$ "


class Schemas(SphinxDirective):
    """Every operator's schema, as it is registered."""

    def run(self) -> list[nodes.Node]:
        text = "\n".join(f"packattn::{name}{schema}" for name, schema in ops.SCHEMAS.items())
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> None:
    app.add_directive("packattn-schemas", Schemas)
