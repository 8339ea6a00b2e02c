"""`keras-dist migrate` on small sources; no TensorFlow is needed for it."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import PYTHONPATH

import keras_dist.horovod
from keras_dist.tools.migrate import fit
from keras_dist.tools.migrate.command import difference
from keras_dist.tools.migrate.imports import MISSING
from keras_dist.tools.migrate.source import migrate

ROOT = Path(__file__).parents[2]
KERAS_2_NAMES = Path(__file__).parents[1] / "keras_2_names.txt"
KERAS = "from tensorflow import keras\nfrom tensorflow.keras import backend as K\n"

# Lines of a script, and the same lines afterwards.
CHANGES = {
    # Imports
    "import horovod.tensorflow.keras as hvd": "import keras_dist.horovod as hvd",
    "import horovod.keras as hvd  # ours": "import keras_dist.horovod as hvd  # ours",
    "import os, horovod.keras as hvd": "import os, keras_dist.horovod as hvd",
    "from horovod.tensorflow import keras as hvd": (
        "from keras_dist import horovod as hvd"
    ),
    "from horovod import keras as hvd": "from keras_dist import horovod as hvd",
    "from horovod.tensorflow import keras\nkeras.init()": (
        "from keras_dist import horovod as keras\nkeras.init()"
    ),
    "import horovod.keras\nhorovod.keras.init()": (
        "import keras_dist.horovod\nkeras_dist.horovod.init()"
    ),
    "import horovod.tensorflow.keras.callbacks as c": (
        "import keras_dist.horovod.callbacks as c"
    ),
    "from horovod.keras.callbacks import (\n    MetricAverageCallback,  # all\n)": (
        "from keras_dist.horovod.callbacks import (\n"
        "    MetricAverageCallback,  # all\n)"
    ),
    "from horovod.keras import callbacks, size": (
        "from keras_dist.horovod import callbacks, size"
    ),
    "from horovod.tensorflow.keras import *": "from keras_dist.horovod import *",
    "from horovod.tensorflow import keras as hvd, Compression": (
        "from keras_dist import horovod as hvd; "
        "from keras_dist.horovod import Compression"
    ),
    "from horovod.tensorflow.compression import Compression": (
        "from keras_dist.horovod import Compression"
    ),
    "try:\n    import horovod.keras as h\nexcept ImportError:\n    h = None": (
        "try:\n    import keras_dist.horovod as h\nexcept ImportError:\n    h = None"
    ),
    "from horovod import tensorflow as hvd\nmodel.fit(x)": (
        "from keras_dist import horovod as hvd\nmodel.fit(x)"
    ),
    "def main():\n    import horovod.keras as hvd\n\n    hvd.init()": (
        "def main():\n    import keras_dist.horovod as hvd\n\n    hvd.init()"
    ),
    'hvd = importlib.import_module("horovod.keras")': (
        'hvd = importlib.import_module("keras_dist.horovod")'
    ),
    "import horovod.tensorflow\nimport horovod.tensorflow.keras as hvd\n"
    "horovod.tensorflow.broadcast_variables(model.variables, 0)": (
        "import keras_dist.horovod\nimport keras_dist.horovod as hvd\n"
        "keras_dist.horovod.broadcast_variables(model.variables, 0)"
    ),
    "import horovod\nimport horovod.tensorflow.keras as hvd\n"
    "print(horovod.__version__, horovod.tensorflow.keras.size())": (
        "import horovod\nimport keras_dist.horovod as hvd\n"
        "print(horovod.__version__, hvd.size())"
    ),
    "import horovod.tensorflow.keras\n"
    "print(horovod.__version__, horovod.tensorflow.keras.size())": (
        "import horovod, keras_dist.horovod\n"
        "print(horovod.__version__, keras_dist.horovod.size())"
    ),
    "import horovod, horovod.keras\nhorovod.keras.init()": (
        "import horovod, keras_dist.horovod\nkeras_dist.horovod.init()"
    ),
    "import horovod.tensorflow as hvd\nmodel.fit(x)": (
        "import keras_dist.horovod as hvd\nmodel.fit(x)"
    ),
    "import horovod.tensorflow as hvd\nhvd.elastic.TensorFlowKerasState(model)": (
        "import keras_dist.horovod as hvd\nhvd.elastic.KerasState(model)"
    ),
    # compile
    "model.compile(opt, 'mse', experimental_run_tf_function=False)": (
        "model.compile(opt, 'mse')"
    ),
    "model.compile(experimental_run_tf_function=False, loss='mse')": (
        "model.compile(loss='mse')"
    ),
    "model.compile(experimental_run_tf_function=False)": "model.compile()",
    "model.compile(\n    optimizer=opt,  # ours\n    # for Horovod\n"
    "    experimental_run_tf_function=False,\n    loss='mse',\n)": (
        "model.compile(\n    optimizer=opt,  # ours\n    # for Horovod\n"
        "    loss='mse',\n)"
    ),
    "model.compile(optimizer=opt,\n              loss='mse',\n"
    "              experimental_run_tf_function=False)": (
        "model.compile(optimizer=opt,\n              loss='mse')"
    ),
    "model.compile(loss='mse',  # squared\n"
    "              experimental_run_tf_function=False)": (
        "model.compile(loss='mse',  # squared\n              )"
    ),
    # Optimizers
    "keras.optimizers.SGD(lr=0.1 * hvd.size(), momentum=0.9)": (
        "keras.optimizers.SGD(learning_rate=0.1 * hvd.size(), momentum=0.9)"
    ),
    "from keras.optimizers import *\nopt = Adam(lr=1e-3)": (
        "from keras.optimizers import *\nopt = Adam(learning_rate=1e-3)"
    ),
    "Adam = keras.optimizers.Adam\nopt = Adam(lr=1e-3)": (
        "Adam = keras.optimizers.Adam\nopt = Adam(learning_rate=1e-3)"
    ),
    "keras.optimizers.Adam(lr=1e-3, epsilon=None, decay=0.0, amsgrad=False)": (
        "keras.optimizers.Adam(learning_rate=1e-3, amsgrad=False)"
    ),
    "keras.optimizers.SGD(lr=0.1, decay=1e-6)": (
        "keras.optimizers.SGD(learning_rate=keras.optimizers.schedules."
        "InverseTimeDecay(initial_learning_rate=0.1, decay_steps=1, decay_rate=1e-6))"
    ),
    "from tensorflow.keras.optimizers import SGD\nopt = SGD(rate, decay=d)": (
        "from tensorflow.keras.optimizers import SGD\n"
        "from tensorflow.keras.optimizers.schedules import InverseTimeDecay\n"
        "opt = SGD(InverseTimeDecay("
        "initial_learning_rate=rate, decay_steps=1, decay_rate=d))"
    ),
    "keras.optimizers.legacy.SGD(0.1)": "keras.optimizers.SGD(0.1)",
    "from tensorflow.keras.optimizers.legacy import Adam\nAdam(lr=0.1)": (
        "from tensorflow.keras.optimizers import Adam\nAdam(learning_rate=0.1)"
    ),
    "hvd.broadcast_variables(model.optimizer.variables(), 0)": (
        "hvd.broadcast_variables(model.optimizer.variables, 0)"
    ),
    # The rate
    "print(model.optimizer.lr)": "print(model.optimizer.learning_rate)",
    "opt = keras.optimizers.SGD(0.1)\nopt.lr = 1": (
        "opt = keras.optimizers.SGD(0.1)\nopt.learning_rate = 1"
    ),
    "rate = K.get_value(self.model.optimizer.lr)": (
        "rate = float(self.model.optimizer.learning_rate)"
    ),
    "rate = float(K.get_value(model.optimizer.lr))": (
        "rate = float(model.optimizer.learning_rate)"
    ),
    "K.set_value(model.optimizer.lr, 2 * rate)  # up": (
        "model.optimizer.learning_rate = 2 * rate  # up"
    ),
    "K.set_value(\n    model.optimizer.lr,\n    2 * rate,\n)": (
        "model.optimizer.learning_rate = 2 * rate"
    ),
    "K.set_value(model.optimizer.lr, K.get_value(model.optimizer.lr) / 2)": (
        "model.optimizer.learning_rate = float(model.optimizer.learning_rate) / 2"
    ),
    "def halve(opt):\n    K.set_value(opt.lr, K.get_value(opt.lr) / 2)": (
        "def halve(opt):\n    opt.learning_rate = float(opt.learning_rate) / 2"
    ),
    "up = lambda: K.set_value(model.optimizer.learning_rate, 1)": (
        "up = lambda: model.optimizer.learning_rate.assign(1)"
    ),
    "keras.backend.set_value(model.optimizer.lr, 1)": (
        "model.optimizer.learning_rate = 1"
    ),
    "if not hasattr(self.model.optimizer, 'lr'): raise ValueError": (
        "if not hasattr(self.model.optimizer, 'learning_rate'): raise ValueError"
    ),
    # Data
    "model.fit_generator(data, 100 // hvd.size(), 3, callbacks=c)": (
        "model.fit(data, steps_per_epoch=100 // hvd.size(), epochs=3, callbacks=c)"
    ),
    "model.fit_generator(generator=data, epochs=3)": "model.fit(x=data, epochs=3)",
    "model.evaluate_generator(data, 10)": "model.evaluate(data, steps=10, verbose=0)",
    "model.predict_generator(data)": "model.predict(data, verbose=0)",
    "model.fit(data, workers=4, use_multiprocessing=True, epochs=2)": (
        "model.fit(data, epochs=2)"
    ),
    "model.fit(\n    data,\n    max_queue_size=10,\n    epochs=2,\n)": (
        "model.fit(\n    data,\n    epochs=2,\n)"
    ),
    # Layers
    "keras.layers.Embedding(10, 4, input_length=3)": "keras.layers.Embedding(10, 4)",
    "from keras.layers.core import Dense": "from keras.layers import Dense",
    "from keras.utils.np_utils import to_categorical": (
        "from keras.utils import to_categorical"
    ),
    "from keras.preprocessing.image import ImageDataGenerator": (
        "from tensorflow.keras.preprocessing.image import ImageDataGenerator"
    ),
    "from keras.preprocessing import image\nimage.ImageDataGenerator()": (
        "from tensorflow.keras.preprocessing import image\nimage.ImageDataGenerator()"
    ),
    # Names and arguments that are elsewhere
    "from keras.utils import np_utils\ny = np_utils.to_categorical(y)": (
        "from keras import utils as np_utils\ny = np_utils.to_categorical(y)"
    ),
    "from tensorflow.python.keras.utils import np_utils as u\nu.normalize(y)": (
        "from tensorflow.keras import utils as u\nu.normalize(y)"
    ),
    "OptType = getattr(keras.optimizers, name)\nopt = OptType(lr=0.1)": (
        "OptType = getattr(keras.optimizers, name)\nopt = OptType(learning_rate=0.1)"
    ),
    "O = keras.optimizers.SGD if x else keras.optimizers.Adam\nO(lr=0.1)": (
        "O = keras.optimizers.SGD if x else keras.optimizers.Adam\nO(learning_rate=0.1)"
    ),
    "kinds = {'a': keras.optimizers.Adam}\nopt = kinds['a'](lr=0.1)": (
        "kinds = {'a': keras.optimizers.Adam}\nopt = kinds['a'](learning_rate=0.1)"
    ),
    "opts = {'g': keras.optimizers.Adam()}\nopts['g'].variables()": (
        "opts = {'g': keras.optimizers.Adam()}\nopts['g'].variables"
    ),
    "model.compile(opt, 'mse', ['accuracy'])": (
        "model.compile(opt, 'mse', metrics=['accuracy'])"
    ),
    "found = [keras.metrics.AUC()]\nmodel.compile(opt, 'mse', found, [1, 2])": (
        "found = [keras.metrics.AUC()]\n"
        "model.compile(opt, 'mse', metrics=found, loss_weights=[1, 2])"
    ),
    "model.compile(opt, 'mse', sample_weight_mode=None)": "model.compile(opt, 'mse')",
    "self.add_weight('kernel', (3, 4), initializer='ones')": (
        "self.add_weight(name='kernel', shape=(3, 4), initializer='ones')"
    ),
    # Files
    "keras.callbacks.ModelCheckpoint(path, period=1)": (
        "keras.callbacks.ModelCheckpoint(path)"
    ),
    "import horovod.keras as hvd\nsteps = 100 // hvd.size()\n"
    "c = keras.callbacks.ModelCheckpoint('{epoch}.h5', period=5)\n"
    "model.fit(data, steps_per_epoch=steps, callbacks=[c])": (
        "import keras_dist.horovod as hvd\nsteps = 100 // hvd.size()\n"
        "c = keras.callbacks.ModelCheckpoint('{epoch}.h5', save_freq=5 * steps)\n"
        "model.fit(data, steps_per_epoch=steps, callbacks=[c])"
    ),
    "keras.callbacks.ModelCheckpoint('a-{epoch}.hdf5')": (
        "keras.callbacks.ModelCheckpoint('a-{epoch}.h5')"
    ),
    "model.save_weights('a.h5')\nif exists('a.h5'):\n    model.load_weights('a.h5')": (
        "model.save_weights('a.weights.h5')\n"
        "if exists('a.weights.h5'):\n    model.load_weights('a.weights.h5')"
    ),
    'model.save_weights(f"{folder}/epoch-{epoch}.h5")': (
        'model.save_weights(f"{folder}/epoch-{epoch}.weights.h5")'
    ),
    "name = './checkpoint-{epoch}.h5'\nc = keras.callbacks.ModelCheckpoint("
    "name, save_weights_only=True)\nmodel.load_weights(name.format(epoch=2))": (
        "name = './checkpoint-{epoch}.weights.h5'\nc = keras.callbacks.ModelCheckpoint("
        "name, save_weights_only=True)\nmodel.load_weights(name.format(epoch=2))"
    ),
    "p.add_argument('--to-file', default='a.h5', help='a.h5')\n"
    "model.save_weights(os.path.join(folder, args.to_file))": (
        "p.add_argument('--to-file', default='a.weights.h5', help='a.weights.h5')\n"
        "model.save_weights(os.path.join(folder, args.to_file))"
    ),
    # Where it is loaded, its name may be put together otherwise.
    "model.save_weights(f'{out}/best.h5')\nmodel.load_weights(f'{out}/best.h5')": (
        "model.save_weights(f'{out}/best.weights.h5')\n"
        "model.load_weights(f'{out}/best.weights.h5')"
    ),
    "model.save_weights('out/run.1')\nmodel.load_weights(join(out, 'run.1'))\n"
    "model.load_weights(os.path.join(out, 'run.1'))": (
        "model.save_weights('out/run.1.weights.h5')\n"
        "model.load_weights(join(out, 'run.1'))\n"
        "model.load_weights(os.path.join(out, 'run.1.weights.h5'))"
    ),
    "c = keras.callbacks.ModelCheckpoint('w.{epoch:02d}-{loss:.2f}.hdf5', "
    "save_weights_only=True)\nmodel.load_weights('out/w.10-0.50.hdf5')": (
        "c = keras.callbacks.ModelCheckpoint('w.{epoch:02d}-{loss:.2f}.weights.h5', "
        "save_weights_only=True)\nmodel.load_weights('out/w.10-0.50.weights.h5')"
    ),
    "c = keras.callbacks.ModelCheckpoint('a-{epoch}.hdf5')\n"
    "model = keras.models.load_model(f'{out}/a-3.hdf5')": (
        "c = keras.callbacks.ModelCheckpoint('a-{epoch}.h5')\n"
        "model = keras.models.load_model(f'{out}/a-3.h5')"
    ),
    "model.save_weights(a + '.h5')\nmodel.load_weights(a + '.h5')\n"
    "model.load_weights(b + '.h5')": (
        "model.save_weights(a + '.weights.h5')\nmodel.load_weights(a + '.weights.h5')\n"
        "model.load_weights(b + '.h5')"
    ),
    "model.save_weights('best.h5')\nmodel.load_weights('vgg-best.h5')\n"
    "model.load_weights(f'{out}best.h5')": (
        "model.save_weights('best.weights.h5')\nmodel.load_weights('vgg-best.h5')\n"
        "model.load_weights(f'{out}best.weights.h5')"
    ),
    "model.save_weights(folder + '.h5')\nname.endswith('.h5')": (
        "model.save_weights(folder + '.weights.h5')\nname.endswith('.h5')"
    ),
    # Each function has its own names, and a name its last value.
    "def a():\n    f = 'a.h5'\n    model.save_weights(f)\n\n"
    "def b():\n    f = 'b.h5'\n    model.save(f)": (
        "def a():\n    f = 'a.weights.h5'\n    model.save_weights(f)\n\n"
        "def b():\n    f = 'b.h5'\n    model.save(f)"
    ),
    "f = 'a.h5'\nmodel.save(f)\nf = 'b.h5'\nmodel.save_weights(f)": (
        "f = 'a.h5'\nmodel.save(f)\nf = 'b.weights.h5'\nmodel.save_weights(f)"
    ),
    "f = 'a.h5'\nif x:\n    f = 'b.h5'\nmodel.save_weights(f)": (
        "f = 'a.weights.h5'\nif x:\n    f = 'b.weights.h5'\nmodel.save_weights(f)"
    ),
    "f = 'a'\nfor i in x:\n    model.save_weights(f)\n    f = 'b.h5'": (
        "f = 'a.weights.h5'\nfor i in x:\n    model.save_weights(f)\n"
        "    f = 'b.weights.h5'"
    ),
    "def set_name():\n    global f\n    f = 'a.h5'\n\nmodel.save_weights(f)": (
        "def set_name():\n    global f\n    f = 'a.weights.h5'\n\nmodel.save_weights(f)"
    ),
    # Sessions
    "config = tf.ConfigProto()\n"
    "config.gpu_options.allow_growth = True\n"
    "# Its own\n"
    "config.gpu_options.visible_device_list = str(hvd.local_rank())\n"
    "K.set_session(tf.Session(config=config))\nprint(1)": (
        'gpus = tf.config.list_physical_devices("GPU")\n'
        "for gpu in gpus:\n    tf.config.experimental.set_memory_growth(gpu, True)\n"
        "# Its own\n"
        'if gpus:\n    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")\n'
        "print(1)"
    ),
    "def pin():\n"
    "    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)\n"
    "    config.gpu_options.visible_device_list = str(hvd.local_rank())\n"
    "    config.intra_op_parallelism_threads = 2\n"
    "    # And use it\n"
    "    session = tf.compat.v1.Session(config=config)\n"
    "    tf.compat.v1.keras.backend.set_session(session)": (
        "def pin():\n"
        '    gpus = tf.config.list_physical_devices("GPU")\n'
        "    if gpus:\n"
        '        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")\n'
        "    tf.config.threading.set_intra_op_parallelism_threads(2)\n"
        "    # And use it"
    ),
    "tf.enable_eager_execution()\nprint(1)": "print(1)",
    "tf.logging.set_verbosity(tf.logging.ERROR)": (
        "tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)"
    ),
}

# What stays as it is, and a word of the reason.
LEFT = {
    "keras.callbacks.ModelCheckpoint('a.keras', period=5)": "save_freq",
    "keras.callbacks.ModelCheckpoint('{val_loss}.h5', period=5)\n"
    "model.fit(data, steps_per_epoch=9)": "save_freq",
    "keras.callbacks.ModelCheckpoint('folder')": ".keras",
    "keras.optimizers.SGD(lr=0.1, decay=1e-6)\nmodel.optimizer.lr = 1": "decay=",
    "keras.optimizers.SGD(decay=1e-6)": "not given",
    "model.evaluate_generator(data, 10, None, 10)": "names",
    "model.fit_generator(*args)": "names",
    "weights = K.get_value(model.weights[0])": "variable.numpy()",
    "K.set_value(model.weights[0], value)": "variable.assign",
    "import horovod.tensorflow as hvd\nhvd.join()": "no join",
    "from horovod.tensorflow import alltoall": "no alltoall",
    "import horovod.spark.keras as hvd": "keras_dist.spark.run",
    "import horovod.run": "keras_dist.run",
    "from keras.optimizers.legacy import optimizer_v2": "no optimizers.legacy",
    "from keras.utils.generic_utils import to_list": "is private",
    "rate = K.get_value(self.lr)": "variable.numpy()",
    "session = tf.Session()": "TensorFlow 1",
    "config = tf.ConfigProto(device_count={})\nuse(config)": "TensorFlow 1",
    "x = tf.placeholder(tf.float32)": "keras.Input",
    "tf.compat.v1.disable_eager_execution()": "eagerly",
    "model.save_weights('a.h5')\nmodel.save('a.h5')": "whole model",
    "model.load_weights('checkpoint')": "no checkpoint of TensorFlow",
    "options = {'experimental_run_tf_function': False}": "Remove the entry",
    "os.environ['TF_USE_LEGACY_KERAS'] = '1'": "Keras 2",
    "import tf_keras": "Keras 3",
    "from horovod.tensorflow import *": "has not all",
    "from horovod import tensorflow as hvd\nhvd.join()": "no join",
    'hvd = importlib.import_module("horovod.tensorflow")': "by its text",
    "tf.enable_eager_execution(); x = 1": "runs eagerly",
    "keras.models.load_model('a.h5')\nmodel.save_weights('a.h5')": "whole model",
    "model.save_weights('a.h5')\nmodel.load_weights(read())": "not in this file",
    "model.load_weights('run.1')": "no checkpoint of TensorFlow",
    "model.save('folder')": "writes no folder",
    # Names of Keras 2 that Keras 3 does not have
    "tf.keras.losses.mean_squared_error(a, b)": "Use keras.losses.mean_squared_error",
    "import keras\nkeras.losses.MSE(a, b)": "Use tf.keras.losses.MSE",
    "from keras.layers import CuDNNLSTM": "uses cuDNN by itself",
    "import keras.engine.topology": "no keras.engine",
    "from keras.layers import *\nCuDNNLSTM(8)": "uses cuDNN by itself",
    "import keras\nkeras.utils.np_utils.to_categorical(y)": "Look for them in keras",
    "from keras.engine import Layer": "Use keras.Layer",
    "from keras import objectives": "no keras.objectives",
    "from tensorflow.keras.wrappers.scikit_learn import KerasClassifier": "SKLearn",
    "tf.keras.mixed_precision.experimental.Policy('a')": "Use keras.mixed_precision",
    "tf.keras.layers.experimental.preprocessing.Rescaling(2)": (
        "Use tf.keras.layers.Rescaling"
    ),
    "tf.keras.experimental.CosineDecay(0.1, 9)": (
        "Use tf.keras.optimizers.schedules.CosineDecay"
    ),
    "from keras import backend\nbackend.mean(x)": "Use keras.ops.mean",
    "K.learning_phase()": "Pass training=",
    "from keras.utils import np_utils\nnp_utils.convert_kernel(y)": "is private",
    # Members and arguments
    "metric.reset_states()": "reset_state()",
    "class A(keras.metrics.Mean):\n    def reset_states(self):\n        pass": (
        "does not call reset_states"
    ),
    "loss = optimizer.get_scaled_loss(loss)": "scale_loss(loss)",
    "model.predict_classes(x)": "argmax",
    "optimizer.get_weights()": "optimizer.variables",
    "things['g'].variables()": "is no method",
    "def f(opt_type):\n    return opt_type(lr=0.1)": "learning_rate=",
    "model.compile(opt, 'mse', sample_weight_mode='temporal')": "sample_weight_mode",
    "model.compile(opt, 'mse', found)": "loss_weights",
    "model.train_on_batch(x, y, reset_metrics=False)": "reset_metrics()",
    "keras.layers.LSTM(8, time_major=True)": "time_major",
    "keras.optimizers.SGD(0.1, jit_compile=True)": "jit_compile",
    # TensorFlow's operations on symbolic tensors
    "x = keras.Input((3,))\ny = tf.reduce_mean(x)": "keras.ops.mean",
    "x = keras.layers.Dense(3)(keras.Input((3,)))\ny = tf.concat([x, x], 1)": (
        "keras.ops.concatenate"
    ),
    "x = keras.Input((3,))\ny = K.mean(block(x) + 1)": "keras.ops.mean",
    "model = keras.Sequential()\ny = tf.foo(model.output)": "keras.ops",
}

# What is the same word in another library, or is the user's own.
UNTOUCHED = [
    "import torch\nopt = torch.optim.SGD(model.parameters(), lr=0.1)",
    "import horovod.torch as hvd\nhvd.init()",
    "import numpy\nopt = parser.parse_args()\nprint(opt.lr, args.lr, self.lr)",
    KERAS + "opt = parser.parse_args()\nprint(opt.lr, args.lr, self.lr)",
    KERAS + "pool.map(f, workers=4)\nDataLoader(data, workers=2)",
    KERAS + "import torch\ntorch.optim.Adam(lr=0.1, decay=2)",
    KERAS + "figure.save('a')\nnumpy.save('a', 1)",
    KERAS + "model.save_weights('a.weights.h5')\nmodel.load_weights('vgg16.h5')",
    KERAS + "model.save_weights('a.weights.json', max_shard_size=1)",
    KERAS + "compile(source, experimental_run_tf_function=1)",
    KERAS + "keras.optimizers.SGD(learning_rate=0.1)\nmodel.optimizer.learning_rate",
    KERAS + "Embedding(10, 4, input_length=3)  # not Keras's, as far as is known",
    KERAS + "model.compile(opt, 'mse', [0.5, 1.0])  # Keras 3's loss_weights",
    "from keras.layers import *\nfrom keras.models import Model\nclass A(Model): pass\n"
    "x = Dense(8)(Input((2,)))\nfor y in range(len(x)):\n    print(A, concatenate, y)",
    "from keras.layers import *\nfrom mine import *\nCuDNNLSTM(8)",
    KERAS + "found = [found]\nkeras.Model().compile(opt, 'mse', *found)",
    KERAS + "import re\nre.compile(a, b, ['x'])\nrnn.reset_state()",
    KERAS + "import torch\ntorch.reset_states()\nf(lr=1)",
    KERAS + "def f(keras):\n    return keras.layers.experimental",
    KERAS + "try:\n    from keras.utils import Sequence\n"
    "except ImportError:\n    from keras.utils import PyDataset as Sequence",
    KERAS + "keras.layers.Lambda(lambda x: tf.reduce_mean(x))(keras.Input((3,)))",
    KERAS + "x = keras.Input((3,))\nx = load()\ntf.reduce_mean(x)",
    KERAS + "keras.losses.mse(a, b)\nK.mean(a)\nkeras.layers.Dense.call",
]


# A script that is plain enough for `--to dist_fit`, and what becomes of it.
PLAIN = """\
import horovod.tensorflow.keras as hvd
import tensorflow as tf

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
data = make_data().shard(hvd.size(), hvd.rank()).batch(64)
model = tf.keras.applications.MobileNet()
# Scaled
rate = 0.001 * hvd.size()
opt = tf.optimizers.Adam(rate)
opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
model.compile(opt, "mse", experimental_run_tf_function=False)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    # As before
    tf.keras.callbacks.TerminateOnNaN(),  # first
    # At the end
    tf.keras.callbacks.EarlyStopping(),
]
# On one
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("a.keras"))
model.fit(
    data,
    steps_per_epoch=500 // hvd.size(),
    callbacks=callbacks,
    epochs=24,
    verbose=1 if hvd.rank() == 0 else 0,
)
if hvd.rank() == 0:
    model.save("b.keras")
"""
BY_DIST_FIT = """\
import keras_dist
import tensorflow as tf

data = make_data().batch(64)
model = tf.keras.applications.MobileNet()
# Scaled
rate = 0.001
opt = tf.optimizers.Adam(rate)
model.compile(opt, "mse")
callbacks = [
    # As before
    tf.keras.callbacks.TerminateOnNaN(),  # first
    # At the end
    tf.keras.callbacks.EarlyStopping(),
]
# On one
callbacks.append(tf.keras.callbacks.ModelCheckpoint("a.keras"))
keras_dist.dist_fit(
    model,
    data,
    steps_per_epoch=500 // keras_dist.size(),
    callbacks=callbacks,
    epochs=24,
    verbose=1,
    steps_scaling="none",
    compression="fp16",
)
if keras_dist.rank() == 0:
    model.save("b.keras")
"""

# Changes of that script with which one cannot be sure, and a word of the reason.
NOT_PLAIN = {
    ("epochs=24", "epochs=24 // hvd.size()"): "one too many",
    ("rate = 0.001", "rate = 0.5 + 0.001"): "hvd.size",
    ("compression=hvd.Compression.fp16", "op=hvd.Adasum"): "only op=",
    ("compression=", "backward_passes_per_step=2, compression="): "only op=",
    ("hvd.init()", "hvd.init()\ntf.random.set_seed(hvd.rank())"): "none of the idioms",
    ("CALL(0)", "CALL(1)"): "BroadcastGlobalVariablesCallback",
    ("model.save", "model.fit(data)\n    model.save"): "there are 2",
    ("model.save", "hvd.allreduce(1)\n    model.save"): "those of all ranks",
    ("model.save", "seed = 7 if hvd.rank() == 0 else 0\n    model.save"): "none of the",
    ("as hvd", "as hvd\nfrom horovod.keras.callbacks import M"): "single names",
    ('model.save("b.keras")', "K = tf.keras.backend; K.get_value(x)"): "variable.numpy",
}

# Options that a script needs where it does not scale by itself.
UNSCALED = {
    ("0.001 * hvd.size()", "0.001"): 'lr_scaling="none"',
    ("500 // hvd.size()", "500"): 'steps_scaling="none"',
    (
        "data = make_data().shard(hvd.size(), hvd.rank()).batch(64)",
        "data = make_data()[hvd.rank() :: hvd.size()]",
    ): 'compression="fp16"',
    ("epochs=24", "epochs=24, validation_steps=9"): 'validation_steps_scaling="none"',
    ("compression=hvd.Compression.fp16", "op=hvd.Sum"): 'op="sum"',
}


def _after(text):
    return migrate(text.encode()).source.decode()


@pytest.mark.parametrize("before", CHANGES, ids=lambda text: text[:50])
def test_what_keras_3_no_longer_takes_is_changed(before):
    """Line by line, with the comments; it compiles; a second time changes nothing."""
    head = "import tensorflow as tf\n" + KERAS
    after = _after(head + before + "\n")
    # New imports are behind the others.
    assert after.replace(head, "") == CHANGES[before] + "\n"
    compile(after, "<script>", "exec")
    assert _after(after) == after


@pytest.mark.parametrize("source", LEFT, ids=lambda text: text[:50])
def test_what_cannot_be_changed_is_listed(source):
    """With the last line that it concerns, the reason, and what to write instead."""
    head = "import tensorflow as tf\n" + KERAS
    done = migrate((head + source + "\n").encode())
    found = [one for one in done.findings if one.is_left]
    assert not done.is_whole and len(found) == 1
    assert LEFT[source] in found[0].text("train.py")
    assert found[0].line in range(4, 4 + len(source.splitlines()))


@pytest.mark.parametrize("source", UNTOUCHED, ids=lambda text: text[-40:])
def test_other_libraries_are_left_alone(source):
    """The same words mean something else there."""
    done = migrate(source.encode())
    assert done.source == source.encode()
    assert done.is_whole


def test_each_public_name_of_keras_2_that_keras_3_has_not_is_listed():
    """By both imports; `keras_2_names.txt` has those of Keras 2.15's own API files."""
    import keras  # noqa: PLC0415 - the oracle
    import tensorflow as tf  # noqa: PLC0415

    modules = {"keras": keras, "tf.keras": tf.keras}
    names = [
        f"{module}.{name}"
        for module, *found in map(str.split, KERAS_2_NAMES.read_text().splitlines())
        for name in found
    ]
    assert len(names) > 900 and "keras.losses.mean_squared_error" in names
    for root, package in modules.items():
        text = f"import {root.replace('tf.', 'tensorflow.')}\nimport tensorflow as tf\n"
        lines = [root + name.removeprefix("keras") for name in names]
        done = migrate((text + "\n".join(lines) + "\n").encode())
        changed = done.source.decode().splitlines()[2:]
        listed = {one.line - 3 for one in done.findings if one.is_left}
        for index, line in enumerate(lines):
            has_it = _has(package, line.removeprefix(root))
            is_changed = changed[index] != line  # `optimizers.legacy`, for one
            assert index not in listed if has_it else is_changed or index in listed, (
                line
            )


def _has(package, name):
    """Whether a package has a name; its modules are imported where it is made."""
    for word in name.split(".")[1:]:
        if not hasattr(package, word):
            return False
        package = getattr(package, word)
    return True


def _sources_without_horovod():
    """Scripts in the style of keras.io, and Keras's own files, for Keras 3."""
    import keras  # noqa: PLC0415 - only for its files

    folder = Path(keras.__file__).parent / "src"
    found = [*(ROOT / "examples").glob("*.py")]
    found += (ROOT / "tests" / "ranks" / "keras_ways").glob("*.py")
    # With tests, which use models as scripts do.
    inside = [*folder.glob("callbacks/*.py"), *folder.glob("trainers/*.py")]
    inside += folder.glob("saving/*.py")
    return found + sorted(inside, key=lambda path: path.stat().st_size)[:-6]


def test_scripts_of_keras_3_are_not_changed():
    """Of more than fifty, not one line; Keras's own examples are in its repository."""
    paths = _sources_without_horovod()
    assert len(paths) > 50
    for path in paths:
        source = path.read_bytes()
        assert difference(path.name, source, migrate(source)) == b""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_encoding_line_ends_and_tabs_stay(end):
    """As they are in the file, in new lines too."""
    source = """\
# -*- coding: latin-1 -*-
# é
import horovod.keras as hvd
import tensorflow as tf
def pin():
\tconfig = tf.ConfigProto()
\tconfig.gpu_options.allow_growth = True
\ttf.keras.backend.set_session(tf.Session(config=config))"""
    expected = """\
# -*- coding: latin-1 -*-
# é
import keras_dist.horovod as hvd
import tensorflow as tf
def pin():
\tgpus = tf.config.list_physical_devices("GPU")
\tfor gpu in gpus:
\t\ttf.config.experimental.set_memory_growth(gpu, True)"""
    old = source.replace("\n", end).encode("latin-1")
    done = migrate(old).source
    assert done == expected.replace("\n", end).encode("latin-1")
    assert migrate(b"\xef\xbb\xbfimport horovod.keras\n").source.startswith(b"\xef\xbb")


# What is no script of Python 3, the line, and a word of the reason.
UNREADABLE = {
    b"import horovod.keras\nprint 'Python 2'\n": (2, "2to3"),
    b"import horovod.keras\ndef f(:\n": (2, "cannot read this file (invalid syntax)"),
    b"# coding: klingon\nimport horovod.keras\n": (1, "unknown encoding"),
    b"# \xe9\nimport horovod.keras\n": (1, "encoding"),
    b"import horovod.keras\n\0\n": (None, "null bytes"),
    b"\x0cimport horovod.keras as hvd\n": (1, "form feed"),
    b"import horovod.keras as hvd\rhvd.init()\r": (1, "lines' ends"),
    b"if 1:\n\tx = 1\n        y = 1\n": (3, "tabs and spaces"),
    b"x = " + b"(" * 3000 + b")" * 3000: (1, "nested parentheses"),
    b"import horovod.keras\nx = " + b" + ".join([b"1"] * 3000): (1, "nested too deep"),
}


@pytest.mark.parametrize("source", UNREADABLE, ids=lambda source: str(source[:40]))
def test_what_cannot_be_read_is_left_with_the_reason(source):
    """Nothing of it is changed, and nothing crashes."""
    for rewrite in (migrate, fit.migrate):
        done = rewrite(source)
        (found,) = done.findings
        line, reason = UNREADABLE[source]
        assert done.source == source and not done.is_whole
        assert line in (None, found.line) and reason in found.text("train.py")


def test_values_that_depend_on_each_other_in_a_loop_take_no_time():
    """Each is looked at once: `x, y = f(x, y)` has very many paths."""
    lines = [f"    x{i} = f(x{i}, x{(i + 1) % 12}, x{(i + 5) % 12})" for i in range(12)]
    lines += ["    tf.reduce_mean(x0)", "y = x0[hvd.rank() :: hvd.size()]", "print(y)"]
    names = " = ".join(f"x{i}" for i in range(12))
    head = f"{KERAS}import tensorflow as tf\nimport horovod.keras as hvd\n{names} = 1\n"
    source = head + "for _ in range(3):\n" + "\n".join(lines) + "\nmodel.fit(x1, y)\n"
    start = time.monotonic()
    assert migrate(source.encode()).is_whole
    assert not fit.migrate(source.encode()).is_whole
    assert time.monotonic() - start < 10


def test_a_plain_script_becomes_one_call_of_dist_fit():
    """Optimizer, callbacks, scaling, shards and conditions by rank are not needed."""
    done = fit.migrate(PLAIN.encode())
    assert done.findings == ()
    assert done.source.decode() == BY_DIST_FIT
    assert fit.migrate(done.source).source == done.source


@pytest.mark.parametrize("change", NOT_PLAIN, ids=lambda change: change[1][:50])
def test_a_script_that_is_not_plain_is_refused_with_the_reason(change):
    """And nothing of it is changed."""
    old, new = (one.replace("CALL", "VariablesCallback") for one in change)
    source = PLAIN.replace(old, new)
    assert source != PLAIN
    done = fit.migrate(source.encode())
    assert done.source == source.encode() and not done.is_whole
    assert any(NOT_PLAIN[change] in one.text("train.py") for one in done.findings)


# A script with arrays, and changes after which `dist_fit` would do something else.
ARRAYS = """\
import horovod.tensorflow.keras as hvd
from tensorflow import keras

hvd.init()
x, y, x_val, y_val = load()
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
rate = 0.1 * hvd.size()
model = keras.Sequential([keras.layers.Dense(1)])
opt = keras.optimizers.SGD(rate)
opt = hvd.DistributedOptimizer(opt)
verbose = 1 if hvd.rank() == 0 else 0
model.compile(opt, "mse", metrics=["mae"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
model.fit(x, y, epochs=2, callbacks=callbacks, verbose=verbose)
"""
X, Y = "x[hvd.rank() :: hvd.size()]", "y[hvd.rank() :: hvd.size()]"
SHARDS = f"x, y = {X}, {Y}\n"
COMPILE = 'model.compile(opt, "mse", metrics=["mae"])'
FIT = "model.fit(x, y, epochs=2, callbacks=callbacks, verbose=verbose)"
MEANT = {
    # Another model
    "a helper model is fitted": (
        COMPILE,
        "net = build(model)\nmodel.compile('adam', 'mse')\nnet.compile(opt, 'mse')",
        "compiles 2 models",
    ),
    "two models are fitted": (FIT, f"{FIT}\nhelper.fit(x)", "there are 2"),
    "it is compiled with another optimizer": (
        COMPILE,
        "model.compile('adam', 'mse')",
        "not the one that is compiled with hvd.DistributedOptimizer",
    ),
    "it is compiled elsewhere": (COMPILE, "", "compiles 0 models"),
    "a helper model of another file is fitted": (
        FIT,
        FIT.replace("model", "helper"),
        "not the one that is compiled",
    ),
    "it averages only on request": (
        "opt = hvd",
        "if args.distributed:\n    opt = hvd",
        "not the one that is compiled",
    ),
    "it is loaded": (
        "keras.Sequential([keras.layers.Dense(1)])",
        "keras.models.load_model('a.keras')",
        "not the one that is compiled",
    ),
    # A loop of its own
    "train_on_batch": (FIT, f"{FIT}\nmodel.train_on_batch(x_val, y_val)", "beside"),
    "a tape": (FIT, f"{FIT}\nwith tf.GradientTape() as tape: pass", "GradientTape"),
    "a train step": (
        "hvd.init()",
        "class A(keras.Model):\n    def train_step(self, data): pass\n\nhvd.init()",
        "may train otherwise",
    ),
    "a fit in a loop": (FIT, f"for _ in range(2):\n    {FIT}", "in a loop"),
    "arguments that are not known": (FIT, "model.fit(x, **options)", "not known here"),
    "arguments without a name": (
        FIT,
        "model.fit(x, y, 8, 2, 0, callbacks, 0.0, None, False, None, None, 0, 9)",
        "not known here",
    ),
    # Data
    "steps of a rank's rows": (
        FIT,
        f"steps = len({X}) // 32\n{FIT}",
        "used for something else than fit",
    ),
    "steps of a sharded name": (
        FIT,
        f"steps = len(x) // 32\n{FIT}",
        "x is a rank's part here, and all of it with dist_fit",
    ),
    "only validation is sharded": (
        SHARDS + "rate",
        f"val = x_val{X[1:]}, y_val{Y[1:]}\nrate",
        "used for something else than fit",
    ),
    "only validation is sharded, in the fit": (
        f"{SHARDS}rate",
        f"x_val, y_val = x_val{X[1:]}, y_val{Y[1:]}\nrate",
        "only validation data is sharded",
        "verbose=verbose)",
        "verbose=verbose, validation_data=(x_val, y_val))",
    ),
    "only x is sharded": (SHARDS, f"x = {X}\n", "only a part of x and y"),
    "predict of a rank's rows": (FIT, f"{FIT}\nmodel.predict(x)", "x is a rank's part"),
    "evaluate of a rank's rows": (FIT, f"{FIT}\nmodel.evaluate(x, y)", "x is a rank's"),
    "rows made of a rank's rows": (FIT, f"z = x / 255\n{FIT}", "x is a rank's part"),
    "rows that are changed later": (SHARDS, f"{SHARDS}x = x / 255\n", "not understood"),
    "a split": (
        "verbose=verbose)",
        "verbose=verbose, validation_split=0.2)",
        "validation_split takes the end",
    ),
    "a part of each shard": (
        SHARDS,
        "x = data(x, y).shard(hvd.size(), hvd.rank()).take(9).batch(3)\ny = None\n",
        "not understood",
    ),
    "shards that are repeated": (
        SHARDS,
        "x = data(x, y).shard(hvd.size(), hvd.rank()).repeat().batch(3)\ny = None\n",
        "not understood",
    ),
    "the same validation steps on all ranks": (
        "verbose=verbose)",
        "verbose=verbose, validation_data=x_val, validation_steps=9)",
        "the same validation_steps",
    ),
    "a seed for the order of rows": (
        "hvd.init()",
        "hvd.init()\nkeras.utils.set_random_seed(1)",
        "fixes the order",
    ),
    "a seed for the order of a data set": (
        SHARDS,
        "x = data(x, y).shuffle(9, seed=1).shard(hvd.size(), hvd.rank()).batch(3)\n"
        "y = None\n",
        "fixes the order",
    ),
    "a seed for what a layer draws": (
        "hvd.init()",
        "hvd.init()\ntf.random.set_seed(1)\nlayer = keras.layers.Dropout(0.5)",
        "what a layer draws",
        "epochs=2",
        "epochs=2, shuffle=False",
    ),
    "a seed of a layer": (
        "keras.layers.Dense(1)",
        "keras.layers.LSTM(1, dropout=0.5, seed=1)",
        "what a layer draws",
        "epochs=2",
        "epochs=2, shuffle=False",
    ),
    "weights of rows": ("verbose=verbose)", "verbose=verbose, sample_weight=w)", "row"),
    # Rate
    "the rate is an L2 factor": (
        "keras.layers.Dense(1)",
        "keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(rate))",
        "rate is read here, too",
    ),
    "the rate is printed": (
        FIT,
        f"{FIT}\nprint(f'rate {{rate}}')",
        "rate is read here",
    ),
    "the rate is an attribute": (
        "rate = 0.1 * hvd.size()\n",
        "args.rate = 0.1 * hvd.size()\n",
        "args.rate, which other code may read, too",
        "SGD(rate)",
        "SGD(args.rate)",
    ),
    "one of two optimizers is scaled": (
        "opt = hvd",
        "other = keras.optimizers.Adam(0.1)\nopt = hvd",
        "one optimizer and one",
    ),
    "absolute rates": (
        "callbacks = [",
        "callbacks = [\n    keras.callbacks.LearningRateScheduler(lambda e: 0.1),",
        "LearningRateScheduler",
    ),
    "a rate that is lowered": (
        "callbacks = [",
        "callbacks = [\n    keras.callbacks.ReduceLROnPlateau(min_lr=0.01),",
        "ReduceLROnPlateau",
    ),
    "a schedule of a rank's steps": (
        "SGD(rate)",
        "SGD(keras.optimizers.schedules.CosineDecay(0.1, 100 // 2))",
        "counts a rank's steps",
    ),
    "decay, which becomes a schedule": (
        "SGD(rate)",
        "SGD(lr=0.1, decay=1e-3)",
        "counts a rank's steps",
    ),
    "a rate that is read from the model": (
        FIT,
        f"{FIT}\nprint(model.optimizer.learning_rate)",
        ".optimizer is used here",
    ),
    "the optimizer is read": (FIT, f"{FIT}\nprint(opt.iterations)", "opt is the opt"),
    "warm-up": (
        "callbacks = [",
        "callbacks = [\n    hvd.callbacks.LearningRateWarmupCallback(rate, 3),",
        "one step behind Horovod's, and does not correct the momentum",
    ),
    "an optimizer's own accumulation": (
        "SGD(rate)",
        "SGD(rate, gradient_accumulation_steps=2)",
        "gradient_accumulation_steps",
    ),
    # Ranks
    "verbose is the test for the first rank": (
        FIT,
        f"{FIT}\nif verbose:\n    model.save('a.keras')",
        "verbose is read here, too",
    ),
    "a callback of its own": (
        "hvd.init()",
        "class A(keras.callbacks.Callback):\n    pass\n\nhvd.init()",
        "callback of the script's own",
    ),
    "a callback that reads the rank": (
        "callbacks = [",
        "callbacks = [\n    keras.callbacks.LambdaCallback(lambda e, l: hvd.rank()),",
        "what this callback does",
    ),
    "a callback of the first rank": (
        FIT,
        "if hvd.rank() == 0:\n    callbacks.append(keras.callbacks.EarlyStopping())\n"
        + FIT,
        "only the first rank has this callback",
    ),
    "other callbacks of the other ranks": (
        FIT,
        "if hvd.rank() == 0:\n    callbacks.append(keras.callbacks.CSVLogger('a'))\n"
        f"else:\n    callbacks.append(keras.callbacks.CSVLogger('b'))\n{FIT}",
        "only the first rank has this callback",
    ),
    "callbacks from elsewhere": (
        "callbacks = [",
        "callbacks = make() + [",
        "callbacks",
    ),
    "metrics of a rank": (
        "    hvd.callbacks.MetricAverageCallback(),\n",
        "",
        "there is no MetricAverageCallback",
    ),
    "a callback that reads metrics of a rank": (
        "callbacks = [",
        "callbacks = [\n    keras.callbacks.EarlyStopping(),",
        "before MetricAverageCallback",
    ),
    "the module as a value": (FIT, f"{FIT}\nfinish(hvd)", "hvd is used here"),
    "rows with masks": ("keras.layers.Dense(1)", "keras.layers.Masking()", "each row"),
    "a loss that is a sum": (
        '"mse", m',
        "keras.losses.MeanSquaredError(reduction='sum'), m",
        "reduction= is passed",
    ),
}


@pytest.mark.parametrize("change", MEANT)
def test_dist_fit_never_changes_what_a_script_means(change):
    """It gives Horovod's numbers (`tests/ranks/test_migrated.py`), or is refused."""
    assert fit.migrate(ARRAYS.encode()).is_whole
    old, new, reason, *more = MEANT[change]
    source = ARRAYS.replace(old, new)
    if more:
        source = source.replace(*more)
    assert source != ARRAYS
    done = fit.migrate(source.encode())
    assert done.source == source.encode() and not done.is_whole
    found = [one.text("train.py") for one in done.findings]
    assert any(reason in text for text in found), found


def test_a_seed_is_no_reason_without_an_order_of_rows():
    """`shuffle=False`, or all rows on all ranks, which shuffle as before."""
    seeded = ARRAYS.replace("hvd.init()", "hvd.init()\ntf.random.set_seed(1)")
    for old, new in (("epochs=2", "epochs=2, shuffle=False"), (SHARDS, "")):
        assert fit.migrate(seeded.replace(old, new).encode()).is_whole


def test_dist_fit_begins_with_what_plain_migrate_makes():
    """Lines are those of the file: a session, a generator, a model by another name."""
    config = """\
config = tf.compat.v1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
tf.compat.v1.keras.backend.set_session(tf.compat.v1.Session(config=config))
"""
    source = ARRAYS.replace("hvd.init()\n", f"import tensorflow as tf\n{config}")
    source = source.replace("model", "net").replace("SGD(rate)", "SGD(lr=rate)")
    source = source.replace(SHARDS, "").replace("net.fit(x, y,", "net.fit_generator(x,")
    done = fit.migrate(source.encode())
    assert done.findings == ()
    after = done.source.decode()
    assert "keras_dist.dist_fit(net, x, epochs=2," in after and "hvd" not in after
    assert "set_memory_growth" in after and "set_visible_devices" not in after
    assert "SGD(learning_rate=rate)" in after and "rate = 0.1\n" in after
    source = source.replace("net.fit", "model = net\nmodel.fit")
    assert fit.migrate(source.encode()).is_whole
    source += "print(rate)\n"
    (found,) = fit.migrate(source.encode()).findings
    assert found.line == len(source.splitlines()) and "rate is read" in found.reason


# As ARRAYS, in functions.
IN_FUNCTIONS = """\
import horovod.tensorflow.keras as hvd
from tensorflow import keras

def build(lr):
    net = keras.Sequential([keras.layers.Dense(1)])
    rate = lr * hvd.size()
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(rate))
    net.compile(opt, "mse")
    return net

def train(model, x):
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    callbacks.append(hvd.callbacks.MetricAverageCallback())
    model.fit(x[hvd.rank() :: hvd.size()], callbacks=callbacks)

hvd.init()
net = build(0.1)
train(net, load())
"""


def test_dist_fit_knows_the_model_through_functions():
    """What a function of the file returns, or is given; not another model."""
    done = fit.migrate(IN_FUNCTIONS.encode())
    assert done.findings == () and b"dist_fit(model, x, callbacks" in done.source
    assert b"rate = lr\n" in done.source
    # What it returns is of all rows already, with the MetricAverageCallback.
    read = "\n    print(history.history['loss'])\n\nhvd.init()"
    source = IN_FUNCTIONS.replace("    model.fit", "    history = model.fit")
    source = source.replace("\nhvd.init()", read)
    assert fit.migrate(source.encode()).findings == ()
    for old, new in (
        ("train(net", "train(other"),
        ("    return net", "    return keras.Sequential()"),
    ):
        source = IN_FUNCTIONS.replace(old, new).encode()
        assert fit.migrate(source).source == source


def test_data_that_is_not_sharded_stays_so():
    """Each rank reads all of it then, also if it makes fewer steps."""
    plain = PLAIN.replace(".shard(hvd.size(), hvd.rank())", "")
    assert b'    shard="none",\n' in fit.migrate(plain.encode()).source
    plain = plain.replace("    steps_per_epoch=500 // hvd.size(),\n", "")
    assert b'    shard="none",\n' in fit.migrate(plain.encode()).source


def test_the_names_that_the_module_has_not_are_known():
    """Of Horovod's for TensorFlow; all others may be used after a migration."""
    for name in MISSING:
        assert not hasattr(keras_dist.horovod, name.split(".")[-1])
    plain = "import tensorflow.keras\nimport horovod.tensorflow as hvd\n"
    for name in keras_dist.horovod.__all__:
        assert migrate(f"{plain}hvd.{name}".encode()).is_whole


@pytest.mark.parametrize("change", UNSCALED, ids=lambda change: change[1])
def test_what_a_script_does_not_scale_dist_fit_does_not_scale(change):
    """It is passed as an option."""
    source = PLAIN
    for old, new in zip(change[::2], change[1::2], strict=True):
        source = source.replace(old, new)
    assert f"    {UNSCALED[change]},\n" in fit.migrate(source.encode()).source.decode()


def _command(*arguments, folder, expected):
    done = subprocess.run(
        [sys.executable, "-m", "keras_dist", "migrate", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        errors="surrogateescape",
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done


def _apply(done, folder):
    """Apply a difference as a user would."""
    text = done.stdout.encode("utf-8", "surrogateescape")
    subprocess.run(["git", "apply"], cwd=folder, input=text, check=True)


def test_the_command_prints_a_diff_that_git_applies_and_writes_on_request(tmp_path):
    """A folder at once; what is left makes the exit code 1."""
    (tmp_path / "src").mkdir()
    (tmp_path / ".venv").mkdir()
    script, other = tmp_path / "src" / "train.py", tmp_path / "src" / "data.py"
    script.write_text("import horovod.keras as hvd\nhvd.init()")
    other.write_text("import numpy\n")
    (tmp_path / ".venv" / "a.py").write_text("import horovod.keras as hvd\n")
    done = _command("src", folder=tmp_path, expected=0)
    assert done.stderr == ""
    assert script.read_text().startswith("import horovod.keras")
    _apply(done, tmp_path)
    applied = script.read_text()
    script.write_text("import horovod.keras as hvd\nhvd.init()")
    script.chmod(0o750)
    assert _command(".", "--write", folder=tmp_path, expected=0).stdout == done.stdout
    assert (
        script.read_text() == applied == "import keras_dist.horovod as hvd\nhvd.init()"
    )
    assert script.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in script.parent.iterdir()) == [
        *("data.py", "train.py")
    ]
    script.write_text(KERAS + "x = K.get_value(model.weights[0])\n")
    done = _command(script, folder=tmp_path, expected=1)
    assert f"{script}:3: not changed: " in done.stderr and done.stdout == ""


def test_what_is_not_a_script_is_said_and_the_others_are_changed(tmp_path):
    """Files that are missing, unreadable or notebooks; a folder without a script."""
    source = b"# -*- coding: latin-1 -*-\n# \xe9\n\x0c\nimport horovod.keras as hvd\n"
    script = tmp_path / "train.py"
    script.write_bytes(source)
    (tmp_path / "book.ipynb").write_text('["import horovod.keras as hvd"]')
    (tmp_path / "other.ipynb").write_text('["import numpy"]')
    (tmp_path / "broken.py").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    done = _command(".", "--write", folder=tmp_path, expected=1)
    expected = source.replace(b"horovod.keras", b"keras_dist.horovod")
    assert script.read_bytes() == expected
    assert done.stderr.count("\n") == 1
    assert "book.ipynb:1: not changed: this is a notebook" in done.stderr
    assert _command("train.py", "--write", folder=tmp_path, expected=0).stdout == ""
    script.write_bytes(source)
    _apply(_command("train.py", folder=tmp_path, expected=0), tmp_path)
    assert script.read_bytes() == expected
    done = _command("missing.py", folder=tmp_path, expected=1)
    assert "no such file or folder" in done.stderr
    done = _command("/proc/self/mem", folder=tmp_path, expected=1)
    assert "the file cannot be read (Input/output error)" in done.stderr
    done = _command("empty", folder=tmp_path, expected=1)
    assert "no script in this folder. Received: empty" in done.stderr


def test_without_libcst_the_command_says_how_to_install_it(tmp_path):
    """It is needed by this command alone."""
    (tmp_path / "libcst.py").write_text("raise ModuleNotFoundError(name='libcst')")
    done = subprocess.run(
        [sys.executable, "-m", "keras_dist", "migrate", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{PYTHONPATH}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "pip install 'keras-dist[migrate]'" in done.stderr


def test_every_module_of_the_tool_is_python_3_11():
    """Each expected text, too."""
    for after in CHANGES.values():
        ast.parse(after)
