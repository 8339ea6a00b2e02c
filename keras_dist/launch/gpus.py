"""How many GPUs this host has, without a library that would use them."""

import os
from collections.abc import Mapping
from pathlib import Path

# A folder for each GPU, by NVIDIA's driver.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def num_gpus(environ: Mapping[str, str] | None = None) -> int:
    """How many GPUs a process of this host may use.

    Args:
        environ: Environment variables; by default those of this process.

    >>> [num_gpus({"CUDA_VISIBLE_DEVICES": named}) for named in ("0,2", "3", "")]
    [2, 1, 0]
    """
    environ = os.environ if environ is None else environ
    if "CUDA_VISIBLE_DEVICES" in environ:
        named = environ["CUDA_VISIBLE_DEVICES"].split(",")
        return len([name for name in named if name.strip() not in ("", "-1")])
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
