"""Small models of libraries, made from configurations, as `keras_ways` are made."""

from harness.library_ways.hub import HUB
from harness.library_ways.pictures import PICTURES
from harness.library_ways.recommenders import RECOMMENDERS

WAYS = [way for registry in (HUB, RECOMMENDERS, PICTURES) for way in registry.ways]
