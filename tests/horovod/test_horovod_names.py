"""Every symbol of Horovod's Keras modules is there, with Horovod's arguments."""

import inspect

import horovod
import horovod.keras
import horovod.keras.callbacks
import horovod.tensorflow
import horovod.tensorflow.keras
import pytest
from horovod.common.basics import HorovodBasics

import keras_dist.horovod as hvd
from keras_dist.horovod import FROM_HOROVOD

KERAS = horovod.tensorflow.keras
OF_KERAS = [
    name
    for name in sorted(vars(KERAS))
    if not name.startswith("_")
    and callable(getattr(KERAS, name))
    and name not in ("is_version_greater_equal_than",)
]
OWN = [name for name in OF_KERAS if name not in FROM_HOROVOD | {"Compression"}]
OF_TENSORFLOW = [
    *("broadcast_variables", "broadcast_object", "allgather_object", "is_homogeneous"),
    "DistributedGradientTape",
]
CALLBACKS = [
    *("BroadcastGlobalVariablesCallback", "MetricAverageCallback"),
    *("LearningRateScheduleCallback", "LearningRateWarmupCallback"),
]
SYMBOLS = [
    *((KERAS, name, hvd) for name in OWN),
    *((horovod.tensorflow, name, hvd) for name in OF_TENSORFLOW),
    *((KERAS.callbacks, name, hvd.callbacks) for name in CALLBACKS),
]


def parameters(symbol):
    """Name, kind and default of each argument, in order."""
    if symbol in (KERAS.init, KERAS.shutdown):  # are wrapped without their arguments
        symbol = getattr(HorovodBasics, symbol.__name__)
    found = inspect.signature(symbol).parameters.values()
    return [(p.name, p.kind, shown(p.default)) for p in found if p.name != "self"]


def shown(default):
    """A default that can be compared: objects of Horovod by their names."""
    if default is inspect.Parameter.empty:
        return "-"
    for name in ("none", "fp16"):
        for module in (hvd, KERAS):
            if default is getattr(module.Compression, name):
                return f"Compression.{name}"
    if default is horovod.tensorflow.global_process_set:
        return "None"  # all ranks, by default
    return repr(default)


@pytest.mark.parametrize(
    ("theirs", "name", "ours"),
    SYMBOLS,
    ids=lambda value: getattr(value, "__name__", value),
)
def test_arguments_are_horovods(theirs, name, ours):
    """Names, order, kinds and defaults; ours may take more, by name only."""
    expected = parameters(getattr(theirs, name))
    found = [
        p
        for p in parameters(getattr(ours, name))
        if p[1] not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        or p[0] in {n for n, _, _ in expected}
    ]
    known = len(expected)
    assert [p[:2] for p in found[:known]] == [p[:2] for p in expected]
    for own, other in zip(found, expected, strict=False):
        assert own[2] == other[2]
    assert all(default != "-" for _, _, default in found[known:])


# Of `horovod.tensorflow`, for its own files: no script uses them.
INTERNAL = {
    *("check_extension", "split_list", "vars_to_refs", "refs_to_vars"),
    *("get_average_backwards_compatibility_fun", "check_num_rank_power_of_2"),
    *("handle_average_backwards_compatibility", "gpu_available"),
}
# For graphs of TensorFlow 1, and forms of other functions.
OTHER_FORMS = {
    *("BroadcastGlobalVariablesHook", "LocalGradientAggregationHelper"),
    *("size_op", "rank_op", "local_size_op", "local_rank_op"),
    *("process_set_included_op", "broadcast_", "broadcast_object_fn"),
}
# With them the ranks would not hold one model.
NOT_ALIKE = {"DistributedAdasumOptimizer", "PartialDistributedGradientTape"}


def test_names_of_horovod_for_tensorflow_are_there_or_known_to_be_missing():
    """None is forgotten."""
    public = {
        name
        for name, value in vars(horovod.tensorflow).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("horovod")
    }
    known = {*hvd.__all__} | FROM_HOROVOD | INTERNAL | OTHER_FORMS | NOT_ALIKE
    assert public - known == set()


@pytest.mark.parametrize("name", sorted(FROM_HOROVOD))
def test_the_other_names_are_horovods_own(name):
    """Process sets, what it was built with, the timeline: the same objects."""
    assert getattr(hvd, name) is getattr(horovod.tensorflow, name)


def test_every_public_name_is_there():
    """`__all__` is sorted and complete, and has all of Horovod's Keras modules."""
    assert list(hvd.__all__) == sorted(hvd.__all__)
    for name in hvd.__all__:
        assert getattr(hvd, name) is not None
    constants = {"Average", "Sum", "Compression", "Min", "Max", "Product", "Adasum"}
    assert {*OWN, *constants} <= set(hvd.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'elastic'"):
        hvd.elastic  # noqa: B018
