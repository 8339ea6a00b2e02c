#!/usr/bin/env bash
# A rank is killed in the middle of an epoch; the same command goes on; the weights are
# those of an undisturbed training, to the bit.
set -eu
cd "$(mktemp -d)"
cat > train.py <<'PYTHON'
import hashlib, os, signal, sys
import keras, numpy as np
import keras_dist

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if os.environ.get("KILL") and self.model.optimizer.iterations == 50:
            if keras_dist.rank() == 1:
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(1024, 20)).astype("float32")
model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.2)])
model.add(keras.layers.Dense(1))
model.compile("adam", "mse")
keras_dist.dist_fit(
    model, x, x.sum(axis=1), batch_size=32, epochs=3, batch="global", verbose=2,
    resume=sys.argv[1], save_steps=20, callbacks=[Kill()],
)
if keras_dist.rank() == 0:
    weights = b"".join(each.tobytes() for each in model.get_weights())
    print("weights", hashlib.sha256(weights).hexdigest()[:16])
PYTHON

echo "== undisturbed"
keras-dist run -np 2 train.py undisturbed | grep weights
echo "== rank 1 is killed at step 50"
KILL=1 keras-dist run -np 2 train.py disturbed ||
    echo "exit code $?, $(($(date +%s) - $(stat -c %Y killed))) s after the kill"
echo "== the same command again"
keras-dist run -np 2 train.py disturbed | grep -e resume -e weights
