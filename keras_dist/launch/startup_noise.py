"""Lines that TensorFlow prints and that are no news.

Its lines of level INFO, from C++, are routine. Of its warnings and errors those are
left out that fit an entry of the table in full: level, file and text. So all that a
TensorFlow of another version adds or changes is shown. The texts are those of
TensorFlow 2.18 to 2.21.
"""

import os
import re
from pathlib import Path

# Set to 1, everything that the ranks print is shown.
VARIABLE = "KERAS_DIST_VERBOSE"

# As absl and as TensorFlow begin a line, with the level and the file's name:
# I0000 00:00:1795352422.942930   18190 port.cc:153] oneDNN custom operations …
# 2025-02-13 22:48:45.779126: I tensorflow/core/util/port.cc:153] oneDNN custom …
_LINE = (
    r"(?:{level}\d{{4}} \d\d:\d\d:\d+\.\d{{6}} +\d+ "
    r"|\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{6}}: {level} [\w./]+/){file}:\d+\] {text}"
)

# Of what a rank logs when another one has ended, and raises as well.
_ENDED = (
    r"UNKNOWN: (?:Horovod has been shut down\. .*"
    r"|\[\S+/pair\.cc:\d+\] (?:Connection closed by peer|(?:Read|Write) error) .*)"
)

_KNOWN = (
    ("I", r"\w+\.(?:cc|h)", ".*"),
    # CUDA's libraries are linked twice; nothing is wrong with them.
    *(
        (
            "E",
            rf"cuda_{library.lower().removeprefix('cu')}\.cc",
            rf"Unable to register {library} factory: Attempting to register factory "
            rf"for plugin {library} when one has already been registered",
        )
        for library in ("cuFFT", "cuDNN", "cuBLAS")
    ),
    (
        "W",
        r"computation_placer\.cc",
        r"computation placer already registered\. Please check linkage and avoid "
        r"linking the same target more than once\.",
    ),
    ("W", r"py_utils\.cc", r"TF-TRT Warning: Could not find TensorRT"),
    ("W", r"dataset\.cc", r"Input of [\w:]+ will not be optimized because .*"),
    ("W", r"op_kernel\.cc", rf"OP_REQUIRES failed at mpi_ops\.cc:\d+ : {_ENDED}"),
    (
        "W",
        r"local_rendezvous\.cc",
        rf"Local rendezvous is aborting with status: {_ENDED}",
    ),
)

# Lines without a level: what absl says first, and the second line of
# cpu_feature_guard.cc.
_BARE = (
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written "
    r"to STDERR",
    r"To enable the following instructions: [A-Z\d_. ]+, in other operations, rebuild "
    r"TensorFlow with the appropriate compiler flags\.",
)
_NOISE = re.compile(
    "|".join(
        [
            *(
                _LINE.format(level=level, file=f, text=text)
                for level, f, text in _KNOWN
            ),
            *_BARE,
        ]
    ).encode()
)

# CUDA's driver library cannot be loaded, which is noise where there is no driver and no
# device of NVIDIA's. 303 is CUDA_ERROR_SHARED_OBJECT_INIT_FAILED.
_NO_DRIVER = re.compile(
    _LINE.format(
        level="E",
        file=r"cuda_(?:driver|platform)\.cc",
        text=r"failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: "
        r"UNKNOWN ERROR \(303\)",
    ).encode()
)

# What a host with an NVIDIA driver has: devices, the kernel's module, and WSL's device.
_DRIVERS = ("dev/nvidia*", "proc/driver/nvidia*", "dev/dxg")
_NVIDIA = "0x10de"  # number of a vendor of PCI devices


def is_startup_noise(line: bytes, *, root: str = "/") -> bool:
    r"""Return True if a line of standard error is no news.

    Args:
        line: Without the newline.
        root: The folder of `dev`, `proc` and `sys` of the host that printed the line.

    >>> is_startup_noise(
    ...     b"I0000 00:00:1795352422.943319   18190 cudart_stub.cc:31] "
    ...     b"Could not find cuda drivers on your machine, GPU will not be used."
    ... )
    True
    >>> is_startup_noise(b"my script: GPU will not be used.")
    False
    """
    if _NOISE.fullmatch(line):
        return True
    return _NO_DRIVER.fullmatch(line) is not None and not has_nvidia(root)


def has_nvidia(root: str = "/") -> bool:
    """Return True if a host has an NVIDIA driver, or a device that may want one.

    Args:
        root: The folder of `dev`, `proc` and `sys`.
    """
    if any(next(Path(root).glob(name), None) for name in _DRIVERS):
        return True
    vendors = Path(root).glob("sys/bus/pci/devices/*/vendor")
    try:
        return any(vendor.read_text().strip() == _NVIDIA for vendor in vendors)
    except OSError:
        return True  # who knows: the line is shown


def is_verbose() -> bool:
    """Return True if the user wants to see everything."""
    return os.environ.get(VARIABLE, "") not in ("", "0")
