"""Hardware: a catalogue of GPUs with sources, this machine's own devices, and what was measured on them."""

from oomph.devices.device import RATES, Device
from oomph.devices.lookup import all_cards, all_devices, custom, find, split_count
from oomph.devices.machine import detect, may_measure
from oomph.devices.ratios import calibrated

__all__ = [
    "RATES",
    "Device",
    "all_cards",
    "all_devices",
    "calibrated",
    "custom",
    "detect",
    "find",
    "may_measure",
    "split_count",
]
