"""What Horovod was built with, and where it runs this rank."""

from typing import Any

from keras_dist.comm import runtime, transport


def fact(name: str, default: Any) -> Any:
    """What one of Horovod's functions without arguments returns.

    Args:
        name: Name of the function, such as `"nccl_built"` or `"cross_rank"`.
        default: What to return where Horovod cannot be asked: it is not installed, or
            has to be started, and there is no launcher.
    """
    link = runtime.connection()[0] if runtime.is_started() else None
    if link is None and not name.endswith("_built"):
        return default
    try:
        library = transport.library() if link is None else link.horovod
    except RuntimeError:
        return default
    return getattr(library, name)()
