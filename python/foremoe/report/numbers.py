"""Numbers as text: three significant digits, a non-breaking space and a suitable unit."""

from __future__ import annotations

SPACE = "\u00a0"


def seconds_text(seconds: float) -> str:
    """ "3.2 s", "34.0 ms", "78.0 µs"."""
    if seconds == 0:
        return f"0{SPACE}s"
    if abs(seconds) >= 0.9995:
        return f"{_three_digits(seconds)}{SPACE}s"
    if abs(seconds) >= 0.9995e-3:
        return f"{_three_digits(1e3 * seconds)}{SPACE}ms"
    return f"{_three_digits(1e6 * seconds)}{SPACE}µs"


def bytes_text(count: float) -> str:
    """ "2.70 GB", in powers of a thousand."""
    unit, *larger = ("B", "kB", "MB", "GB", "TB", "PB")
    text = f"{count:.0f}"
    while abs(count) >= 999.5 and larger:
        count /= 1000
        unit, text = larger.pop(0), _three_digits(count)
    return f"{text}{SPACE}{unit}"


def times_text(factor: float) -> str:
    """ "1.42×"."""
    return f"{factor:.{0 if factor >= 99.5 else 2}f}×"


def percent_text(fraction: float) -> str:
    """ "97.3 %"."""
    return f"{100 * fraction:.1f}{SPACE}%"


def count_text(count: int) -> str:
    """ "12,345"."""
    return f"{count:,}"


def ratio_text(ratio: float) -> str:
    """ "1.017"; "17.2" from 10 on."""
    return f"{ratio:.{1 if abs(ratio) >= 9.9995 else 3}f}"


def counted(count: int, noun: str) -> str:
    """ "1 rank", "8 ranks"."""
    return f"{count_text(count)} {noun}{'' if count == 1 else 's'}"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
