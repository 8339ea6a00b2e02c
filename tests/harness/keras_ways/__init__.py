"""Small models, each one way to train that keras.io shows, in words of our own."""

from harness.keras_ways.contrast import CONTRAST
from harness.keras_ways.generative import GENERATIVE
from harness.keras_ways.loops import LOOPS
from harness.keras_ways.noise import NOISE
from harness.keras_ways.structured import STRUCTURED
from harness.keras_ways.text import TEXT
from harness.keras_ways.vision import VISION

WAYS = [
    way
    for registry in (GENERATIVE, CONTRAST, TEXT, VISION, STRUCTURED, NOISE, LOOPS)
    for way in registry.ways
]
