"""Random small configurations, each a function of its seed alone."""

import random
from typing import Any

import keras
import numpy as np
import parts
from cases import OPTIMIZERS, Case, optimizer_names
from parts import Parts

# Models that take a weight for each row; the others have several targets or words.
_WEIGHTED = {"perceptron", "unbuilt", "regularized", "convolution", "repeated names"}

_SUBJECTS = [
    *_WEIGHTED,
    "embedding",
    "large embedding",
    "tagger",
    "normalized",
    "own loss",
    "own step",
    "two inputs",
]

_CLIPS = [{}, {}, {"clipnorm": 0.05}, {"global_clipnorm": 0.05}, {"clipvalue": 0.02}]


# The fraction of cases that are put together from parts.
_OF_PARTS = 0.7


def draw(seed: int) -> tuple[int, Case | Parts]:
    """How many ranks, and what they train."""
    draws = random.Random(seed)
    size = draws.choice([2, 3])
    if draws.random() < _OF_PARTS:
        return size, parts.draw(seed, draws)
    return size, _case(seed, draws)


def _case(seed: int, draws: random.Random) -> Case:
    subject = draws.choice(sorted(_SUBJECTS))
    arguments: dict[str, Any] = {}
    rows = draws.randint(6, 30)
    if draws.random() < 0.4:
        arguments["shuffle"] = True
    if subject in _WEIGHTED and draws.random() < 0.4:
        weights = np.random.default_rng(seed).uniform(0.1, 2, rows)
        arguments["sample_weight"] = weights.astype("float32")
    name, optimizer = _optimizer(draws)
    how, compiled = _compiled(draws)
    case = Case(
        "fuzz",
        f"{seed}: {subject}, {name}, {how}, {rows} rows, {', '.join(arguments)}",
        subject,
        optimizer,
        rows=rows,
        batch_size=draws.randint(3, 9),
        compiled=compiled,
        arguments=arguments,
        orders=12,
    )
    return case.shared if draws.random() < 0.4 else case


def _optimizer(draws: random.Random) -> tuple[str, Any]:
    name = draws.choice(sorted(set(OPTIMIZERS) & optimizer_names()))
    arguments: dict[str, Any] = dict(draws.choice(_CLIPS))
    arguments["gradient_accumulation_steps"] = draws.choice([None, None, 2, 3])
    if draws.random() < 0.3:
        arguments["weight_decay"] = 0.01
    if draws.random() < 0.2:
        arguments["use_ema"] = True
    text = ", ".join(f"{key}={value}" for key, value in arguments.items() if value)
    cls = getattr(keras.optimizers, name)
    return f"{name}({text})", lambda rate: cls(learning_rate=rate, **arguments)


def _compiled(draws: random.Random) -> tuple[str, dict[str, Any]]:
    kind = draws.random()
    if kind < 0.85:
        return "eager", {}
    if kind < 0.88:
        return "XLA", {"run_eagerly": False, "jit_compile": True}
    steps = draws.randint(1, 3)
    return f"graph of {steps}", {"run_eagerly": False, "steps_per_execution": steps}
