"""Without a launcher: plain Keras, the same numbers, no Horovod needed."""

import copy
import io
import json
import pickle
import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.launching import launch, write_script

import keras_dist

_WITHOUT_HOROVOD = """
import sys
class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "horovod":
            raise ImportError("no Horovod here")
sys.meta_path.insert(0, Blocks())
import keras_dist; keras_dist.init()
"""

_TOO_LATE = """
import tensorflow as tf
tf.constant(1) + 1
import keras_dist
"""


_REFUSED = """
import keras
plain = keras.backend.backend
keras.backend.backend = lambda: "jax"
try:
    import keras_dist
except ImportError as error:
    print(error)
keras.backend.backend = plain
keras.__version__ = "3.9.2"
import keras_dist
"""

_REPORTS = """
import tensorflow as tf
import keras_dist
print(tf.config.threading.get_intra_op_parallelism_threads())
"""

_SETS = "import tensorflow as tf\ntf.config.threading."
_SETS += f"set_intra_op_parallelism_threads(7)\n{_REPORTS}"

# Each with a generator of its own: forks would have the same.
_DRAWS = """
import numpy as np
if np.random.get_bit_generator().seed_seq is not None:
    np.random.set_bit_generator(np.random.MT19937())
import keras_dist
print(np.random.rand(3).tolist())
"""

_SEEDS = f"import numpy as np\nnp.random.seed(5)\n{_DRAWS}"

_LAUNCHED = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}

_ANOTHER_JOB = {"HOROVOD_GLOO_RENDEZVOUS_PORT": "4712"}

# Of MPICH 4.0, which gives a job no id.
_MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}

# What is run in a new process, and with which variables.
_PROGRAMS = {
    "without Horovod": (_WITHOUT_HOROVOD, _MPICH),
    "refused": (_REFUSED, {}),
    "sets threads": (_SETS, _LAUNCHED),
    "has OpenMP's": (_REPORTS, _LAUNCHED | {"OMP_NUM_THREADS": "3"}),
    "too late": (_TOO_LATE, _LAUNCHED),
    "draws": (_DRAWS, _LAUNCHED),
    "draws on the first rank": (_DRAWS, _LAUNCHED | {"HOROVOD_RANK": "0"}),
    "draws in another job": (_DRAWS, _LAUNCHED | _ANOTHER_JOB),
    "seeds": (_SEEDS, _LAUNCHED),
    "draws by MPICH": (_DRAWS, _MPICH),
    "draws by MPICH on the first rank": (_DRAWS, _MPICH | {"PMI_RANK": "0"}),
}

# Importing TensorFlow takes seconds: one process does it, and forks.
_FORKS = """
import json, os, sys
import keras, tensorflow
for code, environ, path in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environ)
        exec(code, {})
        sys.exit()
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each program has printed before it ended, with its errors."""
    folder = tmp_path_factory.mktemp("programs")
    jobs = [(*each, str(folder / name)) for name, each in _PROGRAMS.items()]
    command = [sys.executable, "-c", _FORKS, json.dumps(jobs)]
    subprocess.run(command, check=True, timeout=120)
    return {name: (folder / name).read_text() for name in _PROGRAMS}


@pytest.fixture
def rows():
    """Rows of a small problem."""
    x = np.random.default_rng(0).normal(size=(50, 4))
    return x, (x.sum(axis=1) > 0).astype("float32")


def make_model(metric="mae"):
    """The same model at every call."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Dense(6, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", metric])
    return model


@pytest.mark.parametrize(
    ("metric", "arguments"),
    [
        ("auc", {"validation_split": 0.2}),
        ("mae", {"batch_size": 8, "steps_per_epoch": 3, "shuffle": "batch"}),
        ("mae", {"class_weight": {0: 1.0, 1: 3.0}, "shuffle": False}),
    ],
)
def test_one_process_is_plain_keras_to_the_bit(rows, metric, arguments):
    """Weights and history of `model.fit`; the throughput is all that is added."""
    expected, model = make_model(metric), make_model(metric)
    plain = expected.fit(*rows, epochs=3, verbose=0, **arguments)
    ours = keras_dist.dist_fit(model, *rows, epochs=3, verbose=0, **arguments)
    np.testing.assert_equal(model.get_weights(), expected.get_weights())
    assert set(ours.history) - set(plain.history) == {"rows_per_second"}
    for name, values in plain.history.items():
        assert ours.history[name] == values
    assert ours.params == plain.params and model.history is ours


def test_a_checkpoint_changes_nothing(rows, tmp_path):
    """Of data in batches, with weights of classes: they count once."""
    data = tf.data.Dataset.from_tensor_slices(rows).batch(8)
    for steps in (None, 4):
        expected, model = make_model(), make_model()
        given = {"epochs": 2, "steps_per_epoch": steps, "verbose": 0}
        given |= {"class_weight": {0: 1.0, 1: 3.0}}
        expected.fit(data, **given)
        keras_dist.dist_fit(model, data, resume=tmp_path / f"{steps}", **given)
        assert np.isfinite(model.get_weights()[0]).all()
        np.testing.assert_equal(model.get_weights(), expected.get_weights())


def test_one_process_is_plain_keras_whatever_is_compiled(rows):
    """Optimizers of every kind, in a graph and in XLA; `evaluate` and `predict` too."""
    x, y = rows
    for make_optimizer in (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    ):
        models = []
        for fit in (keras.Model.fit, keras_dist.dist_fit):
            model = make_model()
            model.compile(make_optimizer(), "mse", metrics=["mae"], jit_compile=False)
            fit(model, x, y, verbose=0, validation_data=rows)
            models.append(model)
        expected, model = models
        numbers = ([v.numpy() for v in each.variables] for each in models)
        np.testing.assert_equal(*numbers)
        many = keras_dist.DistributedModel(model)
        plain = expected.evaluate(x, y, verbose=0, return_dict=True)
        assert many.evaluate(x, y, verbose=0, return_dict=True) == plain
        assert many.evaluate(x, y, 8, 0) == expected.evaluate(x, y, 8, 0)
        ours = many.predict(x, verbose=0)
        assert (ours == expected.predict(x, verbose=0)).all()


def test_one_process_raises_what_keras_raises(rows):
    """The same kind of error, whatever was wrong."""
    x, y = rows
    uncompiled = keras.Sequential([keras.layers.Dense(1)])
    data = tf.data.Dataset.from_tensor_slices(rows).batch(8)
    for model, arguments in (
        (uncompiled, {"x": x, "y": y}),
        (make_model(), {"x": x, "y": y[:-1]}),
        (make_model(), {"x": x[:-1], "y": y}),
        (make_model(), {"x": data, "validation_split": 0.5}),
        (make_model(), {"x": x, "y": y, "validation_split": 1.0}),
        (make_model(), {"x": data, "y": y}),
        (make_model(), {}),
        (make_model(), {"x": x, "y": y, "epochs": "3"}),
    ):
        raised = []
        for fit in (keras.Model.fit, keras_dist.dist_fit):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                fit(model, verbose=0, **arguments)
            raised.append(caught.type)
        assert raised[0] is raised[1], (arguments.keys(), raised)


def test_the_fit_takes_no_random_numbers_and_no_special_terminal(rows, monkeypatch):
    """What the script draws afterwards is what it draws after `model.fit`."""
    drawn = []
    for fit in (keras.Model.fit, keras_dist.dist_fit):
        model = make_model()
        fit(model, *rows, verbose=0)
        drawn.append((random.random(), np.random.random(), tf.random.uniform([])))
    assert drawn[0] == drawn[1]
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    keras_dist.dist_fit(make_model(), *rows, verbose=2)
    ascii_only.seek(0)
    assert "keras_dist" in ascii_only.read()


_ONE_CALLBACK = """
import gc, keras, keras_dist
plain = keras.Model.fit
callback = keras_dist.Throughput()
assert keras.Model.fit is not plain
del callback
gc.collect()
assert keras.Model.fit is plain
"""


def test_model_fit_is_kerass_own_when_no_callback_of_ours_is_left(tmp_path):
    """It opens a fit on all ranks only while one may stand in its list."""
    done = launch([write_script(tmp_path, _ONE_CALLBACK)])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_a_callback_of_ours_outside_of_a_fit_leaves_the_model_plain(rows, name):
    """What it opens for `evaluate` or `predict` ends with the call."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before, data = set(vars(model)), rows[: 2 if name == "evaluate" else 1]
    getattr(model, name)(*data, verbose=0, callbacks=[keras_dist.Throughput()])
    assert "_distributed_session" not in set(vars(model)) - before


def test_on_one_process_shard_changes_nothing():
    """The same data set; wrong arguments are errors all the same."""
    data = tf.data.Dataset.range(5)
    assert data.apply(keras_dist.shard(4)) is data
    with pytest.raises(ValueError):
        keras_dist.shard(["a.jpg"])
    with pytest.raises(TypeError, match="for `tf.data.Dataset.apply`"):
        keras_dist.shard(4)([1, 2])


def test_a_count_that_is_not_a_whole_number_of_at_least_one_is_an_error():
    """Where it is given, and not in the first step."""
    with pytest.raises(ValueError, match="`batch_size` .* whole number of at least 1"):
        keras_dist.shard(0)
    with pytest.raises(ValueError, match="Received: patience=1.5"):
        keras_dist.StopAtAccuracy(0.9, patience=1.5)


def test_a_launcher_without_horovod_is_an_error_that_names_the_command(printed):
    """Each process would otherwise train a model of its own."""
    assert "keras-dist install-horovod" in printed["without Horovod"]
    assert "no Horovod here" in printed["without Horovod"]


def test_threads_are_divided_early_and_never_against_the_users_settings(printed):
    """Too late is a warning; a number of threads that the user has set remains."""
    assert printed["sets threads"].split() == ["7"]
    assert printed["has OpenMP's"].split() == ["0"]
    assert tf.config.threading.get_intra_op_parallelism_threads() == 0  # no launcher
    assert "before the first model or tensor" in printed["too late"]
    assert "Traceback" not in printed["too late"]


def test_the_import_seeds_a_script_that_has_not_done_so(printed):
    """Alike on all ranks, under a launcher that is not ours and cannot seed before."""
    assert printed["draws"] == printed["draws on the first rank"]
    assert printed["draws"] != printed["draws in another job"]
    by_mpich = printed["draws by MPICH"]
    assert by_mpich == printed["draws by MPICH on the first rank"] != ""
    assert printed["seeds"] == f"{np.random.RandomState(5).rand(3).tolist()}\n"


def test_another_backend_and_an_old_keras_are_refused(printed):
    """At the import, and not in the first step."""
    text = printed["refused"]
    assert "needs Keras's TensorFlow backend. Received: the jax" in text
    assert "needs Keras 3.10 or newer. Received: Keras 3.9.2. Run: pip" in text


def test_the_world_is_frozen_and_always_the_same():
    """`init` is idempotent, and its answer cannot be changed."""
    world = keras_dist.init()
    assert world is keras_dist.init() and world == keras_dist.World()
    with pytest.raises(AttributeError):
        world.rank = 3
    assert json.dumps(keras_dist.gather({"a": 1})) == '[{"a": 1}]'
    assert keras_dist.broadcast("x") == "x" and keras_dist.sum([1, 2]) == [1, 2]


def test_a_distributed_model_is_copied_and_pickled():
    """The copy has a model of its own kind, with the same weights and options."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    wrapped = keras_dist.DistributedModel(model, shard="none")
    pickled = pickle.loads(pickle.dumps(wrapped))
    copies = copy.copy(wrapped), copy.deepcopy(wrapped), pickled
    for one in copies:
        assert type(one) is keras_dist.DistributedModel
        assert one.options == {"shard": "none"}
        np.testing.assert_array_equal(one.get_weights()[0], model.get_weights()[0])
    assert copies[0].model is model and copies[1].model is not model
