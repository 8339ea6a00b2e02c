"""Change the behavior of one object in place, and take the change back."""

from typing import Any

# Where Python keeps the class of every object. A class made here answers
# `__class__` with the object's own class, so this is the only way to set it.
_CLASS = object.__dict__["__class__"]
_made: dict[tuple[type, type], type] = {}


def add(target: Any, mixin: type) -> None:
    """Put `mixin` in front of the class of `target`; a second time does nothing.

    State is kept, and whoever asks for `target.__class__` (Keras does when it
    saves) still gets the object's own class: nothing of this package gets into a
    file. Methods of `mixin` reach the object's own ones with `super()`.

    >>> class Loud:
    ...     def greet(self):
    ...         return super().greet().upper()
    >>> class Person:
    ...     def greet(self):
    ...         return "hello"
    >>> ada = Person()
    >>> add(ada, Loud)
    >>> ada.greet(), ada.__class__.__name__, has(ada, Loud)
    ('HELLO', 'Person', True)
    >>> remove(ada, Loud)
    >>> ada.greet(), has(ada, Loud)
    ('hello', False)
    """
    if has(target, mixin):
        return
    own = type(target)
    if (mixin, own) not in _made:
        plain = target.__class__
        _made[mixin, own] = type(
            own.__name__,
            (mixin, own),
            {
                "__class__": property(lambda self: plain),
                "__module__": own.__module__,
                "__qualname__": own.__qualname__,
                "__doc__": own.__doc__,
                "_keras_dist_mixin": mixin,
                "_keras_dist_own": own,
            },
        )
    _CLASS.__set__(target, _made[mixin, own])


def remove(target: Any, mixin: type) -> None:
    """Give `target` its class back as it was before `add(target, mixin)`."""
    layers = []  # the mixins that were added after this one, outermost first
    cls: Any = type(target)
    while cls.__dict__.get("_keras_dist_mixin") not in (mixin, None):
        layers.append(cls._keras_dist_mixin)
        cls = cls._keras_dist_own
    if cls.__dict__.get("_keras_dist_mixin") is mixin:
        _CLASS.__set__(target, cls._keras_dist_own)
        for layer in reversed(layers):
            add(target, layer)


def has(target: Any, mixin: type) -> bool:
    """Whether `mixin` is in front of the class of `target`."""
    return mixin in type(target).__mro__
