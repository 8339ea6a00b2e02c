"""scikeras: a `KerasClassifier` in scikit-learn's `GridSearchCV`."""

import keras
from scikeras.wrappers import KerasClassifier
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV

keras.utils.set_random_seed(1)
x, y = load_digits(return_X_y=True)
x, y = x[:400] / 16, y[:400]


def build(units):
    layers = [
        keras.Input((64,)),
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    return keras.Sequential(layers)


classifier = KerasClassifier(
    build,
    units=4,
    loss="sparse_categorical_crossentropy",
    optimizer="adam",
    optimizer__learning_rate=0.01,
    batch_size=50,
    epochs=3,
    random_state=1,
    verbose=0,
)
search = GridSearchCV(classifier, {"units": [4, 8], "batch_size": [25, 50]}, cv=2)
search.fit(x, y)
weights = search.best_estimator_.model_.get_weights()
print(search.best_params_, search.cv_results_["mean_test_score"])
for weight in weights:
    print("weights", *weight.ravel())
