"""Lines that TensorFlow prints and that are no news, each known in full.

A line is noise only if all of it fits one entry of the table: its level, the C++ file
that logs it and its text. So a line that TensorFlow adds or changes is shown, and so
is every error but four. Three say that CUDA's libraries are linked twice. The fourth
says that CUDA's driver library cannot be loaded; it is noise only on a host that has
neither a driver nor a device of NVIDIA's. And what a rank logs of a sum that the end of
another rank has ended is left out: the rank raises it as an error, too.

The texts are those of TensorFlow 2.18 to 2.21.
"""

import os
import re
from pathlib import Path

# Set to 1, everything that the ranks print is shown.
VARIABLE = "KERAS_DIST_VERBOSE"

# Level, C++ file, and a regular expression for the text.
_LOGGED = (
    (
        "I",
        "port.cc",
        r"oneDNN custom operations are on\. You may see slightly different numerical "
        r"results due to floating-point round-off errors from different computation "
        r"orders\. To turn them off, set the environment variable "
        r"`TF_ENABLE_ONEDNN_OPTS=0`\.",
    ),
    (
        "I",
        "cpu_feature_guard.cc",
        r"This TensorFlow binary is optimized to use available CPU instructions in "
        r"performance-critical operations\.",
    ),
    (
        "I",
        "cudart_stub.cc",
        r"Could not find cuda drivers on your machine, GPU will not be used\.",
    ),
    ("W", "py_utils.cc", r"TF-TRT Warning: Could not find TensorRT"),
    # CUDA's libraries are linked twice; nothing is wrong with them.
    *(
        (
            "E",
            file,
            rf"Unable to register {library} factory: Attempting to register factory "
            rf"for plugin {library} when one has already been registered",
        )
        for library, file in (
            ("cuFFT", "cuda_fft.cc"),
            ("cuDNN", "cuda_dnn.cc"),
            ("cuBLAS", "cuda_blas.cc"),
        )
    ),
    (
        "W",
        "computation_placer.cc",
        r"computation placer already registered\. Please check linkage and avoid "
        r"linking the same target more than once\.",
    ),
    (
        "I",
        "cuda_executor.cc",
        r"successful NUMA node read from SysFS had negative value \(-1\), but there "
        r"must be at least one NUMA node, so returning NUMA node zero\. See more at "
        r"https://github\.com/torvalds/linux/blob/v6\.0/Documentation/ABI/testing/"
        r"sysfs-bus-pci#L344-L355",
    ),
    (
        "I",
        "gpu_device.cc",
        r"Created device /job:localhost/replica:0/task:0/device:GPU:\d+ with \d+ MB "
        r"memory:  -> device: \d+, name: [^,]+, pci bus id: [\da-f:.]+, "
        r"compute capability: \d+\.\d+",
    ),
    ("I", "cuda_dnn.cc", r"Loaded cuDNN version \d+"),
    (
        "I",
        "service.cc",
        r"XLA service 0x[\da-f]+ initialized for platform (?:Host|CUDA) \(this does "
        r"not guarantee that XLA will be used\)\. Devices:",
    ),
    (
        "I",
        "service.cc",
        r"  StreamExecutor device \(\d+\): [^,]+, "
        r"(?:Default Version|Compute Capability \d+\.\d+)",
    ),
    (
        "I",
        "service.cc",
        r"  StreamExecutor \[\d+\]: [^,]+, "
        r"(?:Default Version|Compute Capability [\w.]+) "
        r"\(Driver: [\d.]+; Runtime: [\d.]+; Toolkit: [\d.]+; DNN: [\d.]+\)",
    ),
    (
        "I",
        "device_compiler.h",
        r"Compiled cluster using XLA!  This line is logged at most once for the "
        r"lifetime of the process\.",
    ),
    (
        "I",
        "generator_dataset_op.cc",
        r"Memory patch applied: M_TRIM_THRESHOLD=\d+ kb was set\.",
    ),
    (
        "W",
        "dataset.cc",
        r"Input of [\w:]+ will not be optimized because the dataset does not implement "
        r"the AsGraphDefInternal\(\) method needed to apply optimizations\.",
    ),
    (
        "I",
        "dump_mlir_util.cc",
        r"disabling MLIR crash reproducer, set env var "
        r"`MLIR_CRASH_REPRODUCER_DIRECTORY` to enable\.",
    ),
)

# Of what a rank logs when another one has ended, and raises as well.
_ENDED = (
    r"Horovod has been shut down\. This was caused by an exception on one of the "
    r"ranks or an attempt to allreduce, allgather or broadcast a tensor after one of "
    r"the ranks finished execution\. If the shutdown was caused by an exception, you "
    r"should see the exception in the log before the first shutdown message\.",
    r"\[\S+/pair\.cc:\d+\] Connection closed by peer \[[\w.:]+\]:\d+",
    r"\[\S+/pair\.cc:\d+\] (?:Read|Write) error \[[\w.:]+\]:\d+: Connection reset "
    r"by peer",
)
_OF_OTHERS = tuple(
    ("W", file, f"{text}: UNKNOWN: {why}")
    for why in _ENDED
    for file, text in (
        ("op_kernel.cc", r"OP_REQUIRES failed at mpi_ops\.cc:\d+ "),
        ("local_rendezvous.cc", "Local rendezvous is aborting with status"),
    )
)

# 303 is CUDA_ERROR_SHARED_OBJECT_INIT_FAILED. TensorFlow logs it once a process, when
# it lists the GPUs.
_NO_DRIVER = tuple(
    (
        "E",
        file,
        r"failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: "
        r"UNKNOWN ERROR \(303\)",
    )
    for file in ("cuda_driver.cc", "cuda_platform.cc")
)

# What a host with an NVIDIA driver has: devices, the kernel's module, and WSL's device.
_DRIVERS = ("dev/nvidia*", "proc/driver/nvidia*", "dev/dxg")
_NVIDIA = "0x10de"  # number of a vendor of PCI devices

# Lines without a level: what absl says first, and the second line of
# cpu_feature_guard.cc.
_BARE = (
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written "
    r"to STDERR",
    r"To enable the following instructions: [A-Z\d_. ]+, in other operations, rebuild "
    r"TensorFlow with the appropriate compiler flags\.",
)


def _pattern(level: str, file: str, text: str) -> str:
    """Return what a logged line looks like, as absl and as TensorFlow begin it.

    I0000 00:00:1795352422.942930   18190 port.cc:153] oneDNN custom operations …
    2025-02-13 22:48:45.779126: I tensorflow/core/util/port.cc:153] oneDNN custom …
    """
    absl = rf"{level}\d{{4}} \d\d:\d\d:\d+\.\d{{6}} +\d+ "
    tensorflow = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{6}}: {level} [\w./]+/"
    return rf"(?:{absl}|{tensorflow}){re.escape(file)}:\d+\] {text}"


_NOISE = re.compile(
    "|".join(
        [*(_pattern(*entry) for entry in (*_LOGGED, *_OF_OTHERS)), *_BARE]
    ).encode()
)
_NOISE_WITHOUT_NVIDIA = re.compile(
    "|".join(_pattern(*entry) for entry in _NO_DRIVER).encode()
)


def is_startup_noise(line: bytes, *, root: str = "/") -> bool:
    r"""Return whether a line of standard error is known noise, and nothing else.

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
    return _NOISE_WITHOUT_NVIDIA.fullmatch(line) is not None and not has_nvidia(root)


def has_nvidia(root: str = "/") -> bool:
    """Return whether a host has an NVIDIA driver, or a device that may want one.

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
    """Return whether the user wants to see everything."""
    return os.environ.get(VARIABLE, "") not in ("", "0")
