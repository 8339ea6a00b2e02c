"""Small models, each one way to train that keras.io shows, in words of our own."""

from keras_ways.contrast import CONTRAST
from keras_ways.generative import GENERATIVE
from keras_ways.text import TEXT

WAYS = [*GENERATIVE.ways, *CONTRAST.ways, *TEXT.ways]
