"""The options of averaging, as one frozen value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import keras

from keras_dist import comm

# Values of the arguments `op`, `compression` and `sparse`.
Op = Literal["average", "sum", "adasum"]
Compression = Literal["fp16", "bf16"]
Sparse = Literal["auto", "merged", "repeated"]
OPS = get_args(Op)
COMPRESSIONS = (None, *get_args(Compression))
SPARSE = get_args(Sparse)


@dataclass(frozen=True)
class Averaging:
    """Options of the averaging, checked.

    Args:
        op: `"average"`, weighted by the rows of each rank; `"sum"`; or `"adasum"`.
        compression: How numbers are sent: `None` uncompressed, `"fp16"` or `"bf16"`.
        local_layers: Local layers, whose gradients are not averaged.
        process_set: The ranks to average over, `None` for all.
        every: 1: gradients are averaged in each step. More: weights are averaged after
            so many steps (local SGD).
        outer_momentum: Momentum of the averaged weights if `every` is more than 1; at
            least 0 and less than 1.
        sparse: How repeated rows of a sparse gradient are averaged: `"auto"`,
            `"merged"` or `"repeated"`.

    Raises:
        ValueError: If an option is unknown, or two contradict each other.
        TypeError: If `local_layers` holds something other than layers.
    """

    op: Op = "average"
    compression: Compression | None = None
    local_layers: Sequence[keras.layers.Layer] = ()
    process_set: Sequence[int] | None = None
    every: int = 1
    outer_momentum: float = 0.0
    sparse: Sparse = "auto"

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(
                f'`op` must be "average", "sum" or "adasum". Received: op={self.op!r}'
            )
        if self.compression not in COMPRESSIONS:
            raise ValueError(
                '`compression` must be None, "fp16" or "bf16". '
                f"Received: compression={self.compression!r}"
            )
        if self.sparse not in SPARSE:
            raise ValueError(
                '`sparse` must be "auto", "merged" or "repeated". '
                f"Received: sparse={self.sparse!r}"
            )
        if self.op == "adasum" and self.compression is not None:
            raise ValueError(
                "Adasum compares whole gradients, not compressed ones. Received: "
                f'op="adasum" and compression={self.compression!r}. Leave one out.'
            )
        self._check_every()
        for layer in self.local_layers:
            if not isinstance(layer, keras.layers.Layer):
                raise TypeError(
                    "`local_layers` must be a list of layers of the model. "
                    f"Received: {layer!r} of type {type(layer).__name__}"
                )

    def _check_every(self) -> None:
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                "`outer_momentum` must be at least 0 and less than 1. "
                f"Received: outer_momentum={self.outer_momentum!r}"
            )
        if self.outer_momentum and self.every == 1:
            raise ValueError(
                "`outer_momentum` is a momentum of averaged weights, not of gradients. "
                f"Received: outer_momentum={self.outer_momentum} and gradients that "
                'are averaged in each step. Pass sync="every:8", or leave it out.'
            )
        if self.every > 1 and (self.op != "average" or self.compression):
            raise ValueError(
                "Weights can be averaged, not summed, and are sent uncompressed. "
                f'Received: sync="every:{self.every}", op={self.op!r}, '
                f"compression={self.compression!r}. Leave out `op` and `compression`."
            )

    def local_ids(self) -> set[int]:
        """Identities of the variables of local layers."""
        return {
            id(variable) for layer in self.local_layers for variable in layer.weights
        }


def every_of(sync: str) -> int:
    """Return the number of steps in `"every:8"`.

    Raises:
        ValueError: If `sync` has another form.

    >>> every_of("every:8")
    8
    """
    word, _, number = sync.partition(":") if isinstance(sync, str) else ("", "", "")
    if word != "every" or not number.isdecimal() or int(number) < 1:
        raise ValueError(
            '`sync` must be "every:k" with a whole number of steps k, such as '
            f'"every:1" (in each step) or "every:8". Received: sync={sync!r}'
        )
    return int(number)


def check_usable(options: Averaging) -> None:
    """Check that the ranks can average with these options.

    Raises:
        ValueError: If `op` is `"adasum"` and Horovod cannot do it here, or if the
            process set was not given to `keras_dist.init` or lacks this rank.
    """
    with comm.within(options.process_set):
        size = comm.size()
    if options.op != "adasum" or size == 1:
        return
    if options.process_set is not None or size & (size - 1):
        raise ValueError(
            "Adasum works on all ranks of a job, and on 2, 4, 8, … of them. Received: "
            f'op="adasum", {size} ranks, process_set={options.process_set}. '
            'Take op="average", or another number of ranks.'
        )
    if not comm.has_mpi():
        raise ValueError(
            "Adasum needs a Horovod whose ranks communicate over MPI. Received: "
            f'op="adasum" over {comm.transport_name()}. Run `keras-dist '
            "install-horovod --mpi` and start the ranks with mpirun."
        )
