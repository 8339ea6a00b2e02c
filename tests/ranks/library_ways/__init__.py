"""Small models of libraries, made from configurations, as `keras_ways` are made."""

from library_ways.hub import HUB
from library_ways.pictures import PICTURES
from library_ways.recommenders import RECOMMENDERS

WAYS = [way for registry in (HUB, RECOMMENDERS, PICTURES) for way in registry.ways]
