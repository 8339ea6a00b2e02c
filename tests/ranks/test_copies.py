"""Where each host has a folder of its own, each keeps all checkpoints.

A rank is a host here: each runs in a folder of its own, so that `resume="kept"` is
another one for each.
"""

import hashlib
import os
import random
import resource
import shutil
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from resumable import NUM_ROWS, rows_of_all, train, values_of
from test_resume import BATCH, Killed, die, is_same

import keras_dist
from keras_dist.checkpoint import files, newest
from keras_dist.checkpoint.files import Folder
from keras_dist.checkpoint.lock import FolderLock
from keras_dist.checkpoint.newest import Copies, find_copies, read_newest
from keras_dist.checkpoint.saved import Saved

pytestmark = pytest.mark.several_ranks

KEPT = "kept"


@pytest.fixture
def top(tmp_path_factory, monkeypatch):
    """A folder that all ranks see, with one for each rank, in which it runs."""
    top = Path(keras_dist.broadcast(str(tmp_path_factory.mktemp("copies"))))
    own = top / str(keras_dist.rank())
    own.mkdir()
    monkeypatch.chdir(own)
    # Several messages for a small file, and no waits for a slow network.
    monkeypatch.setattr(newest, "_PIECE_BYTES", 1000)
    return top


def contents(folder=KEPT):
    """Names and checksums of what is in a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).glob("*"))
    }


def lose(rank):
    """The disk of a rank is lost."""
    keras_dist.gather("all have written")
    if keras_dist.rank() == rank:
        shutil.rmtree(KEPT)
    keras_dist.gather("lost")


def ranks_that(condition):
    """The ranks on which something is true, on all ranks."""
    return [rank for rank, own in enumerate(keras_dist.gather(condition)) if own]


def test_a_training_goes_on_to_the_bit_when_the_first_disk_is_lost(top):
    """In the middle of an epoch; every folder has the same files, before and after."""
    sizes = {"batch_size": BATCH, "epochs": 2, "saw": lambda *_: None}
    expected, history = train(f"{top}/whole", **sizes)
    size = keras_dist.size()
    dies = -(-NUM_ROWS // (BATCH * size)) + 3
    with pytest.raises(Killed):
        train(KEPT, dies=dies, die=die, seed=100, save_steps=2, **sizes)
    assert len({max(own.items()) for own in keras_dist.gather(contents())}) == 1
    lose(0)
    state, resumed = train(KEPT, seed=77, **sizes)
    assert is_same(state, expected) and values_of(resumed) == values_of(history)
    assert len({max(own.items()) for own in keras_dist.gather(contents())}) == 1


def small(**options):
    """A quick fit with a callback that only the first rank runs; that callback."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    best = keras.callbacks.ModelCheckpoint(
        "best.keras", monitor="loss", save_best_only=True
    )
    given = {"batch_size": 10, "verbose": 0, "epochs": 2, "resume": KEPT} | options
    given["callbacks"] = [best, *given.get("callbacks", [])]
    x, y = rows_of_all()
    keras_dist.dist_fit(model, x / NUM_ROWS, y, **given)
    return best.best


def test_what_callbacks_of_the_first_rank_remember_is_on_every_host(top):
    """It is in all files, though the other ranks do not run them."""
    best = small(epochs=2)
    lose(0)
    again = small(epochs=2)  # no epoch is left
    assert again == best or keras_dist.rank() != 0


def write(folder, number, begun, is_damaged=False, fork=0):
    """A checkpoint with its own numbers as content; those before it stay."""
    folder.keep, folder.number = 99, number - 1
    tree = {"value": [number, begun, fork], "array": np.full(500, number)}
    path = folder.write(tree | ({"begun": begun} if begun else {}))
    if is_damaged:
        os.truncate(path, 3000)


def brought(layout):
    """What all ranks resume from, its host, and the warnings of this rank.

    All folders have it then.

    Args:
        layout: For each rank the arguments of `write` for each of its files.
    """
    shutil.rmtree(KEPT, ignore_errors=True)
    folder, rank = Folder(os.path.abspath(KEPT)), keras_dist.rank()
    folder.prepare()
    for file in layout[rank]:
        write(folder, *file)
    ranks = tuple(range(keras_dist.size()))
    folder = Folder(folder.path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tree, host = read_newest(folder, Copies(ranks, ("a", "b", "c")[: len(ranks)]))
    value = keras_dist.broadcast(None if tree is None else tree["value"])
    if value is not None:
        own = contents()[os.path.basename(folder.file(value[0]))]
        found, _ = Folder(folder.path).find(lambda path: files.read(path)["value"])
        assert found == value and folder.number == value[0]
        assert len({*keras_dist.gather(own)}) == 1
    return value, host, [str(w.message) for w in caught]


@pytest.mark.three_ranks
def test_the_newest_whole_checkpoint_of_all_hosts_wins(top):
    """Damaged on one host, older on another, and none on a third."""
    old, damaged, newer = (4, 1.0), (5, 1.0, True), (5, 1.0)
    value, host, said = brought([[old, damaged], [old], []])
    assert value == [4, 1.0, 0] and host == ("a" if keras_dist.size() > 2 else "")
    assert [text for text in said if "an older one is used" in text] == said
    assert ranks_that(bool(said)) == [0]
    value, host, said = brought([[old, damaged], [old, newer], []])
    assert (value, host) == ([5, 1.0, 0], "b")
    assert [text for text in said if "that of another host is used" in text] == said
    assert ranks_that(bool(said)) == [0]


@pytest.mark.three_ranks
def test_hosts_that_went_on_apart_go_on_from_one_of_them(top):
    """The same number with other content: that of the lowest rank is sent to all."""
    apart = [[(3, 1.0, False, rank)] for rank in range(keras_dist.size())]
    assert brought(apart)[:2] == ([3, 1.0, 0], "a")


@pytest.mark.three_ranks
def test_a_host_that_was_away_with_an_earlier_training_does_not_win(top):
    """Even with a higher number; files of earlier versions have no time at all."""
    for earlier in (1.0, 0):
        value, host, _ = brought([[(8, earlier), (9, earlier)], [(2, 7.0)], []])
        assert (value, host) == ([2, 7.0, 0], "b")
        assert list(contents()) == ["checkpoint-00000002.keras_dist"]


@pytest.mark.three_ranks
def test_random_files_on_random_hosts_are_chosen_as_by_the_rule(top):
    """The rule: of what is newest and whole on each host, by training and number."""
    choose = random.Random(5)
    for _ in range(20):
        layout = [
            [
                (number, choose.choice([1, 3]) if number < 3 else 3, is_damaged)
                for number in range(1, 6)
                for is_damaged in [choose.random() < 0.4]
                if choose.random() < 0.5
            ]
            for _ in range(keras_dist.size())
        ]
        whole = [
            max((file for file in own if not file[2]), default=None) for own in layout
        ]
        found = [(begun, number) for number, begun, _ in filter(None, whole)]
        if any(layout) and not found:
            with pytest.raises(ValueError, match="No checkpoint in the folder can be"):
                brought(layout)
            continue
        begun, number = max(found, default=(None, None))
        assert brought(layout)[0] == ([number, begun, 0] if found else None), layout


@pytest.mark.three_ranks
@pytest.mark.parametrize("groups", [(0, 0, 0), (0, 1, 2), (0, 0, 2), (0, 1, 1)])
def test_one_rank_writes_to_each_folder(top, groups):
    """Folders of the same name, some of which are one on a common disk."""
    groups = groups[: keras_dist.size()]
    own = top / f"group{groups[keras_dist.rank()]}"
    own.mkdir(exist_ok=True)
    Path(KEPT).symlink_to(own)
    copies = find_copies(Folder(os.path.abspath(KEPT)))
    assert copies.ranks == tuple(sorted(set(groups)))
    assert len(copies.hosts) == len(copies.ranks)
    keras_dist.gather("found")
    assert list(own.iterdir()) == []


def test_a_folder_that_another_job_uses_on_one_host_is_an_error_on_all(top):
    """It names that process; the folders of the others are given back."""
    last = keras_dist.size() - 1
    os.makedirs(KEPT)
    lock = FolderLock(os.path.abspath(KEPT))
    if keras_dist.rank() == last:
        lock.take()
    pid = keras_dist.gather(os.getpid())[last]
    keras_dist.gather("locked")
    with pytest.raises(RuntimeError, match=f"Another training .* by process {pid} on"):
        small()
    assert ranks_that(os.path.exists(lock.path)) == [last]
    lock.release()
    keras_dist.gather("free")
    small()


def test_a_host_that_cannot_write_is_an_error_on_all_ranks(top):
    """Before training: no folder can be made there, or what it lacks does not fit."""
    last = keras_dist.size() - 1
    if keras_dist.rank() == last:
        Path(KEPT).touch()
    with pytest.raises(RuntimeError, match=r"(?s)Checkpoints cannot be.*File exists"):
        small()
    if keras_dist.rank() == last:
        os.remove(KEPT)
    small(epochs=1)
    lose(0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if keras_dist.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RuntimeError, match="(?s)Checkpoints cannot.*too large"):
            small()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert keras_dist.rank() or os.listdir(KEPT) == []
    small()
    assert keras_dist.gather(contents()) == [contents()] * keras_dist.size()


class Fills(keras.callbacks.Callback):
    """From the second epoch on the disk of one rank is full: no file may grow."""

    def on_epoch_begin(self, epoch, logs=None):
        """When the first epoch is saved there."""
        if epoch == 1 and keras_dist.rank() == keras_dist.size() - 1:
            while not any(Path(KEPT).glob("checkpoint-*")):
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def test_a_disk_that_fills_up_on_one_host_costs_no_step(top):
    """The first rank warns of it; the training ends, and goes on from the others."""
    last = keras_dist.size() - 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            small(epochs=4, callbacks=[Fills()])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    messages = [str(w.message) for w in caught if "too large" in str(w.message)]
    assert ranks_that(bool(messages)) == sorted({0, last})
    assert all(f"on host {os.uname().nodename}: " in text for text in messages)
    numbers = keras_dist.gather(sorted(contents()))
    assert len(numbers[last]) == 1 and len(numbers[0]) == 2
    small(epochs=4)
    assert len({max(each.items()) for each in keras_dist.gather(contents())}) == 1


def test_a_file_of_before_has_no_time_of_its_training():
    """It is older than any other."""
    names = ("position", "seed", "is_finished", "rates", "warmup_steps", "callbacks")
    fields = dict.fromkeys([*names, "ranks", "model", "arrays"])
    assert Saved(**fields).begun == 0.0
