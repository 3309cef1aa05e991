"""Machines and small targets, run open-ended: see `python -m fuzz --help`."""
