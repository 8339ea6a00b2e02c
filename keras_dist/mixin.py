"""Change the class of one object, or methods of classes in one step; change it back."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

# The descriptor by which Python sets the class of an object. The classes made here
# override `__class__` by a property, so `target.__class__ = …` does not work.
_CLASS = object.__dict__["__class__"]

Method = tuple[Any, str]

_lock = threading.Lock()
# What undoes the change, and the functions that are in use.
_users: dict[Method, list[Callable[..., Any]]] = {}
_replaced: ContextVar[Mapping[Method, Callable[..., Any]]] = ContextVar("replaced")


def add(target: Any, mixin: type) -> None:
    """Make `target` an instance of a new class that inherits from `mixin` and its own.

    The attributes of `target` are kept, and methods of `mixin` call the object's own
    methods with `super()`. `target.__class__` is still the object's own class: Keras
    reads it to save an object, so that saved files do not depend on this package.
    Nothing happens if `mixin` was already added.

    A mixin that inherits from a class from which that of `target` also inherits comes
    right before that class instead: also what the object's own methods call of it with
    `super()` is then the mixin's.

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
    # A class knows its subclasses weakly: nothing here keeps a class of the user's.
    made = [
        c for c in own.__subclasses__() if vars(c).get("_keras_dist_mixin") is mixin
    ]
    _CLASS.__set__(target, made[0] if made else _combine(mixin, own, target.__class__))


def _combine(mixin: type, own: type, original: type) -> type:
    is_below = any(base in own.__mro__[1:-1] for base in mixin.__bases__)
    return type(
        own.__name__,
        (own, mixin) if is_below else (mixin, own),
        {
            "__class__": property(lambda self: original),
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
            "_keras_dist_mixin": mixin,
            "_keras_dist_own": own,
            "__reduce_ex__": _reduce_as_plain,
        },
    )


def _reduce_as_plain(self: Any, protocol: Any) -> Any:
    """Let `pickle` and `copy` make an object of the class without mixins.

    Pickle looks a class up by its name, and finds that one.
    """
    own = self.__class__
    reduced = own.__reduce_ex__(self, protocol)
    if isinstance(reduced, str):
        return reduced
    function, arguments, *rest = reduced
    if getattr(function, "__self__", None) is type(self):  # a class method
        function = getattr(own, function.__name__)
    plain = (own if a is type(self) else a for a in arguments)
    return function, tuple(plain), *rest


def remove(target: Any, mixin: type) -> None:
    """Undo `add(target, mixin)`; mixins that were added later stay."""
    later = []  # the mixins that were added after this one, last added first
    cls: Any = type(target)
    while cls.__dict__.get("_keras_dist_mixin") not in (mixin, None):
        later.append(cls._keras_dist_mixin)
        cls = cls._keras_dist_own
    if cls.__dict__.get("_keras_dist_mixin") is mixin:
        _CLASS.__set__(target, cls._keras_dist_own)
        for other in reversed(later):
            add(target, other)


def has(target: Any, mixin: type) -> bool:
    """Return True if `mixin` was added to `target`."""
    return mixin in type(target).__mro__


def find_owner(target: Any, name: str) -> type:
    """Return the class that defines a method of an object.

    Mixins of this package, which call it, are ignored.
    """
    owners = (cls for cls in type(target).__mro__ if name in vars(cls))
    ours = "keras_dist."
    return next((c for c in owners if not c.__module__.startswith(ours)), object)


@contextlib.contextmanager
def use(target: Any, mixin: type) -> Iterator[None]:
    """Context manager in which `mixin` is added to `target`, if it is not before."""
    with preserve(target):
        add(target, mixin)
        yield


@contextlib.contextmanager
def change(target: Any, **values: Any) -> Iterator[None]:
    """Context manager in which attributes of an object have other values."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextlib.contextmanager
def preserve(target: Any, *names: str) -> Iterator[None]:
    """Context manager that gives an object the class that it has now, and attributes.

    Args:
        target: The object.
        names: Names of its attributes; those that it does not have now are left as
            they are then.
    """
    own = type(target)
    values = {name: vars(target)[name] for name in names if name in vars(target)}
    try:
        yield
    finally:
        _CLASS.__set__(target, own)
        for name, value in values.items():
            object.__setattr__(target, name, value)


def set_method(cls: Any, name: str, method: Any) -> Callable[[], None]:
    """Set a method of a class, which may inherit it; return what undoes this."""
    before = vars(cls).get(name)
    setattr(cls, name, method)
    if before is None:
        return functools.partial(delattr, cls, name)
    return functools.partial(setattr, cls, name, before)


@contextlib.contextmanager
def replace_method(cls: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    """Context manager that calls a function in place of a method, or of a function.

    A class has one method for all threads. So as long as somebody asks for it, the
    class has a method that looks up where it is called: what runs in another thread,
    such as another fit, calls what the class had before.

    Args:
        cls: The class, or the module of a function.
        name: Name of the method, or the function.
        ours: Its arguments are the plain method bound to its object, the object, and
            the call's arguments; without an object for a function.
    """
    key = cls, name
    with _lock:
        if key not in _users:
            plain: Any = getattr(cls, name)
            method: Any = functools.partial(_call_function, key, plain)
            if isinstance(cls, type):
                method = functools.partialmethod(_call, key, plain)
            _users[key] = [set_method(cls, name, method)]
        _users[key].append(ours)
    token = _replaced.set({**_replaced.get({}), key: ours})
    try:
        yield
    finally:
        _replaced.reset(token)
        with _lock:
            _users[key].remove(ours)
            if len(_users[key]) == 1:
                _users.pop(key)[0]()


def _call_function(key: Method, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
    ours = _replaced.get({}).get(key)
    return plain(*args, **kwargs) if ours is None else ours(plain, *args, **kwargs)


def _call(self: Any, key: Method, plain: Any, *args: Any, **kwargs: Any) -> Any:
    ours = _replaced.get({}).get(key)
    if ours is None:
        return plain(self, *args, **kwargs)
    return ours(functools.partial(plain, self), self, *args, **kwargs)
