"""How gradients become those of all ranks, as one frozen value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_dist import comm

OPS = ("average", "sum", "adasum")
COMPRESSIONS = (None, "fp16", "bf16")


@dataclass(frozen=True)
class Averaging:
    """Options of the averaging, checked.

    Args:
        op: `"average"`, weighted by the rows of each rank; `"sum"`; or `"adasum"`.
        compression: How numbers travel: `None` as they are, `"fp16"` or `"bf16"`.
        local_layers: Layers whose variables each rank keeps to itself.
        process_set: The ranks to average over, `None` for all.

    Raises:
        ValueError: If an option is unknown, or two contradict each other.
        TypeError: If `local_layers` holds something else than layers.
    """

    op: str = "average"
    compression: str | None = None
    local_layers: Sequence[Any] = ()
    process_set: Sequence[int] | None = None

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
        if self.op == "adasum" and self.compression is not None:
            raise ValueError(
                "Adasum compares whole gradients, not compressed ones. Received: "
                f'op="adasum" and compression={self.compression!r}. Leave one out.'
            )
        for layer in self.local_layers:
            if not isinstance(layer, keras.layers.Layer):
                raise TypeError(
                    "`local_layers` must be a list of layers of the model. "
                    f"Received: {layer!r} of type {type(layer).__name__}"
                )

    def local_ids(self) -> set[int]:
        """Identities of the variables that each rank keeps to itself."""
        return {
            id(variable) for layer in self.local_layers for variable in layer.weights
        }


def check_usable(options: Averaging) -> None:
    """Raise where the ranks cannot do what `options` says.

    Raises:
        ValueError: If Adasum is asked for and Horovod cannot do it here, or the process
            set is not one of `keras_dist.init` with this rank in it.
    """
    with comm.within(options.process_set):
        size = comm.size()
    if options.op != "adasum" or size == 1:
        return
    if options.process_set is not None or size & (size - 1):
        raise ValueError(
            "Adasum works on all ranks together, and on 2, 4, 8, … of them. Received: "
            f'op="adasum", {size} ranks, process_set={options.process_set}. '
            'Take op="average", or another number of ranks.'
        )
    if not comm.has_mpi():
        raise ValueError(
            "Adasum needs a Horovod whose ranks talk over MPI. Received: "
            f'op="adasum" over {comm.transport_name()}. Run `keras-dist '
            "install-horovod --mpi` and start the ranks with mpirun."
        )
