"""See TPU chips on the PCI bus, without loading a runtime that would claim them."""

from __future__ import annotations

from pathlib import Path

_GOOGLE = "0x1ae0"
TWO_DEVICES = "TPU v2/v3"
# Google's network cards carry the same vendor number: only these devices are TPUs.
_NAMES = {
    "0x0027": TWO_DEVICES,
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU v7",
}


def tpu_chips(bus: Path = Path("/sys/bus/pci/devices")) -> tuple[str, ...]:
    """Return the name of each TPU chip on this host; empty where there is none."""
    found = []
    for card in sorted(bus.iterdir()) if bus.is_dir() else []:
        try:
            vendor = (card / "vendor").read_text().strip()
            device = (card / "device").read_text().strip()
        except OSError:
            continue
        if vendor == _GOOGLE and device in _NAMES:
            found.append(_NAMES[device])
    return tuple(found)
