"""Format sizes, times and rates for people."""

from __future__ import annotations

_SIZES = ((2**40, "TiB", 2), (2**30, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 1))


def size(num_bytes: float) -> str:
    """Return a size with its unit.

    >>> size(3 * 2**29), size(5 * 2**20), size(2**10), size(96), size(2**50)
    ('1.50 GiB', '5.0 MiB', '1.0 KiB', '96 bytes', '1,024.00 TiB')
    """
    for unit, name, places in _SIZES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.{places}f} {name}"
    return f"{num_bytes:.0f} bytes"


def seconds(value: float) -> str:
    """Return a time with its unit.

    >>> seconds(0.0123), seconds(0.1338), seconds(0.9996), seconds(2.54), seconds(0.00004)
    ('12 ms', '134 ms', '1.0 s', '2.5 s', '0.04 ms')
    >>> seconds(59.97), seconds(600)
    ('60.0 s', '10.0 min')
    """
    if value >= 120:
        return f"{value / 60:,.1f} min"
    if value >= 0.9995:
        return f"{value:.1f} s"
    return f"{plain(value * 1e3)} ms"


def plain(value: float) -> str:
    """Return a number with two digits that count, and never as a power of ten.

    >>> plain(1338.2), plain(98.4), plain(7.26), plain(0.0421), plain(0.0), plain(3.2e-7)
    ('1,338', '98', '7.3', '0.042', '0', '0.00000032')
    """
    if abs(value) >= 9.95:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    places = 1
    while abs(value) * 10**places < 9.95 and places < 12:
        places += 1
    return f"{value:.{places}f}".rstrip("0").rstrip(".")
