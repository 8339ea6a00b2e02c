"""Files are written whole."""

import pytest

from keras_dist.report import write_whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    """And nothing else is left in its folder."""
    path = tmp_path / "run.json"
    write_whole(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
