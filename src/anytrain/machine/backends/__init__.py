"""One file per vendor, found through the table in `probe`."""
