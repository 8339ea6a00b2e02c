"""The screen shows the training: start-up lines stay away, and an error never does."""

import io
import os
import shlex
import sys

import pytest
from launch import free_port
from test_launch import stand_in, start

from keras_dist.launch.output import LOG_LEVEL, Output, is_noise

# Printed by TensorFlow 2.18.1, 2.19.1, 2.20.0 and 2.21.0 on a machine without a GPU,
# and, from gpu_device.cc on, quoted by their users from machines with one.
_KNOWN = r"""
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
2026-11-22 13:04:55.423904: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when one has already been registered
E0000 00:00:1795352695.446629   28710 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered
2024-12-30 08:43:22.497915: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:8454] Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered
E0000 00:00:1795352695.453044   28710 cuda_blas.cc:1418] Unable to register cuBLAS factory: Attempting to register factory for plugin cuBLAS when one has already been registered
W0000 00:00:1795352790.644212   29857 computation_placer.cc:177] computation placer already registered. Please check linkage and avoid linking the same target more than once.
W0000 00:00:1795512353.399105   23887 op_kernel.cc:1858] OP_REQUIRES failed at mpi_ops.cc:756 : UNKNOWN: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an exception, you should see the exception in the log before the first shutdown message.
W0000 00:00:1795512353.399333   23887 local_rendezvous.cc:412] Local rendezvous is aborting with status: UNKNOWN: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an exception, you should see the exception in the log before the first shutdown message.
W0000 00:00:1795512353.399105   23887 op_kernel.cc:1858] OP_REQUIRES failed at mpi_ops.cc:756 : UNKNOWN: [/tmp/build/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:29598: Connection reset by peer
"""  # noqa: E501
KNOWN = [line.encode() for line in _KNOWN.strip().splitlines()]

# What is like a known line, or an error beside them.
_OTHERS = r"""
E0000 00:00:1795352674.194535   28628 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (304)
W0000 00:00:1764044088.195750   20660 gpu_device.cc:2341] Cannot dlopen some GPU libraries. Please make sure the missing libraries mentioned above are installed properly if you would like to use GPU. Follow the guide at https://www.tensorflow.org/install/gpu for how to download and setup the required libraries for your platform.
2025-11-24 23:14:48.524495: W tensorflow/compiler/mlir/tools/kernel_gen/tf_gpu_runtime_wrappers.cc:40] 'cuModuleLoadData(&module, data)' failed with 'CUDA_ERROR_INVALID_PTX'
E0000 00:00:1795352695.446629   28710 cuda_dnn.cc:456] Loaded runtime CuDNN library: 8.0.5 but source was compiled with: 9.3.0.
F0000 00:00:1795352695.446629   28710 port.cc:153] Check failed: ret == 0 (11 vs. 0) Thread tf_data creation via pthread_create() failed.
WARNING:absl:You are saving your model as an HDF5 file.
W0000 00:00:1795512353.399105   23887 op_kernel.cc:1858] OP_REQUIRES failed at mpi_ops.cc:756 : INVALID_ARGUMENT: Mismatched allreduce tensor shapes.
W0000 00:00:1795512353.399105   23887 op_kernel.cc:1858] OP_REQUIRES failed at reshape_op.cc:156 : INVALID_ARGUMENT: Input to reshape is a tensor with 6 values

"""  # noqa: E501
OTHERS = [line.encode() for line in _OTHERS[1:].split("\n")]


CUDA = (
    b"E0000 00:00:1795352674.194535   28628 cuda_platform.cc:52] failed call to "
    b"cuInit: INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)"
)


def test_known_lines_are_noise_and_no_other_is(tmp_path):
    """As they were printed; that of CUDA where there is no driver."""
    assert [line for line in KNOWN if not is_noise(line)] == []
    assert [line for line in OTHERS if is_noise(line)] == []
    assert is_noise(CUDA, driver=str(tmp_path / "none"))
    assert not is_noise(CUDA, driver=str(tmp_path))


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
    monkeypatch.delenv(LOG_LEVEL, raising=False)
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


def test_the_installed_tensorflow_starts_without_a_word(tmp_path):
    """Also as it lists GPUs; with a level of the user's own it has its word."""
    script, own = tmp_path / "script.py", "an error of mine"
    script.write_text(
        "import tensorflow, sys\ntensorflow.config.list_physical_devices()\n"
        f"print({own!r}, file=sys.stderr)\n"
    )
    for level in ("", "0"):
        done = start("-np", 1, script, **{LOG_LEVEL: level})
        first, *rest = done.stderr.splitlines()
        assert first.startswith("keras-dist: 1 rank on this host, ")
        assert (rest == [own]) == (level == ""), done.stderr


@pytest.mark.parametrize("level", ["", "1"])
def test_ranks_on_other_hosts_are_as_quiet(tmp_path, level):
    """The command there leaves lines out; what ssh itself says is shown."""
    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.write(2, {KNOWN[0]!r} + b'\\nmine\\n')\n")
    say = f"printf '%s\\n' {shlex.quote(KNOWN[1].decode())} >&2"
    path = stand_in(tmp_path, f'{say}\nexec sh -c "$3"\n')
    hosts = ["-H", "a:1", "--rdzv", f"127.0.0.1:{free_port()}"]
    done = start(*hosts, script, PATH=path, **{LOG_LEVEL: level})
    begin = "keras-dist: 1 rank on a, importing TensorFlow"
    shown = [KNOWN[0].decode()] if level else []
    assert done.stderr.splitlines() == [KNOWN[1].decode(), begin, *shown, "mine"]
