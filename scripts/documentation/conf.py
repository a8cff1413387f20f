"""Sphinx's settings; build.py calls it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import fa4flex

project = "fa4flex"
author = "the fa4flex authors"
version = release = fa4flex.__version__
extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "monokai"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
suppress_warnings = ["ref.python"]  # types in signatures: several classes are called Attention
html_theme = "furo"
html_title = f"fa4flex {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
copybutton_prompt_text = "$ "
