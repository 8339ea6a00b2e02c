"""Sequences: words, masks, attention, recurrent layers, speech."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from harness.keras_ways.data import Tracked, floats, integers, padded
from harness.keras_ways.way import ROWS, Registry
from harness.models import update

TEXT = Registry("text and speech")

WORDS = 9

# Keras's Adam squares each slice of an embedding's gradient, SGD adds them up.
ADAM, SGD = keras.optimizers.Adam, keras.optimizers.SGD


class Block(keras.layers.Layer):
    """Attention, two dense layers, and what normalizes their sums."""

    def __init__(self, width, *, is_causal=False):
        super().__init__()
        self.supports_masking = True
        self.is_causal = is_causal
        self.attention = keras.layers.MultiHeadAttention(2, width // 2)
        self.dense = [keras.layers.Dense(5, "relu"), keras.layers.Dense(width)]
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]

    def call(self, x, mask=None):
        found = self.attention(
            x,
            x,
            attention_mask=None if mask is None else mask[:, None, :],
            use_causal_mask=self.is_causal,
        )
        x = self.norms[0](x + found)
        return self.norms[1](x + self.dense[1](self.dense[0](x)))


class WordsAndPositions(keras.layers.Layer):
    """The sum of two embeddings; the mask is that of the words."""

    def __init__(self, length, width, *, mask_zero=True):
        super().__init__()
        self.words = keras.layers.Embedding(WORDS, width, mask_zero=mask_zero)
        self.positions = keras.layers.Embedding(length, width)

    def call(self, x):
        return self.words(x) + self.positions(ops.arange(0, ops.shape(x)[-1]))

    def compute_mask(self, x, mask=None):
        return self.words.compute_mask(x)


def language_model():
    """Logits of the words of six positions."""
    inputs = keras.Input((6,), dtype="int32")
    x = Block(4)(WordsAndPositions(6, 4, mask_zero=False)(inputs))
    return inputs, keras.layers.Dense(WORDS)(x)


def masked_words():
    """Words of which some are hidden, the words, and 1 where one is hidden."""
    y = integers(WORDS, 6, low=2)
    hidden = (np.arange(ROWS)[:, None] + 2 * np.arange(6)[None, :]) % 3 == 0
    return np.where(hidden, 1, y), y, hidden.astype(keras.config.floatx())


@TEXT.way("masked language model, weights of the words")
def masked_language_model(run):
    model = keras.Model(*language_model())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, SGD(0.1), loss, weighted_metrics=["accuracy"])
    return model, run.fit(model, run.batches(*masked_words()), epochs=2)


class MaskedLanguageModel(keras.Model):
    """A loss for each word, differentiated and logged as it is."""

    tracker = None

    def compile(self, *args, **arguments):
        super().compile(*args, **arguments)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, self(x, training=True), from_logits=True
            )
            losses *= 0.1 * weight
        update(tape, losses, self.optimizer, self)
        self.tracker.update_state(losses, sample_weight=weight)
        return {"loss": self.tracker.result()}


@TEXT.way("masked language model, a loss for each word")
def masked_language_model_of_vectors(run):
    model = run.compile(MaskedLanguageModel(*language_model()), SGD(0.01))
    return model, run.fit(model, run.batches(*masked_words()))


@TEXT.way("transformer with masks: a class for each text", is_traced=True)
def transformer(run):
    inputs = keras.Input((6,), dtype="int32")
    x = Block(4)(WordsAndPositions(6, 4)(inputs))
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(x))
    run.compile(model, SGD(0.1), "sparse_categorical_crossentropy", metrics=["acc"])
    x, y = padded(WORDS, 6), integers(2)
    return model, run.fit(model, x, y, validation_data=(x[:9], y[:9]))


@TEXT.way("transformer with masks: a tag for each word")
def tagger(run):
    inputs = keras.Input((6,), dtype="int32")
    x = Block(4)(WordsAndPositions(6, 4)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, SGD(0.1), loss)
    x = padded(WORDS, 6)
    # The logged loss is a mean of the batches', each of which has its own divisor.
    run.fit(model, x, x % 3)
    return model


@TEXT.way(
    "small GPT: causal attention, the next word, an output without loss", is_traced=True
)
def small_gpt(run):
    inputs = keras.Input((6,), dtype="int32")
    x = Block(4, is_causal=True)(WordsAndPositions(6, 4, mask_zero=False)(inputs))
    model = keras.Model(inputs, [keras.layers.Dense(WORDS)(x), x])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, SGD(0.1), loss=[loss, None])
    data = run.batches(integers(WORDS, 7))
    return model, run.fit(model, data.map(lambda row: (row[:, :-1], row[:, 1:])))


@TEXT.way("LSTM from sequence to sequence, dicts of padded words")
def sequence_to_sequence(run):
    source = keras.Input((5,), dtype="int32", name="source")
    target = keras.Input((4,), dtype="int32", name="target")
    x = keras.layers.Embedding(WORDS, 4, mask_zero=True)(source)
    _, *state = keras.layers.LSTM(3, return_state=True)(x)
    x = keras.layers.Embedding(WORDS, 4, mask_zero=True)(target)
    x = keras.layers.LSTM(3, return_sequences=True)(x, initial_state=state)
    outputs = keras.layers.Dense(WORDS, activation="softmax")(x)
    model = keras.Model({"source": source, "target": target}, outputs)
    run.compile(model, ADAM(0.01), "sparse_categorical_crossentropy")
    words = padded(WORDS, 5, seed=2)
    given = {"source": padded(WORDS, 5), "target": words[:, :-1]}
    run.fit(model, given, words[:, 1:])
    return model


@TEXT.way("characters as vectors, LSTM with a state that is passed on", is_traced=True)
def character_model(run):
    source, target = keras.Input((None, 4)), keras.Input((None, 4))
    _, *state = keras.layers.LSTM(3, return_state=True)(source)
    x, *_ = keras.layers.LSTM(3, return_sequences=True, return_state=True)(
        target, initial_state=state
    )
    model = keras.Model([source, target], keras.layers.Dense(4, "softmax")(x))
    optimizer = keras.optimizers.RMSprop(0.01)
    run.compile(model, optimizer, "categorical_crossentropy", metrics=["accuracy"])
    letters = np.eye(4, dtype=keras.config.floatx())
    words = [letters[integers(4, 4, seed=seed)] for seed in range(3)]
    return model, run.fit(model, words[:2], words[2], validation_split=0.09)


@TEXT.way("bidirectional LSTM of padded words")
def bidirectional(run):
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(WORDS, 4, mask_zero=True),
            keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True)),
            keras.layers.Bidirectional(keras.layers.GRU(2)),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    run.compile(model, ADAM(0.01), "binary_crossentropy", metrics=["accuracy"])
    return model, run.fit(model, padded(WORDS, 5), integers(2))


@TEXT.way("CTC of speech", rounds_as="float32")
def ctc(run):
    model = _recognizer()
    run.compile(model, keras.optimizers.Adam(0.01), keras.losses.CTC())
    return model, run.fit(model, floats(8, 3), integers(5, 3, low=1))


class CtcLayer(keras.layers.Layer):
    """Adds the loss of each row, and passes the predictions on."""

    def call(self, labels, scores):
        rows = ops.shape(labels)[0]
        lengths = [ops.full((rows,), size, "int32") for size in (3, 8)]
        losses = ops.ctc_loss(labels, scores, *lengths, mask_index=0)
        self.add_loss(0.1 * losses[:, None])
        return scores


@TEXT.way("CTC in a layer that adds one loss a row", rounds_as="float32")
def ctc_layer(run):
    pictures = keras.Input((8, 3), name="pictures")
    labels = keras.Input((3,), dtype="int32", name="labels")
    outputs = CtcLayer()(labels, _recognizer()(pictures))
    inputs = {"pictures": pictures, "labels": labels}
    model = keras.Model(inputs, outputs)
    run.compile(model, keras.optimizers.SGD(0.01))
    given = {"pictures": floats(8, 3), "labels": integers(5, 3, low=1)}
    return model, run.fit(model, run.batches(given))


def _recognizer():
    return keras.Sequential(
        [
            keras.Input((8, 3)),
            keras.layers.Conv1D(4, 3, padding="same", activation="relu"),
            keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True)),
            keras.layers.Dense(5),
        ]
    )


class Speech(Tracked):
    """Calls itself with something else than the batch: the target but its end."""

    def __init__(self):
        super().__init__()
        self.sound = keras.layers.Dense(4, activation="tanh")
        self.words = keras.layers.Embedding(WORDS, 4)
        self.attention = keras.layers.MultiHeadAttention(1, 4)
        self.outputs_of = keras.layers.Dense(WORDS)

    def call(self, inputs):
        sound, words = inputs
        found = self.attention(self.words(words), self.sound(sound))
        return self.outputs_of(found)

    def loss_of(self, batch):
        target = batch["target"]
        scores = self([batch["source"], target[:, :-1]])
        one_hot = ops.one_hot(target[:, 1:], WORDS)
        mask = ops.cast(ops.not_equal(target[:, 1:], 0), scores.dtype)
        return self.compute_loss(None, one_hot, scores, sample_weight=mask)


@TEXT.way("speech recognition: a step that calls the model with shifted words")
def speech(run):
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model = run.compile(Speech(), keras.optimizers.SGD(0.1), loss)
    given = {"source": floats(7, 3), "target": padded(WORDS, 5)}
    data = run.batches(given)
    return model, run.fit(model, data, validation_data=data)


def _texts():
    words = np.array(["the", "cat", "dog", "saw", "a", "tree", "and", "ran", "far"])
    return [" ".join(words[row]) for row in integers(9, 5)]


@TEXT.way("TextVectorization in the model")
def vectorization_in_model(run):
    vectorize = keras.layers.TextVectorization(WORDS, output_sequence_length=5)
    vectorize.adapt(_texts())
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            vectorize,
            keras.layers.Embedding(WORDS, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    run.compile(model, SGD(0.1), "mse", run_eagerly=False)
    texts = np.array(_texts())[:, None]
    return model, run.fit(model, run.batches(texts, floats()))


@TEXT.way("TextVectorization in the pipeline, bigrams in one vector")
def vectorization_in_pipeline(run):
    texts = _texts()
    vectorize = keras.layers.TextVectorization(
        12, output_mode="multi_hot", ngrams=2, standardize="lower"
    )
    vectorize.adapt(tf.data.Dataset.from_tensor_slices(texts).batch(5))
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
    run.compile(model, keras.optimizers.Adam(0.01), "mse")
    data = run.batches(texts, floats())
    data = data.map(lambda x, y: (vectorize(x), y), num_parallel_calls=2)
    return model, run.fit(model, data.cache().prefetch(tf.data.AUTOTUNE))


@TEXT.way("LoRA: a trained model, and then its low-rank changes", rounds_as="float32")
def low_rank(run):
    words = keras.layers.Embedding(WORDS, 4)
    dense = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), words, keras.layers.Flatten(), *dense]
    )
    run.compile(model, SGD(0.1), "mse")
    x, y = integers(WORDS, 5), floats()
    first = run.fit(model, x, y)
    for layer in (words, dense[0]):
        layer.enable_lora(2)
    dense[1].trainable = False
    run.compile(model, SGD(0.1), "mse")
    return model, first, run.fit(model, x, y)
