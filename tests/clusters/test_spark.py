"""`keras_dist.spark.run` on a cluster of two executors, which are JVMs of this host."""

import importlib
import sys
import time
import traceback

import calls
import cloudpickle
import numpy as np
import psutil
import pytest
from leftover import left

import keras_dist

pytestmark = pytest.mark.usefixtures("nothing_left")

# A script that says which GPUs an executor has.
_GPUS = """\
#!/bin/sh
echo '{"name": "gpu", "addresses": ["3", "5"]}'
"""


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    """A session of two executors with one core and 1 GiB each."""
    cloudpickle.register_pickle_by_value(calls)
    folder = tmp_path_factory.mktemp("spark")
    found = folder / "gpus"
    found.write_text(_GPUS)
    found.chmod(0o755)
    patch = pytest.MonkeyPatch()
    patch.setenv("PYSPARK_PYTHON", sys.executable)
    patch.setenv("SPARK_WORKER_DIR", str(folder))
    sql = importlib.import_module("pyspark.sql")
    session = (
        sql.SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.worker.resource.gpu.amount", "2")
        .config("spark.worker.resource.gpu.discoveryScript", str(found))
        .config("spark.executor.resource.gpu.amount", "1")
        .config("spark.task.resource.gpu.amount", "1")
        .getOrCreate()
    )
    yield session
    session.stop()
    patch.undo()


def failure_of(error, function, *args, **options):
    """The error that a run raises, with the text of its traceback, and its seconds."""
    begin = time.monotonic()
    with pytest.raises(error) as raised:
        keras_dist.spark.run(function, args, **{"num_proc": 2, **options})
    seconds = time.monotonic() - begin
    return "".join(traceback.format_exception(raised.value)), seconds


def test_training_on_two_executors_gives_the_weights_of_one_process(spark, expected):
    """By default a rank for each core; results in rank order."""
    found = keras_dist.spark.run(calls.train)
    assert [each[:3] for each in found] == [(0, 2, 0), (1, 2, 1)]
    for *_, weights in found:
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)
    assert not left()


def test_each_rank_has_its_gpu_and_threads(spark):
    """As Spark gives them, also in the same Python worker as before."""
    found = keras_dist.spark.run(calls.where, num_proc=2)
    assert [(rank, threads) for rank, *_, threads in found] == [(0, "1"), (1, "1")]
    assert {gpus for *_, gpus, _ in found} <= {"3", "5"}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_a_rank_is_raised_with_its_traceback(spark, rank):
    """While the other one computes; the other one is named, too."""
    text, seconds = failure_of(KeyError, calls.fail, rank)
    assert f"keras-dist: rank {rank} on " in text and "failed first" in text
    assert 'raise KeyError("tea")' in text and "calls.py" in text
    assert f"Rank {1 - rank} on " in text
    assert not left() and seconds < 60


def test_the_exit_of_a_rank_does_not_end_the_driver(spark):
    """It is a `RuntimeError` there."""
    text, _ = failure_of(RuntimeError, calls.leave, 1)
    assert "Rank 1 on " in text and "SystemExit: 3" in text


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        (0, "Rank 1 on {}: was ended by SIGKILL"),
        (1, "the Spark task of rank 1 on {} has lost its agent"),
        (2, "the Spark task of rank 1 on {} was killed"),
    ],
)
def test_a_process_that_is_killed_is_named(spark, generation, named):
    """A rank, its agent, and its task; the other rank is ended within seconds."""
    text, seconds = failure_of(RuntimeError, calls.kill, 1, generation)
    host = spark.sparkContext.getConf().get("spark.driver.host")
    assert named.format(host) in text
    assert not left() and seconds < 60


def test_an_executor_that_is_killed_is_named(spark):
    """The JVM, with a SIGKILL; Spark starts another one for the next call."""

    def kill_executor():
        keras_dist.sum(1.0)
        if keras_dist.rank() == 1:
            process = psutil.Process()
            while "java" not in process.name():
                process = process.parent()
            process.kill()
        time.sleep(300)

    text, seconds = failure_of(RuntimeError, kill_executor)
    assert "the Spark task of rank 1 on " in text
    assert seconds < 90
    assert [rank for rank, *_ in keras_dist.spark.run(calls.where, num_proc=2)] == [
        0,
        1,
    ]


def test_too_few_cores_are_an_error(spark):
    """All tasks of a barrier stage run at once."""
    text, seconds = failure_of(TimeoutError, calls.where, num_proc=9, start_timeout=3)
    assert "9 tasks" in text and "2 cores" in text
    assert seconds < 40


def test_what_a_rank_has_started_ends_with_it(spark):
    """Daemons, too."""
    keras_dist.spark.run(calls.remain, num_proc=1)
    assert not left()


def test_no_session_is_an_error(monkeypatch):
    """Which says how to make one."""
    context = importlib.import_module("pyspark").SparkContext
    monkeypatch.setattr(context, "_active_spark_context", None)
    with pytest.raises(RuntimeError, match="no active Spark session"):
        keras_dist.spark.run(calls.where, num_proc=2)
