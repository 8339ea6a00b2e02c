"""`keras_dist.ray.run` on a cluster of two nodes, which are processes of this host."""

import contextlib
import importlib
import re
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import calls
import cloudpickle
import numpy as np
import pytest
from leftover import left

import keras_dist

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def ray():
    """The module `ray`, connected to a cluster of two nodes with two CPUs each."""
    cloudpickle.register_pickle_by_value(calls)
    ray = importlib.import_module("ray")
    make = importlib.import_module("ray.cluster_utils").Cluster
    options = {"num_cpus": 2, "num_gpus": 1, "resources": {"tea": 1}}
    head = {**options, "include_dashboard": False, "resources": {"tea": 1, "cup": 1}}
    cluster = make(initialize_head=True, head_node_args=head)
    cluster.add_node(**options)
    ray.init(address=cluster.address, log_to_driver=True)
    ray.cluster = cluster
    yield ray
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def all_is_free(ray):
    """After each test all resources of the cluster are free again."""
    before = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
    yield
    begin = time.monotonic()
    while time.monotonic() - begin < 30:
        free = ray.available_resources()
        nodes = ray.cluster_resources()
        if all(free.get(name) == nodes.get(name) for name in before):
            break
        time.sleep(0.2)
    assert all(free.get(name) == nodes.get(name) for name in before), (free, nodes)


def failure_of(error, function, *args, **options):
    """The error that a run raises, with the text of its traceback, and its seconds."""
    options = {"num_workers": 2, "resources_per_worker": {"tea": 1}, **options}
    begin = time.monotonic()
    with pytest.raises(error) as raised:
        keras_dist.ray.run(function, args, **options)
    seconds = time.monotonic() - begin
    return "".join(traceback.format_exception(raised.value)), seconds


def test_training_on_two_nodes_gives_the_weights_of_one_process(ray, expected):
    """Each node has one of a resource, so each rank has a node; all in rank order."""
    found = keras_dist.ray.run(
        calls.train, num_workers=2, resources_per_worker={"tea": 1}
    )
    assert [each[:3] for each in found] == [(0, 2, 0), (1, 2, 0)]
    for *_, weights in found:
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)
    assert not left()


def test_each_rank_has_its_gpu_and_threads(ray):
    """As Ray gives them: the first GPU of each node, and as many threads as CPUs."""
    found = keras_dist.ray.run(
        calls.where, num_workers=2, use_gpu=True, resources_per_worker={"CPU": 2}
    )
    assert [(rank, *rest) for rank, _, *rest in found] == [(0, "0", "2"), (1, "0", "2")]
    assert found[0][1] != found[1][1]


def test_ranks_of_a_node_are_numbered_one_after_the_other(ray):
    """Four on two nodes."""
    found = keras_dist.ray.run(calls.where, num_workers=4)
    hosts = [host for _, host, *_ in found]
    assert [rank for rank, *_ in found] == [0, 1, 2, 3]
    assert hosts == sorted(hosts, key=hosts.index) and len(set(hosts)) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_a_rank_is_raised_with_its_traceback(ray, rank):
    """While the other one computes; the other one is named, too."""
    text, seconds = failure_of(KeyError, calls.fail, rank)
    assert f"keras-dist: rank {rank} on " in text and "failed first" in text
    assert 'raise KeyError("tea")' in text and "calls.py" in text
    assert f"Rank {1 - rank} on " in text
    assert not left() and seconds < 60


def test_an_error_that_cannot_be_pickled_is_described(ray):
    """And not that of the rank that waited for it."""
    text, _ = failure_of(RuntimeError, calls.fail_oddly)
    assert "OddError: a riddle" in text and "rank 0 on " in text


def test_the_exit_of_a_rank_does_not_end_the_driver(ray):
    """It is a `RuntimeError` there."""
    text, _ = failure_of(RuntimeError, calls.leave, 1)
    assert "Rank 1 on " in text and "SystemExit: 3" in text


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        (0, "rank 1 on {}: was ended by SIGKILL"),
        (1, "the Ray actor of rank 1 on {} has lost its agent"),
        (2, "the Ray actor of rank 1 on {} "),
    ],
)
def test_a_process_that_is_killed_is_named(ray, generation, named):
    """A rank, its agent, and its actor; the other rank is ended within seconds."""
    begin = time.monotonic()
    text, _ = failure_of(RuntimeError, calls.kill, 1, generation)
    host = ray.nodes()[0]["NodeManagerAddress"]
    assert named.partition("{}")[0].lower() in text.lower() and host in text
    assert named.partition("{}")[2] in text
    assert not left() and time.monotonic() - begin < 60


def test_a_node_that_is_lost_is_named(ray, tmp_path):
    """Its rank, while the rank of another node ends by itself."""
    before = {node["NodeID"] for node in ray.nodes()}
    lost = ray.cluster.add_node(num_cpus=1, resources={"cup": 1})
    ray.cluster.wait_for_nodes()
    (name,) = {node["NodeID"] for node in ray.nodes()} - before

    def remove():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.1)
        ray.cluster.remove_node(lost)

    threading.Thread(target=remove, daemon=True).start()
    text, seconds = failure_of(
        RuntimeError, calls.idle, str(tmp_path), resources_per_worker={"cup": 1}
    )
    assert re.search(rf"the Ray actor of rank \d on \S+-{name[:8]} ", text), text
    assert seconds < 90


def test_a_job_goes_on_with_fewer_and_with_more_workers(ray, tmp_path, capfd):
    """When a node is lost, and when one comes, from the last checkpoint each time."""
    nodes = [ray.cluster.add_node(num_cpus=1, resources={"cup": 1})]
    ray.cluster.wait_for_nodes()

    def there(name):
        while not (tmp_path / name).exists() and not call.done():
            time.sleep(0.1)

    options = {"num_workers": 2, "min_workers": 1, "resources_per_worker": {"cup": 1}}
    with ThreadPoolExecutor() as threads:
        call = threads.submit(
            keras_dist.ray.run, calls.train_on, [str(tmp_path)], **options
        )
        there("0.2")
        with contextlib.suppress(AssertionError):  # one of its processes is a zombie
            ray.cluster.remove_node(nodes.pop())
        there("1.1")
        nodes.append(ray.cluster.add_node(num_cpus=1, resources={"cup": 1}))
        there("2.2")
        (tmp_path / "enough").touch()
        found = call.result()
    ray.cluster.remove_node(nodes.pop())
    (size, epochs, nnodes), other = found
    assert (size, nnodes) == (2, "1:2") and other == found[0]
    assert epochs == list(range(len(epochs)))
    lines = [line for line in capfd.readouterr().err.splitlines() if ": start " in line]
    assert len(lines) == 3, lines
    assert "start 1: 2 ranks on 2 hosts" in lines[0] and "of 1 to 2." in lines[0]
    assert "start 2 (restart 1 of at most 3): " in lines[1]
    assert "1 rank on 1 host" in lines[1] and "before 2 ranks" in lines[1]
    assert "start 3 (restart 1 of at most 3): another worker fits; " in lines[2]


def test_a_failed_call_is_made_again(ray, tmp_path):
    """So often as was asked for; then its error is raised."""
    found = keras_dist.ray.run(calls.fail_at_first, [1], num_workers=1, max_restarts=1)
    assert found == ["1"]
    text, _ = failure_of(KeyError, calls.fail_at_first, 2, max_restarts=1)
    assert 'raise KeyError("tea")' in text


def test_too_few_resources_are_an_error(ray):
    """Which says what there is, and leaves no placement group behind."""
    text, seconds = failure_of(
        TimeoutError, calls.where, num_workers=99, start_timeout=1
    )
    assert "99 workers" in text and "'CPU': 4.0" in text
    assert seconds < 10


def test_what_a_rank_has_started_ends_with_it(ray):
    """Daemons, too."""
    keras_dist.ray.run(calls.remain, num_workers=1)
    assert not left()


def test_no_worker_is_an_error(ray):
    """Before anything is started."""
    for given in ({"num_workers": 0}, {"num_workers": 1, "min_workers": 2}):
        with pytest.raises(ValueError, match="At least one worker is needed"):
            keras_dist.ray.run(calls.where, **given)
