"""KerasHub: language models and classifiers."""

import keras
import keras_hub
import numpy as np

from harness.keras_ways.data import integers, padded
from harness.keras_ways.way import ROWS, Registry

HUB = Registry("KerasHub", is_traced=True)

_LENGTH = 8
# Backbones of two layers.
_SMALL = {"num_layers": 2, "hidden_dim": 8, "intermediate_dim": 16}
_DECODER = _SMALL | {"vocabulary_size": 40}
_GROUPED = _DECODER | {"num_query_heads": 2, "num_key_value_heads": 1}
_HEADS = {"num_heads": 2, "dropout": 0.0, "max_sequence_length": _LENGTH}
_WORDS = ["the", "rank", "sends", "what", "it", "sums", "and", "waits"]


def sentences():
    """A sentence for each row, of one to eight words."""
    order = integers(len(_WORDS), len(_WORDS))
    lengths = 1 + np.arange(ROWS) * 5 % len(_WORDS)
    return [
        " ".join(_WORDS[word] for word in row[:length])
        for row, length in zip(order, lengths, strict=True)
    ]


def tokens():
    """Padded tokens, the tokens that follow them, and which of these count."""
    ids = padded(40, _LENGTH + 1)
    x = {"token_ids": ids[:, :-1], "padding_mask": (ids[:, :-1] > 0).astype("int32")}
    return x, ids[:, 1:], (ids[:, 1:] > 0).astype(keras.config.floatx())


def gpt2(preprocessor=None, **kwargs):
    """A GPT-2 of two layers."""
    backbone = keras_hub.models.GPT2Backbone(**_DECODER, **_HEADS, **kwargs)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)


def gpt2_preprocessor():
    """A tokenizer of letters and of some merged ones."""
    letters = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    pairs = ["t h", "th e", "Ġ the", "i t"]
    pieces = [*letters, *(pair.replace(" ", "") for pair in pairs)]
    return keras_hub.models.GPT2CausalLMPreprocessor(
        keras_hub.models.GPT2Tokenizer(
            {piece: index for index, piece in enumerate(pieces)}, pairs
        ),
        sequence_length=_LENGTH,
    )


def gemma(**kwargs):
    """A Gemma of two layers."""
    backbone = keras_hub.models.GemmaBackbone(**_GROUPED, head_dim=4, **kwargs)
    return keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)


def mixtral(balancing):
    """A Mixtral of two layers, each of four experts of which a token takes two.

    Args:
        balancing: Coefficient of the loss that balances the load of the experts.
    """
    backbone = keras_hub.models.MixtralBackbone(
        **_GROUPED, num_experts=4, router_aux_loss_coef=balancing
    )
    return keras_hub.models.MixtralCausalLM(backbone, preprocessor=None)


def classifying(metrics="metrics"):
    """Loss and accuracy of a classifier, as an argument of `compile` by this name."""
    return {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics: [keras.metrics.SparseCategoricalAccuracy()],
    }


def next_token():
    """Loss and metrics of a language model, without what it would take by itself."""
    return {"metrics": None} | classifying("weighted_metrics")


def train_tokens(run, model, **how):
    """Two epochs from arrays of tokens, with a validation."""
    optimizer = how.pop("optimizer", None) or keras.optimizers.Adam(1e-3)
    run.compile(model, optimizer, **next_token(), **how)
    x, y, weights = tokens()
    some = {name: array[:9] for name, array in x.items()}
    given = {"sample_weight": weights, "validation_data": (some, y[:9], weights[:9])}
    return model, run.fit(model, x, y, epochs=2, **given)


# Decorators are applied from the last to the first, which is the order of the ways. A
# Mixtral of another dtype is an error of KerasHub, which mixes it with float32.
@HUB.way("Gemma from token arrays", gemma, rounds_as="float32")
@HUB.way(
    "Mixtral without its load-balancing loss",
    lambda: mixtral(0.0),
    on_three=True,
    dtypes=("float32",),
)
@HUB.way("GPT-2 from token arrays", gpt2, on_three=True)
def from_tokens(run, make):
    return train_tokens(run, make())


@HUB.way("GPT-2 with XLA")
def gpt2_xla(run):
    return train_tokens(run, gpt2(), jit_compile=True)


@HUB.way("GPT-2 in mixed_bfloat16", on_three=True, rounds_as="bfloat16")
def gpt2_bfloat16(run):
    return train_tokens(
        run, gpt2(dtype="mixed_bfloat16"), optimizer=keras.optimizers.SGD(0.1)
    )


# Keras makes the weights of LoRA in float32.
_LORA = {"rounds_as": "float32"}


@HUB.way("Gemma with LoRA in int8", gemma, True, **_LORA)
@HUB.way("Gemma with LoRA", gemma, False, on_three=True, **_LORA)
@HUB.way("GPT-2 with LoRA in int8", gpt2, True, **_LORA)
@HUB.way("GPT-2 with LoRA", gpt2, False, on_three=True, **_LORA)
def low_rank(run, make, is_int8):
    model = make()
    if is_int8:
        model.quantize("int8")
    model.backbone.enable_lora(rank=2)
    return train_tokens(run, model)


@HUB.way("GPT-2 from strings")
def gpt2_strings(run):
    model = gpt2(gpt2_preprocessor())
    run.compile(model, keras.optimizers.Adam(1e-3), **next_token())
    given = {"epochs": 2, "validation_data": (sentences()[:9], None)}
    return model, run.fit(model, sentences(), **given)


@HUB.way("GPT-2 from strings, by its own compile and with XLA")
def gpt2_default(run):
    model = run.compile(gpt2(gpt2_preprocessor()), jit_compile=True)
    return model, run.fit(model, sentences(), epochs=2)


@HUB.way("GPT-2 from a data set of strings")
def gpt2_dataset(run):
    model = gpt2(gpt2_preprocessor())
    run.compile(model, keras.optimizers.Adam(1e-3), **next_token())
    return model, run.fit(model, run.batches(sentences()), epochs=2)


def bert():
    """A classifier of sentences in three classes."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
        keras_hub.models.BertTokenizer(special + _WORDS, lowercase=True),
        sequence_length=_LENGTH,
    )
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(special) + len(_WORDS), **_SMALL, **_HEADS
    )
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=3, preprocessor=preprocessor, dropout=0.0
    )


@HUB.way("BERT classifier from strings")
def bert_strings(run):
    model, y = bert(), integers(3)
    run.compile(model, keras.optimizers.AdamW(1e-3), **classifying())
    given = {"epochs": 2, "validation_data": (sentences()[:9], y[:9])}
    return model, run.fit(model, sentences(), y, **given)


@HUB.way("BERT classifier from a data set of strings", on_three=True)
def bert_dataset(run):
    model = bert()
    run.compile(model, keras.optimizers.AdamW(1e-3), **classifying())
    data = run.batches(sentences(), integers(3))
    return model, run.fit(model, data, epochs=2)


@HUB.way("BERT classifier from strings, by its own compile")
def bert_default(run):
    model = run.compile(bert())
    return model, run.fit(model, sentences(), integers(3), epochs=2)


def vit():
    """A classifier of pictures in three classes."""
    converter = keras_hub.layers.ViTImageConverter(image_size=(16, 16), scale=1 / 255)
    preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(converter)
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(16, 16, 3),
        patch_size=(8, 8),
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    )
    return keras_hub.models.ViTImageClassifier(
        backbone, num_classes=3, pooling="token", preprocessor=preprocessor
    )


@HUB.way("ViT classifier with its preprocessor", on_three=True)
def vit_pictures(run):
    model = vit()
    run.compile(model, keras.optimizers.SGD(0.1), **classifying())
    x, y = integers(256, 20, 20, 3).astype("uint8"), integers(3)
    return model, run.fit(model, x, y, epochs=2, validation_data=(x[:9], y[:9]))


@HUB.way("ViT classifier by its own compile, from a data set, with XLA")
def vit_default(run):
    model = run.compile(vit(), jit_compile=True)
    data = run.batches(integers(256, 20, 20, 3).astype("uint8"), integers(3))
    return model, run.fit(model, data, epochs=2)


@keras.saving.register_keras_serializable()
class Pyramid(keras.Model):
    """Convolutions, and their outputs of three sizes."""

    def __init__(self, **kwargs):
        image = keras.Input((64, 64, 3))
        conv = {"padding": "same", "activation": "tanh"}
        x = keras.layers.Conv2D(4, 3, strides=4, **conv)(image)
        levels = {}
        for level in (3, 4, 5):
            x = keras.layers.Conv2D(4, 3, strides=2, **conv)(x)
            levels[f"P{level}"] = x
        super().__init__(image, x, **kwargs)
        self.pyramid_outputs = levels

    def get_config(self):
        """Its name."""
        return {"name": self.name}


def retinanet():
    """A detector of three classes in pictures of 64 by 64."""
    backbone = keras_hub.models.RetinaNetBackbone(
        Pyramid(), min_level=3, max_level=5, use_p5=False, image_shape=(64, 64, 3)
    )
    return keras_hub.models.RetinaNetObjectDetector(
        backbone, num_classes=3, pre_logits_num_conv_layers=1
    )


def boxes():
    """Up to three boxes for each picture, and none in some."""
    low, size = integers(28, 3, 2), 8 + integers(28, 3, 2, seed=1)
    labels = integers(3, 3)
    counts = np.arange(ROWS) * 5 % 4 * (np.arange(ROWS) % 8 < 4)
    is_there = np.arange(3) < counts[:, None]
    corners = np.concatenate([low, low + size], axis=-1).astype("float32")
    return {
        "boxes": np.where(is_there[..., None], corners, -1.0).astype("float32"),
        "labels": np.where(is_there, labels, -1).astype("float32"),
    }


@HUB.way("RetinaNet", on_three=True)
def retinanet_arrays(run):
    # With SGD, which shows a wrong factor.
    model, y = retinanet(), boxes()
    x = integers(256, 64, 64, 3) / 255
    run.compile(model, keras.optimizers.SGD(1e-3, momentum=0.9))
    some = {name: array[:9] for name, array in y.items()}
    history = run.fit(model, x, y, epochs=2)
    return model, history, model.evaluate(x[:9], some, verbose=0)
