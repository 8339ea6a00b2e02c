"""`keras-dist bench-collectives` prints a time for each size."""

import re
import sys

import pytest
from launch import launch

from keras_dist import __main__ as command
from keras_dist.tools import bench

_LINE = re.compile(r"(\d+) (B|KiB|MiB) +([\d.]+) ms +([\d.]+) GB/s")


@pytest.mark.parametrize("ranks", [pytest.param(None, marks=pytest.mark.long), 2])
def test_each_size_has_a_line(ranks):
    """Without and under a launcher; larger sizes take longer."""
    module = [sys.executable, "-m", "keras_dist", "bench-collectives"]
    done = launch([*module, "--repetitions", "2"], ranks=ranks, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search("2 ranks, (Gloo|MPI), sums of float32", done.stdout)
    found = _LINE.findall(done.stdout)
    assert len(found) == len(bench.SIZES)
    assert float(found[-1][2]) > float(found[0][2])


@pytest.mark.parametrize("bad", [["-np", "1"], ["--repetitions", "0"]])
def test_too_few_is_an_error(bad, capsys):
    """And nothing is started."""
    assert command.main(["bench-collectives", *bad]) == 1
    assert "Received: -np" in capsys.readouterr().err
