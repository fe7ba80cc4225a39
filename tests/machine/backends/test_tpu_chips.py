from __future__ import annotations

from pathlib import Path

from anytrain.machine.backends.capabilities import tpu_chips


def _card(bus: Path, slot: str, vendor: str, device: str) -> None:
    (bus / slot).mkdir()
    (bus / slot / "vendor").write_text(f"{vendor}\n")
    (bus / slot / "device").write_text(f"{device}\n")


def test_tpu_chips_are_told_from_googles_network_cards(tmp_path: Path) -> None:
    _card(tmp_path, "0000:00:04.0", "0x1ae0", "0x0042")
    _card(tmp_path, "0000:00:05.0", "0x1ae0", "0x0063")
    _card(tmp_path, "0000:00:06.0", "0x1ae0", "0x0063")
    _card(tmp_path, "0000:00:07.0", "0x10de", "0x0063")
    (tmp_path / "0000:00:08.0").mkdir()
    assert tpu_chips(tmp_path) == ("TPU v5e", "TPU v5e")


def test_a_host_without_a_pci_bus_has_no_chips(tmp_path: Path) -> None:
    assert tpu_chips(tmp_path / "none") == ()
