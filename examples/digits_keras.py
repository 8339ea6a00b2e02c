"""Handwritten digits with plain Keras, trained on two processes without a change.

    keras-dist run -np 2 --distribute examples/digits_keras.py

Augmentation, batch normalization, dropout and early stopping: any number of processes
prints the same losses, and stops after the same epoch. `examples/digits.py` calls
`dist_fit` instead.
"""

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)  # 1,797 rows of 8 × 8 pixels, 0 to 16
images = images.reshape(-1, 8, 8, 1) / 16
x, x_val, y, y_val = train_test_split(images, labels, random_state=0)

model = keras.Sequential([keras.Input((8, 8, 1))])
model.add(layers.RandomTranslation(0.1, 0.1))
model.add(layers.RandomZoom(0.1))
for filters in (8, 16):
    model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
    model.add(layers.BatchNormalization())
    model.add(layers.ReLU())
    model.add(layers.MaxPooling2D())
    model.add(layers.SpatialDropout2D(0.05))
model.add(layers.Flatten())
model.add(layers.Dropout(0.2))
model.add(layers.Dense(10, activation="softmax"))

optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
stop = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
held_out = {"validation_data": (x_val, y_val), "callbacks": [stop]}
history = model.fit(x, y, batch_size=64, epochs=30, **held_out, verbose=2)
print("losses", *(f"{loss:.4f}" for loss in history.history["val_loss"]))
loss, accuracy = model.evaluate(x_val, y_val, verbose=0)
print(f"validation accuracy {accuracy:.1%}")
