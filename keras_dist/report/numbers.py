"""Numbers as text, as they stand in tables and sentences."""

from typing import Any


def rounded(value: Any, digits: int = 4) -> str:
    """A number with so many significant digits; "–" if there is none.

    >>> [rounded(value) for value in (12345.6, 0.98765, 1e-05, None, "nan", 3.0)]
    ['12,346', '0.9877', '1e-05', '–', 'nan', '3']
    """
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """A fraction in percent.

    >>> percent(0.4123), percent(0.004), percent(None)
    ('41 %', '0.4 %', '–')
    """
    if value is None:
        return "–"
    digits = 1 if 0 < abs(value) < 0.0995 else 0
    return f"{100 * value:.{digits}f} %"


def seconds(value: float | None) -> str:
    """Seconds, minutes or hours.

    >>> [seconds(value) for value in (0.5, 42.3, 90, 7300, None)]
    ['0.50 s', '42.3 s', '1 min 30 s', '2 h 1 min', '–']
    """
    if value is None:
        return "–"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(value: float | None) -> str:
    """Bytes, as MB or GB.

    >>> size(1_500_000), size(2_340_000_000), size(None)
    ('1.5 MB', '2.34 GB', '–')
    """
    if value is None:
        return "–"
    if value < 1e9:
        return f"{value / 1e6:,.3g} MB" if value < 1e8 else f"{value / 1e6:,.0f} MB"
    return f"{value / 1e9:,.3g} GB"


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "rank"), counted(2, "epoch")
    ('1 rank', '2 epochs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
