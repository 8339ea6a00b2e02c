"""What `keras_dist.horovod` does beside `tests/horovod_scripts/`.

Those compare gradients, rates, metrics and weights with Horovod on Keras 2. Here are
errors, state, files, and what Horovod itself cannot do.
"""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_close,
    assert_equal_to_the_bit,
    assert_same_bits,
    state_of,
)
from harness.models import all_in_precision

import keras_dist
import keras_dist.horovod as hvd

# On three ranks, all of them with LONG_TESTS=1, and those that are marked always.
_IS_LONG = os.environ.get("LONG_TESTS")
pytestmark = pytest.mark.three_ranks if _IS_LONG else pytest.mark.several_ranks


def make(seed=3):
    """A small model that is built."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *layers])


def wrap_sgd(rate, **options):
    """An SGD that averages as Horovod's optimizers do."""
    return hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options)


def make_rows(rank, count=24):
    """Rows of one rank."""
    x = np.random.default_rng(rank).normal(size=(count, 5)).astype("float32")
    return x, x.sum(axis=1, keepdims=True).astype("float32")


def fit(model, **arguments):
    """Train on this rank's rows as a script of Horovod does."""
    given = {"batch_size": 8, "shuffle": False, "verbose": 0}
    return model.fit(*make_rows(hvd.rank()), **given | arguments)


def compile_and_fit(model, optimizer, *, compiled=(), **arguments):
    """The same after `compile`; eagerly, unless `compiled` says else."""
    model.compile(optimizer, **{"loss": "mse", "run_eagerly": True} | dict(compiled))
    return fit(model, **arguments)


def test_an_inf_is_forgotten_after_its_update():
    """It is in the sum of one update, and not in the next one's."""
    weight = keras.Variable([1.0, 1.0])
    optimizer = wrap_sgd(0.1, backward_passes_per_step=2)
    for gradient in ([np.inf, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]):
        optimizer.apply([tf.constant(gradient)], [weight])
    assert not np.isfinite(weight.numpy()[0])
    np.testing.assert_allclose(weight.numpy()[1], 0.8, rtol=1e-6)


def test_gradients_of_a_tape_are_added_like_others():
    """An update after every second batch on any number of ranks; none is sent twice."""
    weight = keras.Variable([0.0])
    optimizer = wrap_sgd(1.0, op=hvd.Sum, backward_passes_per_step=2)
    values = []
    for step in range(1, 5):
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            loss = weight[0] * float(step * (hvd.rank() + 1))
        optimizer.apply(tape.gradient(loss, [weight]), [weight])
        values.append(float(weight.numpy()[0]))
    ranks = hvd.size() * (hvd.size() + 1) / 2
    assert values == [0.0, -3 * ranks, -3 * ranks, -10 * ranks]


def test_an_optimizer_that_clips_clips_the_average_of_the_batches():
    """As its class is Horovod's, too, which averages in `apply_gradients`."""

    class Clips(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            pairs = [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in grads_and_vars]
            return super().apply_gradients(pairs)

    for passes, expected in ((1, -2.5), (2, -2.0)):
        weight = keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(
            Clips(1.0), op=hvd.Sum, backward_passes_per_step=passes
        )
        for of_all in (4.0, 0.5, 1.0, 8.0):
            gradient = of_all / hvd.size() + (hvd.rank() - (hvd.size() - 1) / 2)
            optimizer.apply_gradients([(tf.constant([gradient]), weight)])
        np.testing.assert_allclose(weight.numpy(), [expected - (passes == 1)])


def test_sparse_gradients_of_batches_are_added():
    """Without `sparse_as_dense`, which Horovod needs for it."""
    table = keras.Variable(np.zeros((3, 2), "float32"))
    optimizer = wrap_sgd(1.0, backward_passes_per_step=2)
    for row in (0, 2):
        values = tf.fill([2, 2], float(hvd.rank()))
        optimizer.apply([tf.IndexedSlices(values, [row, row])], [table])
    expected = -2 * (hvd.size() - 1) / 2
    np.testing.assert_allclose(table.numpy()[:, 0], [expected, 0, expected])


def test_the_optimizer_is_of_its_class_and_its_config_goes_round():
    """An Adam is an Adam, and a copy averages, too."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5, name="mine"))
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert optimizer.__class__.__name__ == "Adam" and optimizer.name == "mine"
    assert float(optimizer.learning_rate) == 0.5
    config = optimizer.get_config()
    copy = type(optimizer).from_config(config)
    assert copy.get_config() == config == optimizer.from_config(config).get_config()
    assert optimizer.__class__.from_config(config).get_config() == config
    weight = keras.Variable([0.0])
    copy = type(keras_sgd := wrap_sgd(1.0))
    copy = copy.from_config(keras_sgd.get_config())
    copy.apply([tf.constant([float(hvd.rank())])], [weight])
    np.testing.assert_allclose(weight.numpy(), [-(hvd.size() - 1) / 2])


def test_dist_fit_takes_an_optimizer_of_this_module():
    """It averages by rows, as with a plain one; batches are not added up twice."""
    given = {"batch_size": 10, "shuffle": False, "verbose": 0}
    models = []
    for wrap in (lambda plain: plain, hvd.DistributedOptimizer):
        models.append(make())
        models[-1].compile(wrap(keras.optimizers.SGD(0.05)), "mse")
        keras_dist.dist_fit(models[-1], *make_rows(0, count=23), **given)
    assert_close(*(model.get_weights() for model in models))
    assert_equal_to_the_bit(models[0])
    summed = wrap_sgd(0.05, backward_passes_per_step=2)
    models[0].compile(summed, "mse")
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        keras_dist.dist_fit(models[0], *make_rows(0), **given)


@pytest.mark.three_ranks
def test_collectives_take_numbers_lists_arrays_tensors_and_variables():
    """A tensor of the same dtype comes back; what Horovod's script has is left out."""
    rank, size = hvd.rank(), hvd.size()
    mean = (size - 1) / 2
    assert hvd.allreduce(np.float64(rank), name="score").dtype == tf.float64
    assert int(hvd.allreduce(rank, average=False)) == size * (size - 1) // 2
    assert int(hvd.allreduce(rank, False)) == size * (size - 1) // 2
    variable = keras.Variable([float(rank)])
    assert hvd.allreduce(variable, op=hvd.Max).numpy().tolist() == [size - 1.0]
    assert float(hvd.allreduce(2.0, op=hvd.Product)) == 2.0**size
    half = hvd.allreduce([1 / 3], compression=hvd.Compression.fp16)
    np.testing.assert_allclose(half, [1 / 3], rtol=1e-3)
    large = hvd.allreduce(tf.constant([1_500_000_000], tf.int32))  # not summed in int32
    assert large.dtype == tf.int32 and large.numpy().tolist() == [1_500_000_000]
    assert [float(x) for x in hvd.grouped_allreduce([1.0, float(rank)])] == [1, mean]
    lengths = [len(rows) for rows in hvd.grouped_allgather([[1], [1, 2]])]
    assert lengths == [size, 2 * size]
    rows = np.arange(size * 2, dtype="float32")
    half = hvd.grouped_reducescatter([rows], compression=hvd.Compression.fp16)
    assert half[0].numpy().tolist() == [2 * rank, 2 * rank + 1]
    with pytest.raises(ValueError, match="replaces `average`"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)


def test_what_is_horovods_own_is_there_or_an_error_says_how_to_install_it():
    """Over TensorFlow's collectives `alltoall`, process sets and the timeline."""
    rank, size = hvd.rank(), hvd.size()
    if "TensorFlow" in keras_dist.comm.transport_name():
        for name in ("alltoall", "join", "ProcessSet", "start_timeline"):
            with pytest.raises(RuntimeError, match="keras-dist install-horovod"):
                getattr(hvd, name)
        with pytest.raises(RuntimeError, match="no process sets.*install-horovod"):
            hvd.allreduce(1.0, process_set=[0])
    elif size > 1:
        rows = hvd.alltoall(tf.constant([[rank, other] for other in range(size)]))
        assert rows.numpy().tolist() == [[other, rank] for other in range(size)]


def test_horovods_numbers_of_operations_are_taken():
    """Average is 0, Sum 1, Min 3, …, as in Horovod."""
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    assert [getattr(hvd, name) for name in names] == list(range(6))
    rows = np.ones(hvd.size(), "float32")
    assert hvd.reducescatter(rows, op=1).numpy().tolist() == [hvd.size()]
    for op in (6, -1, True, "sum"):
        with pytest.raises(ValueError, match="`op` must be"):
            hvd.allreduce(1.0, op=op)


def test_collectives_work_in_a_graph():
    """And where the names of the layers differ."""

    @tf.function
    def graph(x):
        return hvd.allreduce(x), hvd.broadcast(x, 0), hvd.allgather(x)

    mean, first, everyone = graph(tf.constant([float(hvd.rank())]))
    assert float(mean[0]) == (hvd.size() - 1) / 2
    assert float(first[0]) == 0 and everyone.shape[0] in (None, hvd.size())


@pytest.mark.several_ranks
def test_a_mismatch_is_an_error_and_not_a_hang():
    """Different shapes, collectives, variables and logs; models before a broadcast."""
    with pytest.raises(ValueError, match="allreduce of float32 .2,."):
        hvd.allreduce(np.zeros(2 + hvd.rank(), "float32"))
    with pytest.raises(ValueError, match="allreduce of .* broadcast of|broadcast of"):
        hvd.allreduce(1.0) if hvd.rank() else hvd.broadcast(1.0, 0)
    with pytest.raises(ValueError, match="reducescatter of float32 .4,."):
        hvd.reducescatter(np.zeros(4 + hvd.rank(), "float32"))
    with pytest.raises(ValueError, match="disagree on the collective"):
        hvd.allgather_object(1) if hvd.rank() else hvd.broadcast_object(1, 0)
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched"):
        hvd.broadcast(1.0, hvd.rank())
    with pytest.raises(ValueError, match="disagree on"):
        hvd.broadcast_variables([keras.Variable(1.0)], hvd.rank())
    with pytest.raises(ValueError, match="disagree on"):
        hvd.broadcast_variables([keras.Variable(np.zeros(2 + hvd.rank()))], 0)
    average = hvd.callbacks.MetricAverageCallback()
    with pytest.raises(ValueError, match="names in the logs"):
        average.on_epoch_end(0, {"loss": 1.0, "lr": 1.0} if hvd.rank() else {"loss": 1})
    layers = [keras.layers.Dense(4), keras.layers.Dense(1)][hvd.rank() and 1 :]
    model = keras.Sequential([keras.Input((5,)), *layers])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ValueError, match="number of variables"):
        compile_and_fit(model, keras.optimizers.SGD(), callbacks=[callback])


@pytest.mark.over_horovod
def test_what_would_make_the_ranks_differ_is_an_error():
    """Of an optimizer, a tape and a callback; it says what to do."""
    some = hvd.ProcessSet([0])
    optimizer, tape = keras.optimizers.SGD(), tf.GradientTape()
    for make_one in (
        lambda **options: hvd.DistributedOptimizer(optimizer, **options),
        lambda **options: hvd.DistributedGradientTape(tape, **options),
    ):
        with pytest.raises(ValueError, match="hvd.Adasum weighs.*op=hvd.Average"):
            make_one(op=hvd.Adasum)
        with pytest.raises(ValueError, match="All ranks train one model.*Leave it out"):
            make_one(process_set=some)
        make_one(process_set=hvd.global_process_set)
    with pytest.raises(ValueError, match="All ranks train one model"):
        hvd.callbacks.MetricAverageCallback(process_set=some)
    with pytest.raises(ValueError, match="local_variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", [keras.Variable(1.0)])


@pytest.mark.parametrize(
    ("is_built", "is_plain"), [(True, False), (False, False), (True, True)]
)
def test_all_ranks_start_equal_before_the_first_step(is_built, is_plain):
    """From the root's weights, also where the first batch has to build the model.

    An optimizer that is not of Horovod is broadcast, too.
    """
    root = hvd.size() - 1
    keras.utils.set_random_seed(3 + (hvd.rank() != root))
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([*([keras.Input((5,))] if is_built else []), *layers])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root)
    if is_plain:
        optimizer = keras.optimizers.Adam(0.0)
    else:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    compiled = {"run_eagerly": is_built}
    compile_and_fit(model, optimizer, callbacks=[callback], compiled=compiled)
    if is_plain:
        assert_same_bits(model.get_weights(), make(3).get_weights())
    else:
        assert_equal_to_the_bit(model)
    assert type(model) is keras.Sequential and callback.broadcast_done


def test_an_old_argument_of_compile_is_left_out_with_a_warning():
    """`experimental_run_tf_function=False`, also by a subclass of a model."""
    model = make()
    with pytest.warns(UserWarning, match="experimental_run_tf_function") as caught:
        model.compile("sgd", "mse", experimental_run_tf_function=False)
    assert len(caught) == 1 and model.compiled
    assert caught[0].filename == __file__


def test_callback_lists_may_differ_and_one_rank_may_save_and_evaluate(tmp_path):
    """The first rank has a checkpoint and evaluates; then all resume from it."""
    file = hvd.broadcast_object(tmp_path / "checkpoint-{epoch}.keras", 0)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    model = make(3 + hvd.rank())
    compiled = {"metrics": ["mae"], "run_eagerly": True}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(str(file)))
    compile_and_fit(model, optimizer, compiled=compiled, epochs=2, callbacks=callbacks)
    if hvd.rank() == 0:
        assert len(model.evaluate(*make_rows(0), verbose=0)) == 2
    epoch = hvd.broadcast(2 if hvd.rank() == 0 else 0, 0, name="resume_from_epoch")
    # As in Horovod's example for ImageNet: one rank loads, the others make a model.
    if hvd.rank() == 0:
        resumed = hvd.load_model(str(file).format(epoch=2))
        resumed.run_eagerly = True  # a file does not say it
    else:
        resumed = make(9)
        again = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        resumed.compile(again, "mse", metrics=["mae"], run_eagerly=True)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    fit(resumed, callbacks=callbacks, initial_epoch=int(epoch), epochs=4)
    fit(model, initial_epoch=2, epochs=4)
    assert_close(resumed.get_weights(), model.get_weights())
    assert_equal_to_the_bit(resumed)


def test_a_loaded_model_keeps_its_state(tmp_path):
    """To the bit; an HDF5 file has no state that Keras restores."""
    file = str(tmp_path / "model.keras")
    model = make()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    compile_and_fit(model, optimizer, compiled={"metrics": ["mae", "mse"]})
    keras.saving.save_model(model, file)
    loaded = hvd.load_model(file, compression=hvd.Compression.none)
    assert loaded.optimizer.__class__ is keras.optimizers.Adam
    assert_same_bits(state_of(loaded), state_of(model))
    plain = keras.models.load_model(file, compile=False)
    assert len(plain.weights) == 4
    plain.save(tmp_path / "model.h5")
    with pytest.raises(ValueError, match="HDF5 file.*model.h5.*model.keras"):
        hvd.load_model(tmp_path / "model.h5")


def test_a_custom_optimizer_is_loaded(tmp_path):
    """`custom_optimizers`, and `custom_objects` for a loss."""

    class Halved(keras.optimizers.SGD):
        """An SGD of the user's."""

    def my_loss(y, prediction):
        return keras.ops.mean(keras.ops.square(y - prediction))

    file = str(tmp_path / "model.keras")
    model = make()
    optimizer = hvd.DistributedOptimizer(Halved(0.1))
    compile_and_fit(model, optimizer, compiled={"loss": my_loss})
    keras.saving.save_model(model, file)
    objects = {"my_loss": my_loss}
    loaded = hvd.load_model(file, custom_optimizers=[Halved], custom_objects=objects)
    assert isinstance(loaded.optimizer, Halved)
    loaded.run_eagerly = True
    fit(loaded)


@pytest.mark.several_ranks
def test_mixed_precision_averages_in_the_outermost_optimizer():
    """An inf on one rank is one for all; nobody waits."""
    model = all_in_precision("mixed_float16")
    optimizer = wrap_sgd(0.01)
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = (array / 10 for array in make_rows(hvd.rank()))  # else all overflow
    if hvd.rank() == 0:
        x[0] = np.inf
    scale = float(model.optimizer.initial_scale)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_equal_to_the_bit(model)
    assert float(model.optimizer.dynamic_scale) == scale / 2
    assert int(model.optimizer.iterations) == 2


def test_an_outermost_optimizer_keeps_its_own_passes():
    """Where one inside of it is Horovod's, too."""
    inner = wrap_sgd(1.0)
    outer = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner), backward_passes_per_step=2
    )
    model = make()
    model.compile(outer, "mse")
    before = model.get_weights()
    model.fit(*make_rows(hvd.rank(), count=8), batch_size=8, verbose=0)
    assert_same_bits(before, model.get_weights())


def test_mixed_precision_does_not_add_gradients_of_a_tape_again():
    """The outermost optimizer sees that they are reduced."""
    model = all_in_precision("mixed_float16")
    model.compile(wrap_sgd(1.0, op=hvd.Sum))
    weight = keras.Variable([0.0])
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
        loss = model.optimizer.scale_loss(weight[0] * float(hvd.rank() + 1))
    model.optimizer.apply(tape.gradient(loss, [weight]), [weight])
    assert float(weight.numpy()[0]) == -hvd.size() * (hvd.size() + 1) / 2


def test_a_tape_keeps_the_structure():
    """Of the sources, whatever it is."""
    rank, size = hvd.rank(), hvd.size()
    a, b = keras.Variable(2.0), tf.Variable(3.0)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        target = a * b * float(rank)
    found = tape.gradient(target, {"a": a, "b": b})
    assert float(found["a"]) == pytest.approx(3.0 * (size - 1) / 2)
    assert float(found["b"]) == pytest.approx(2.0 * (size - 1) / 2)
    assert float(tape.gradient(target, a)) == pytest.approx(3.0 * (size - 1) / 2)


def test_synchronized_batch_normalization_cannot_be_fused():
    """And its config goes round."""
    config = hvd.SyncBatchNormalization().get_config()
    assert hvd.SyncBatchNormalization.from_config(config).get_config() == config
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
