"""The documentation site: `make docs` builds it into docs/_build/html."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).with_name("_ext"))]
# The notebook is executed by a kernel of its own, which has to find the package, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from keras_dist.version import __version__  # noqa: E402

project = "keras_dist"
author = "the authors of keras_dist"
copyright = "the authors of keras_dist"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated",
    "terminal",
    "wrapping",
]
exclude_patterns = ["_build", "_ext", "_terminal"]

# Every link between pages is checked; nothing is downloaded, so that names of Keras,
# TensorFlow and Python are shown without a link.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!keras_dist\.\w+$).*")]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_ambiguous"]

nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"  # a cell that fails ends the build, and is printed by it

# A page for each public name, in docs/reference/api/; of classes, the methods that
# users call. (`methods` is a name of autosummary itself.)
templates_path = ["_templates"]
autosummary_context = {
    "shown_methods": {
        "keras_dist.DistributedModel": "fit, evaluate, predict",
    }
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_param = False  # one entry for names that are described together
python_maximum_signature_line_length = 72
default_role = "code"
smartquotes_action = "qe"  # no dashes, which options begin with
add_module_names = False

html_theme = "furo"
html_title = f"keras_dist {__version__}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
