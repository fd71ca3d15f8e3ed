"""Sphinx's configuration. `build.py` calls Sphinx with it, on a tree that it has put together."""

import kbitcupy

project = "kbitcupy"
author = "kbitcupy contributors"
version = release = kbitcupy.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc", "myst_nb"]
root_doc = "index"
exclude_patterns = ["docs/README.md"]

# A name between single backticks is a name of Python, and a link where it has a page.
default_role = "py:obj"
add_module_names = False
autodoc_typehints = "none"  # numpydoc's sections say it
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # their outputs are stored, and a test compares them with what the cells print
nb_merge_streams = True

html_theme = "furo"
html_title = f"kbitcupy {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00598a", "color-brand-content": "#0069a8"},
    "dark_css_variables": {"color-brand-primary": "#74c7f5", "color-brand-content": "#74c7f5"},
}
