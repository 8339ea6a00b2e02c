"""adapt: domain adaptation by DANN, with three tapes and three optimizers."""

import keras
from adapt.feature_based import DANN
from adapt.utils import make_classification_da

keras.utils.set_random_seed(1)
source, labels, target, target_labels = make_classification_da(
    n_samples=60, n_features=4, random_state=1
)
encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh")])
task = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
judge = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
model = DANN(
    encoder,
    task,
    judge,
    lambda_=0.5,
    Xt=target,
    loss="binary_crossentropy",
    optimizer=keras.optimizers.Adam(0.01),
    metrics=["acc"],
    random_state=1,
)
model.fit(source, labels, epochs=4, batch_size=16, verbose=0)
print("score", model.score(target, target_labels))
for part in (model.encoder_, model.task_, model.discriminator_):
    for weight in part.get_weights():
        print("weights", *weight.ravel())
