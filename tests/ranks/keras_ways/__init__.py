"""Small models, each one way to train that keras.io shows, in words of our own."""

from keras_ways.contrast import CONTRAST
from keras_ways.generative import GENERATIVE
from keras_ways.loops import LOOPS
from keras_ways.noise import NOISE
from keras_ways.structured import STRUCTURED
from keras_ways.text import TEXT
from keras_ways.vision import VISION

WAYS = [
    way
    for registry in (GENERATIVE, CONTRAST, TEXT, VISION, STRUCTURED, NOISE, LOOPS)
    for way in registry.ways
]
