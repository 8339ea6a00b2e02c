"""Is anything averaged? Each rank's weights, after an epoch on its part of the rows.

    keras-dist run -np 2 examples/falsify.py

With Horovod's own optimizer on Keras 3 the ranks print different numbers: each has
trained a model of its own. With that of keras_dist they print the same.
"""

import hashlib

import horovod.tensorflow.keras as hvd
import keras
from sklearn.datasets import load_digits

import keras_dist

keras_dist.init()  # Horovod, too
rank, size = keras_dist.rank(), keras_dist.size()
images, labels = load_digits(return_X_y=True)
x, y = images[rank:1792:size] / 16, labels[rank:1792:size]

for library in (hvd, keras_dist):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, "softmax")])
    optimizer = library.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    weights = b"".join(each.tobytes() for each in model.get_weights())
    digest = hashlib.sha256(weights).hexdigest()[:12]
    lines = keras_dist.gather(f"rank {rank} of {size}: {library.__name__} {digest}")
    if rank == 0:
        print(*lines, sep="\n", flush=True)
