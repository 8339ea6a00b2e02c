"""Call our functions in place of methods of Keras and TensorFlow, in one step alone."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from keras_dist.optimizer import step_context

_lock = threading.Lock()
_num_users: dict[tuple[type, str], int] = {}
_before: dict[tuple[type, str], Any] = {}  # the class's own method; `None`: inherited


@contextlib.contextmanager
def replaced_methods(
    methods: Mapping[tuple[type, str], Callable[..., Any]],
) -> Iterator[None]:
    """Inside the block, call functions in place of methods of classes, in this step.

    A class has one method for all threads. So as long as a step asks for it, the class
    has a method that looks up the step that it is called in: what runs in another
    thread, such as another fit, calls what the class had before.

    Args:
        methods: By class and name of the method, a function whose arguments are the
            plain method bound to its object, the object, and those of the call.
    """
    with contextlib.ExitStack() as stack:
        for cls, name in methods:
            stack.enter_context(_redirected(cls, name))
        context = step_context.current()
        every = {**context.methods, **methods}
        stack.enter_context(step_context.entered(replace(context, methods=every)))
        yield


@contextlib.contextmanager
def _redirected(cls: Any, name: str) -> Iterator[None]:
    """Inside the block, a method of a class asks the step for what replaces it."""
    key = cls, name
    with _lock:
        if not _num_users.get(key):
            plain, _before[key] = getattr(cls, name), vars(cls).get(name)
            setattr(cls, name, functools.partialmethod(_call, key, plain))
        _num_users[key] = _num_users.get(key, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _num_users[key] -= 1
            if not _num_users[key]:
                before = _before.pop(key)
                if before is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, before)


def _call(
    self: Any, key: tuple[type, str], plain: Any, *args: Any, **kwargs: Any
) -> Any:
    ours = step_context.current().methods.get(key)
    if ours is None:
        return plain(self, *args, **kwargs)
    return ours(functools.partial(plain, self), self, *args, **kwargs)
