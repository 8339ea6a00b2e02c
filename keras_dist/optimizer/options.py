"""The options of averaging, as one frozen value."""

from dataclasses import dataclass
from typing import Literal, get_args

Op = Literal["average", "sum"]
Compression = Literal["fp16", "bf16"]


@dataclass(frozen=True)
class Averaging:
    """Options of the averaging, checked.

    Args:
        op: `"average"`, weighted by the rows of each rank, or `"sum"`.
        compression: How numbers are sent: `None` uncompressed, `"fp16"` or `"bf16"`.

    Raises:
        ValueError: If an option is unknown.
    """

    op: Op = "average"
    compression: Compression | None = None

    def __post_init__(self) -> None:
        if self.op not in get_args(Op):
            raise ValueError(
                f'`op` must be "average" or "sum". Received: op={self.op!r}'
            )
        if self.compression not in (None, *get_args(Compression)):
            raise ValueError(
                '`compression` must be None, "fp16" or "bf16". '
                f"Received: compression={self.compression!r}"
            )
