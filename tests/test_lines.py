"""What a warning of the package points to."""

import types

import keras
import pytest

from keras_dist import lines


@pytest.mark.parametrize("folder", ["/opt/dist-packages", "/opt/keras"])
def test_a_warning_points_to_the_line_of_the_user(folder, monkeypatch):
    """Wherever Keras and other packages, which call ours, are installed."""
    monkeypatch.setattr(keras, "__file__", "/opt/keras/__init__.py")
    package = types.ModuleType("package")
    code = "def call(function, text): function(text)"
    exec(compile(code, f"{folder}/package.py", "exec"), vars(package))
    with pytest.warns(UserWarning, match="tea") as found:
        package.call(lines.warn, "tea")
    assert found[0].filename == __file__
