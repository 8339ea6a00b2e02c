"""The screen shows the training: start-up lines stay away, and an error never does."""

import io
import os
import shlex
import sys
from pathlib import Path

import pytest
from launch import PYTHONPATH, free_port, launch, prefix
from test_launch import stand_in

from keras_dist.launch.output import VERBOSE, Output, is_noise

# Printed by TensorFlow 2.18.1, 2.19.1, 2.20.0 and 2.21.0 on a machine without a GPU,
# and, from gpu_device.cc on, quoted by their users from machines with one.
_KNOWN = r"""
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
2026-11-22 13:04:55.405154: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You may see slightly different numerical results due to floating-point round-off errors from different computation orders. To turn them off, set the environment variable `TF_ENABLE_ONEDNN_OPTS=0`.
I0000 00:00:1795352422.942930   18190 port.cc:153] oneDNN custom operations are on. You may see slightly different numerical results due to floating-point round-off errors from different computation orders. To turn them off, set the environment variable `TF_ENABLE_ONEDNN_OPTS=0`.
2026-11-22 13:04:55.406120: I external/local_xla/xla/tsl/cuda/cudart_stub.cc:32] Could not find cuda drivers on your machine, GPU will not be used.
To enable the following instructions: AVX2 AVX512F AVX512_VNNI AVX512_BF16 AVX512_FP16 AVX_VNNI FMA, in other operations, rebuild TensorFlow with the appropriate compiler flags.
To enable the following instructions: SSE3 SSE4.1 SSE4.2 AVX AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate compiler flags.
2026-11-22 13:04:55.423904: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when one has already been registered
E0000 00:00:1795352695.446629   28710 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered
2024-12-30 08:43:22.497915: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:8454] Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered
E0000 00:00:1795352695.453044   28710 cuda_blas.cc:1418] Unable to register cuBLAS factory: Attempting to register factory for plugin cuBLAS when one has already been registered
W0000 00:00:1795352790.644212   29857 computation_placer.cc:177] computation placer already registered. Please check linkage and avoid linking the same target more than once.
I0000 00:00:1795352675.107311   28635 device_compiler.h:208] Compiled cluster using XLA!  This line is logged at most once for the lifetime of the process.
I0000 00:00:1757383705.682928      93 gpu_device.cc:2022] Created device /job:localhost/replica:0/task:0/device:GPU:0 with 13942 MB memory:  -> device: 0, name: Tesla T4, pci bus id: 0000:00:04.0, compute capability: 7.5
W0000 00:00:1795512386.758277   24115 dataset.cc:997] Input of Window will not be optimized because the dataset does not implement the AsGraphDefInternal() method needed to apply optimizations.
W0000 00:00:1795512353.399105   23887 op_kernel.cc:1858] OP_REQUIRES failed at mpi_ops.cc:756 : UNKNOWN: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an exception, you should see the exception in the log before the first shutdown message.
W0000 00:00:1795512353.399333   23887 local_rendezvous.cc:412] Local rendezvous is aborting with status: UNKNOWN: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an exception, you should see the exception in the log before the first shutdown message.
W0000 00:00:1795512353.399105   23887 op_kernel.cc:1858] OP_REQUIRES failed at mpi_ops.cc:756 : UNKNOWN: [/tmp/build/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:29598: Connection reset by peer
I0000 00:00:1795352422.942930   18190 new_file.cc:1] A line of a TensorFlow that nobody has seen.
2024-11-06 05:11:16.587915: W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT
"""  # noqa: E501
KNOWN = [line.encode() for line in _KNOWN.strip().splitlines()]

# What is like a known line, or an error beside them.
_OTHERS = r"""
E0000 00:00:1795352674.194535   28628 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (304)
W0000 00:00:1764044088.195750   20660 gpu_device.cc:2341] Cannot dlopen some GPU libraries. Please make sure the missing libraries mentioned above are installed properly if you would like to use GPU. Follow the guide at https://www.tensorflow.org/install/gpu for how to download and setup the required libraries for your platform.
2025-11-24 23:14:48.524495: W tensorflow/compiler/mlir/tools/kernel_gen/tf_gpu_runtime_wrappers.cc:40] 'cuModuleLoadData(&module, data)' failed with 'CUDA_ERROR_INVALID_PTX'
E0000 00:00:1795352695.446629   28710 cuda_dnn.cc:456] Loaded runtime CuDNN library: 8.0.5 but source was compiled with: 9.3.0.
F0000 00:00:1795352695.446629   28710 port.cc:153] Check failed: ret == 0 (11 vs. 0) Thread tf_data creation via pthread_create() failed.
I1127 11:20:03.123456 140735 train.py:10] A line of the user's, by absl.
W0000 00:00:1795352422.942930   18190 new_file.cc:1] A warning of a TensorFlow that nobody has seen.
WARNING:absl:You are saving your model as an HDF5 file.
Traceback (most recent call last):
RuntimeError: Could not find cuda drivers on your machine, GPU will not be used.
To enable the following instructions: read the manual.
W0000 00:00:1795512353.399105   23887 op_kernel.cc:1858] OP_REQUIRES failed at mpi_ops.cc:756 : INVALID_ARGUMENT: Mismatched allreduce tensor shapes.
W0000 00:00:1795512353.399105   23887 op_kernel.cc:1858] OP_REQUIRES failed at reshape_op.cc:156 : INVALID_ARGUMENT: Input to reshape is a tensor with 6 values

"""  # noqa: E501
OTHERS = [line.encode() for line in _OTHERS[1:].split("\n")]


# Of TensorFlow 2.21 and 2.18: known where there is nothing of NVIDIA's.
_CUDA = r"""
E0000 00:00:1795352674.194535   28628 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)
2025-02-13 18:31:41.211563: E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:152] failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)
"""  # noqa: E501
CUDA = [line.encode() for line in _CUDA.strip().splitlines()]


@pytest.mark.parametrize("line", CUDA)
@pytest.mark.parametrize("file", ["dev/nvidiactl", "dev/dxg", "proc/driver/nvidia"])
def test_an_error_of_cuda_is_noise_only_without_a_driver(tmp_path, line, file):
    """Where there is one, it is an error and shown."""
    assert is_noise(line, root=tmp_path)
    assert not is_noise(line + b"!", root=tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert not is_noise(line, root=tmp_path)


def test_known_lines_are_noise_and_no_other_is():
    """As they were printed: not errors, warnings, the user's lines, or two in one."""
    for line in KNOWN:
        assert is_noise(line), line
        for changed in (b" " + line, line + b"\n" + line, line[1:]):
            assert not is_noise(changed), changed
    for line in OTHERS:
        assert not is_noise(line), line


class _Rank:
    """The ends of a rank's two streams to which it writes."""

    def __init__(self, output, rank=0):
        readers, self._writers = zip(*(os.pipe() for _ in range(2)), strict=True)
        self._output = output
        output.add(rank, *(os.fdopen(reader, "rb") for reader in readers))

    def write(self, stream, data):
        os.write(self._writers[stream], data)
        self._output.pass_on(0)

    def close(self):
        for writer in self._writers:
            os.close(writer)


@pytest.fixture
def screens(monkeypatch, capsysbinary):
    """Returns what has come to standard output and standard error since last time."""
    monkeypatch.delenv(VERBOSE, raising=False)
    return lambda: list(capsysbinary.readouterr())


_MIXED = [*OTHERS, *KNOWN, "größer".encode(), b"a\tb  ", *KNOWN[:2], b"the end"]
_MIXED_SHOWN = [*OTHERS, "größer".encode(), b"a\tb  ", b"the end"]


@pytest.mark.parametrize("size", [7, 100, 1 << 15])
def test_what_is_shown_does_not_depend_on_how_it_arrives(screens, size):
    """In chunks of any size; on standard error alone is anything left out."""
    output = Output()
    rank = _Rank(output)
    data = b"\n".join(_MIXED)  # the last line without a newline
    for stream in (0, 1):
        for begin in range(0, len(data), size):
            rank.write(stream, data[begin : begin + size])
    rank.close()
    output.close()
    shown = b"\n".join(_MIXED_SHOWN) + b"\n"
    assert screens() == [data + b"\n", shown]


def test_the_file_of_a_rank_has_everything(screens, tmp_path):
    """Byte for byte; the screen has the first rank without the noise."""
    output = Output(tmp_path)
    ranks = [_Rank(output, number) for number in range(2)]
    data = b"\n".join(_MIXED) + b"\n"
    for rank in ranks:
        rank.write(1, data)
        rank.close()
    output.close()
    assert [(tmp_path / f"rank.{n}.log").read_bytes() for n in (0, 1)] == [data] * 2
    assert screens()[1] == b"\n".join(_MIXED_SHOWN) + b"\n"


def test_a_progress_bar_is_shown_as_it_grows(screens):
    """Each state with the rank before it, as soon as the next one begins."""
    output = Output()
    rank = _Rank(output, 1)
    written = [(b"\r 1/3", b"\r"), (b"\b\b\b\b\r 2/3", b"[1]  1/3\b\b\b\b\r")]
    written += [(b"\r 3/3", b"[1]  2/3\r"), (b" done\r", b"")]
    written += [(b"\nnext\r\n", b"[1]  3/3 done\r\n[1] next\r\n")]
    for data, shown in written:
        rank.write(0, data)
        assert screens()[0] == shown
    rank.write(1, b"bar\r" + KNOWN[2] + b"\n")  # noise behind a bar
    assert screens()[1] == b"[1] bar\r"
    rank.close()
    output.close()


class _Screen(io.TextIOWrapper):
    """What the user sees, on a terminal or not."""

    def __init__(self, *, is_terminal):
        super().__init__(io.BytesIO(), write_through=True)
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_of_another_rank_is_not_put_over_a_progress_bar(
    monkeypatch, is_terminal
):
    """On a terminal it begins a new line; in a file nothing is added."""
    screen = _Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stdout", screen)
    output = Output()
    first, second = _Rank(output, 0), _Rank(output, 1)
    first.write(0, b"a long bar\ra longer bar")
    second.write(0, b"line\nline\n")
    first.write(0, b"\n")
    between = "\n" if is_terminal else ""
    bar, end = "a long bar\r" + between, "a longer bar\n"
    shown = screen.buffer.getvalue().decode()
    assert shown == bar + "[1] line\n[1] line\n" + end
    for rank in (first, second):
        rank.close()
    output.close()


_RUN = [sys.executable, "-m", "keras_dist", "run"]


def _run(*words, **variables):
    env = {"PYTHONPATH": PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "0", **variables}
    done = launch([*_RUN, *map(str, words)], ranks=None, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done


def test_the_installed_tensorflow_starts_without_a_word(tmp_path):
    """Also as it lists GPUs; it is in the file of the rank, and each line is known."""
    script, own = tmp_path / "script.py", "an error of mine"
    lists = (
        ""
        if any(Path("/dev").glob("nvidia*"))
        else "tensorflow.config.list_physical_devices()"
    )
    script.write_text(
        f"import tensorflow, sys\n{lists}\nprint({own!r}, file=sys.stderr)\n"
    )
    done = _run("-np", 1, "--log-dir", tmp_path, script)
    printed = (tmp_path / "rank.0.log").read_bytes().splitlines()
    known = [line for line in printed if is_noise(line)]
    assert known and [line for line in printed if line not in known] == [own.encode()]
    first, *rest = done.stderr.splitlines()
    assert first.startswith("keras-dist: 1 rank on this host, ") and rest == [own]


_SCRIPT = f"""
import os, sys
print("I train", flush=True)
print("oneDNN custom operations are on", file=sys.stderr, flush=True)
os.write(2, {KNOWN[2]!r} + b"\\n")
"""


@pytest.mark.parametrize("verbose", ["0", "1"])
def test_all_that_a_script_prints_is_shown_but_noise(tmp_path, verbose):
    """With `KERAS_DIST_VERBOSE=1` that too; on every rank."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    done = _run("-np", 2, script, **{VERBOSE: verbose})
    own = ["oneDNN custom operations are on"]
    own += [KNOWN[2].decode()] if verbose == "1" else []
    expected = sorted(prefix(rank) + line for rank in range(2) for line in own)
    expected.append("keras-dist: 2 ranks on this host, importing TensorFlow")
    assert sorted(done.stdout.splitlines()) == ["I train", "[1] I train"]
    assert sorted(done.stderr.splitlines()) == sorted(expected)


def test_ranks_on_other_hosts_are_as_quiet(tmp_path):
    """The stand-in for ssh passes on no variable, as ssh does not.

    The command there decides, not the one here, whose host may have other devices.
    """
    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.write(2, {KNOWN[0]!r} + b'\\nmine\\n')\n")
    say = f"printf '%s\\n' {shlex.quote(KNOWN[1].decode())} >&2"
    path = stand_in(tmp_path, f'unset {VERBOSE}\n{say}\nexec sh -c "$3"\n')
    hosts = ["-H", "a:1", "--rdzv", f"127.0.0.1:{free_port()}"]
    done = _run(*hosts, script, PATH=path)
    begin = "keras-dist: 1 rank on a, importing TensorFlow"
    assert done.stderr.splitlines() == [KNOWN[1].decode(), begin, "mine"]
