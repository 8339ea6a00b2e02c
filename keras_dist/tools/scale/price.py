"""What a run costs."""

import re
from dataclasses import dataclass

_FORM = re.compile(
    r"(?P<before>[^\d.\s]*)\s*(?P<amount>\d*\.?\d+)\s*(?P<after>[^\d./\s]*)"
    r"/\s*(?:hour|h)(?:/(?P<unit>rank|gpu|host))?"
)


@dataclass(frozen=True)
class Price:
    """A price by time.

    Args:
        amount: What an hour costs.
        currency: As it was given: "$", "EUR", or "".
        is_of_host: Whether it is the price of a host, and not of a rank.
    """

    amount: float
    currency: str = ""
    is_of_host: bool = False

    def of(self, seconds: float, *, ranks: int, hosts: int) -> float:
        """What so many seconds on all ranks cost."""
        return self.amount * (hosts if self.is_of_host else ranks) * seconds / 3600

    def __str__(self) -> str:
        unit = "host" if self.is_of_host else "rank"
        return f"{self.currency}{self.amount:g}/hour for each {unit}"


def price_of(text: str) -> Price:
    """A price as it is given on the command line.

    >>> str(price_of("2.5/hour")), str(price_of("$10/hour/host"))
    ('2.5/hour for each rank', '$10/hour for each host')

    Raises:
        ValueError: If it has another form.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            "A price is that of an hour of a rank, as in 2.5/hour or $2.5/hour, or of "
            f"a host, as in 10/hour/host. Received: --price {text}"
        )
    currency = found["before"] or found["after"]
    return Price(float(found["amount"]), currency, found["unit"] == "host")
