"""Packages whose authors train with Keras do so on all ranks, unchanged.

Each script of `packages/` is one that a user of the package writes for one process. It
prints its weights.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from harness.launching import launch, prefix
from harness.needs import needs

pytestmark = needs(
    *("libraries", "adapt", "bayesflow", "hgq", "imblearn", "kgcnn"),
    *("scikeras", "tsgm", "tslearn", "umap"),
)

_SCRIPTS = sorted(Path(__file__).with_name("packages").glob("*.py"))

# Where N ranks are not one process: what a warning names; nothing for noise alone.
_DIFFERENT = {"bayesflow_flow": "standardization/standardize", "tsgm_gan": ""}


def _printed(done, rank=0):
    """The weights that a rank has printed."""
    pattern = rf"^{re.escape(prefix(rank))}weights (.*)$"
    lines = re.findall(pattern, done.stdout, re.MULTILINE)
    return np.array(" ".join(lines).split(), "float64")


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.stem)
def test_a_script_trains_the_same_on_two_ranks(script, tmp_path):
    """By plain Python, and by `keras-dist run --distribute`, to 1e-6."""
    env = {"KERAS_BACKEND": "tensorflow", "OMP_NUM_THREADS": "1"}
    one = launch([script, tmp_path], env=env, check=True)
    two = launch(["--distribute", script, tmp_path], ranks=2, env=env, check=True)
    first, second = _printed(two), _printed(two, 1)
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, second)
    if script.stem in _DIFFERENT:
        assert _DIFFERENT[script.stem] in " ".join(two.stderr.split())
        assert first.shape == _printed(one).shape
    else:
        np.testing.assert_allclose(first, _printed(one), rtol=1e-6, atol=1e-6)
