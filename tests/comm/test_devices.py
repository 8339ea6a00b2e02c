"""A rank gets whole cores, in one NUMA node where they fit, or what the user set."""

import itertools

import pytest
from harness.forked import alone

from keras_dist.comm.devices import share_cpus


def make_topology(folder, nodes):
    """Write what the kernel shows in /sys/devices/system/cpu.

    Args:
        folder: Where to write it.
        nodes: For each NUMA node its cores, each the CPUs that are its threads.
    """
    for number, cores in enumerate(nodes):
        for core in cores:
            for cpu in core:
                topology = folder / f"cpu{cpu}" / "topology"
                topology.mkdir(parents=True)
                text = ",".join(map(str, core))
                (topology / "thread_siblings_list").write_text(f"{text}\n")
                (folder / f"cpu{cpu}" / f"node{number}").mkdir()
    return folder


# A socket with 4 cores of 2 threads; two such sockets; two of 3 cores without threads.
ONE = [[(0, 4), (1, 5), (2, 6), (3, 7)]]
TWO = [[(0, 8), (1, 9), (2, 10), (3, 11)], [(4, 12), (5, 13), (6, 14), (7, 15)]]
ODD = [[(0,), (2,), (4,)], [(1,), (3,), (5,)]]
HYBRID = [[(0, 1), (2, 3), (4,), (5,)]]  # cores of two kinds

ALL, EIGHT = None, set(range(8))


@pytest.mark.parametrize(
    ("nodes", "cpus", "num_cpus", "shares"),
    [
        (ONE, ALL, 8, [EIGHT]),
        (ONE, ALL, 8, [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        (ONE, ALL, 8, [{0, 4}, {1, 5}, {2, 6}]),  # one is left over
        (ONE, ALL, 8, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (ONE, ALL, 8, [EIGHT] * 5),  # no thread of a core that another rank uses
        (TWO, ALL, 16, [{0, 8, 1, 9, 2, 10, 3, 11}, {4, 12, 5, 13, 6, 14, 7, 15}]),
        (TWO, ALL, 16, [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}]),
        (ODD, ALL, 6, [{0, 2, 4}, {1, 3, 5}]),
        (ODD, ALL, 6, [{0, 2}, {1, 3}, {4, 5}]),  # the last one fits in no node
        (HYBRID, ALL, 6, [{0, 1, 2, 3}, {4, 5}]),
        # Masks of a launcher, each on cores of its own: they stay.
        (ONE, [{0, 4}, {1, 5}, {2, 6}, {3, 7}], 8, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (ONE, [{0, 1, 4, 5}, {2, 3, 6, 7}], 8, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (ONE, [{0}, {4}], 8, [{0}, {4}]),
        (ONE, [{1}], 8, [{1}]),
        # A container, half of a host without one, and some threads of cores.
        (ONE, [{0, 1, 4, 5}] * 2, 4, [{0, 4}, {1, 5}]),
        (ONE, [{0, 1, 2, 3}] * 4, 8, [{0}, {1}, {2}, {3}]),
        (ONE, [{1, 2, 5}] * 2, 3, [{1, 5}, {2}]),
        (ONE, [{1, 2, 5}] * 3, 3, [{1, 2, 5}] * 3),
        (None, [{0, 1, 2}] * 3, 3, [{0}, {1}, {2}]),  # the kernel says nothing
    ],
)
def test_ranks_share_the_cores(tmp_path, nodes, cpus, num_cpus, shares):
    """With a thread for each CPU of the smallest share, or fewer where they overlap."""
    folder = make_topology(tmp_path, nodes or [])
    size = len(shares)
    for rank, expected in enumerate(shares):
        found, threads = share_cpus(
            cpus[rank] if cpus else range(num_cpus),
            local_rank=rank,
            local_size=size,
            num_cpus=num_cpus,
            folder=folder,
        )
        assert found == expected
        is_alone, least = shares.count(expected) == 1, min(map(len, shares))
        assert threads == (least if is_alone else max(1, len(found) // size))


@pytest.mark.parametrize(
    "counts", itertools.combinations_with_replacement((1, 2, 5), 3)
)
def test_no_core_has_two_ranks_and_few_ranks_have_two_nodes(tmp_path, counts):
    """On three nodes of so many cores, whose CPUs the kernel numbers in turn."""
    total = sum(counts)
    cpus = iter(range(total))
    cores = [[(cpu := next(cpus), cpu + total) for _ in range(n)] for n in counts]
    folder = make_topology(tmp_path, cores)
    for size in range(2, total + 1):
        each = total // size
        common = {"local_size": size, "num_cpus": 2 * total, "folder": folder}
        shares = [
            share_cpus(range(2 * total), local_rank=rank, **common)[0]
            for rank in range(size)
        ]
        assert sum(map(len, shares)) == len(set().union(*shares)) == 2 * each * size
        assert all(cpu in own for own in shares for cpu in (c % total for c in own))
        across = sum(
            sum(any(set(core) <= own for core in node) for node in cores) > 1
            for own in shares
        )
        assert across == max(0, size - sum(n // each for n in counts))


_CHOOSE = """
import os, warnings
import tensorflow as tf
from keras_dist.comm.devices import choose_device, share_cpus
from keras_dist.comm.world import World

every, environ = os.sched_getaffinity(0), dict(os.environ)
count, some = len(every), {min(every)}


def check(world, threads, cpus, *, mask=every, chosen=0, is_binding=True, **variables):
    os.sched_setaffinity(0, mask)
    tf.config.threading.set_intra_op_parallelism_threads(chosen)
    tf.config.threading.set_inter_op_parallelism_threads(0)
    os.environ.update(variables)
    device = choose_device(world, is_binding=is_binding)
    for name in variables:
        del os.environ[name]
    found = device.threads, os.sched_getaffinity(0)
    assert found == (threads, cpus), (world, variables, found)
    text = f"CPU, {threads} thread" if threads else "CPU"
    assert str(device).startswith(text)


def world(rank, size):
    return World(rank, size, rank, size)


many, two = world(0, count + 1), [world(rank, 2) for rank in range(2)]
check(World(), count, every)
check(World(0, 2), count, every)  # alone on its host
check(World(0, 2), 1, every, KERAS_DIST_THREADS="1")  # as many as on the other one
check(many, 1, every)
check(two[0], 3, every, chosen=3)
for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
    check(two[0], 0, every, **{name: "3"})
if count > 1:
    for each in two:
        how = {"local_rank": each.rank, "local_size": 2, "num_cpus": count}
        cpus, threads = share_cpus(every, **how)
        assert threads == len(cpus) < count
        check(each, threads, cpus)
        check(each, threads, every, KERAS_DIST_BIND="0")
        check(each, threads, cpus, is_binding=False, KERAS_DIST_BIND="1")
    check(two[0], 1, some, mask=some, is_binding=False)  # mpirun --bind-to core
os.sched_setaffinity(0, every)
tf.config.threading.set_intra_op_parallelism_threads(0)
tf.constant(1.0) + 1.0
with warnings.catch_warnings(record=True) as found:
    device = choose_device(many, is_binding=True)
if count > 1:
    (warning,) = found
    assert "TensorFlow had already started" in str(warning.message)
    assert f"{count + 1} ranks with {count} threads each" in str(warning.message)
assert device.threads == count
print("all as expected")
"""


def test_a_rank_has_its_share_or_what_the_user_has_set(run_ranks):
    """A table; then TensorFlow has started, which is too late, and no error."""
    [(code, out)] = run_ranks(alone, [0], 1, _CHOOSE)
    assert code == 0 and "all as expected" in out, out
