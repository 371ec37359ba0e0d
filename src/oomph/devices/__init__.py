"""Hardware: a catalogue of GPUs with sources, the machine's own devices, and what suits them badly."""

from oomph.devices.advice import warnings
from oomph.devices.by_numbers import custom
from oomph.devices.catalogue import all_devices
from oomph.devices.device import RATES, Device
from oomph.devices.lookup import find
from oomph.devices.machine import detect, may_measure
from oomph.devices.ratios import calibrated

__all__ = ["RATES", "Device", "all_devices", "calibrated", "custom", "detect", "find", "may_measure", "warnings"]
