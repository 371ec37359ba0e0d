"""`Link`: what connects the cards of one machine, and machines; found by name, or as `nvidia-smi topo -m` prints it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import msgspec

from oomph.devices.device import Device
from oomph.errors import InputError, Problem, nearest

TABLE = Path(__file__).with_name("links.txt")
_BONDED = re.compile(r"^nv(\d{1,2})$")
# GB/s that one NVLink carries one way in collectives: 20 of 25 (nccl-tests 149), 0.8 of GA102's 14.06 and of
# NVLink 5's 50. By architecture; Turing's is measured (bridge2).
_BONDED_GBS = {"GA102": 11.25, "Turing": 10.8, "Blackwell": 40.0}
_ONE_BONDED_GBS = 20.0
# Buffers of NCCL's three protocols per channel and connection (its src/init.cc: 4 MiB, 4.7 MiB and 0.5 MiB), and the
# receiving connections: one in a ring, two in a tree.
CHANNEL_MIB, CONNECTIONS = 9.2, 3
ACROSS_SOCKETS_GBS = 10.0  # NCCL's own figure for the path between two sockets (nccl-tests 307)


class Link(msgspec.Struct, frozen=True):
    """One link, or one network port. Rates are per card, one way, in 1e9 bytes a second."""

    name: str
    gbs: float  # rated
    bus_gbs: float  # reached by all-gathers, reduce-scatters and ring all-reduces
    bus_low_gbs: float
    bus_high_gbs: float
    reduce_gbs: float  # reached by all-reduces
    latency_us: float  # of a small collective
    channels: int  # of NCCL's rings over it
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def nccl_mib(self) -> float:
        """Memory that NCCL holds for it outside PyTorch's allocator: derived from its source, not measured."""
        return self.channels * CONNECTIONS * CHANNEL_MIB


@cache
def all_links() -> dict[str, tuple[Link, ...]]:
    """The links between cards and the networks between machines, from the table."""
    found: dict[str, list[Link]] = {}
    figures: list[str] = []
    details: dict[str, str] = {}
    section = ""
    for line in [*TABLE.read_text(encoding="utf-8").splitlines(), "[end]"]:
        if line.startswith("    "):
            key, _, value = line.strip().partition(": ")
            details[key] = value
        elif line and not line.startswith("#"):
            if figures:
                found.setdefault(section, []).append(_link(figures, details))
            figures, details = [], {}
            if line.startswith("["):
                section = line[1:-1]
            else:
                figures = [cell.strip() for cell in line.split("|")]
    return {name: tuple(links) for name, links in found.items()}


def _link(figures: list[str], details: dict[str, str]) -> Link:
    name, gbs, bus, low, high, reduce, latency, channels = figures
    also = tuple(details["also"].split("; ")) if "also" in details else ()
    reduce_gbs = float(bus if reduce == "-" else reduce)
    rates = (float(gbs), float(bus), float(low), float(high), reduce_gbs)
    return Link(name, *rates, float(latency), int(channels), details["from"], also)


def _named(kind: str) -> dict[str, Link]:
    return {name: link for link in all_links()[kind] for name in (link.name, *link.aliases)}


def usual_link(device: Device) -> tuple[str, str]:
    """The link assumed for cards of this kind if none is given, and why."""
    name, generation = device.name, _pcie(device)
    if "MI3" in name or "MI2" in name:
        return "xgmi", f"{name} has it"
    if "SXM" in name or name.startswith(("GH200", "H20 ", "HGX")):
        return f"nvlink{_nvlink(device)}", f"{name} has it"
    if name.startswith(("GeForce", "TITAN")):
        return (
            f"host{generation}",
            f"a {name} has no peer-to-peer over PCIe in NVIDIA's driver; --link bridge for NVLink",
        )
    return f"pcie{generation}", f"assumed for {name}"


def _pcie(device: Device) -> int:
    """The PCIe generation of a card."""
    if device.arch in ("Pascal", "Volta", "Turing"):
        return 3
    return 5 if device.arch in ("Blackwell", "Hopper") else 4


def _nvlink(device: Device) -> int:
    return {"Pascal": 1, "Volta": 2, "Ampere": 3, "Hopper": 4}.get(device.arch, 5)


def find_link(name: str, device: Device) -> Link:
    """The link of that name between cards of this kind. Raises `InputError` if there is none."""
    word = name.strip().lower()
    known = _named("link")
    generation = _pcie(device)
    own = {
        "nvlink": f"nvlink{_nvlink(device)}" if "SXM" in device.name else _bridge(device),
        "pcie": f"pcie{generation}", "host": f"host{generation}", "none": f"host{generation}",
        "pix": f"pcie{generation}", "pxb": f"pcie{generation}", "phb": f"pcie{generation}", "node": f"pcie{generation}",
    }  # fmt: skip
    if bonded := _BONDED.match(word):
        return _bonded(int(bonded[1]), device)
    if word == "sys":
        base = known[f"pcie{generation}"]
        rate = min(base.bus_gbs, ACROSS_SOCKETS_GBS)
        return msgspec.structs.replace(
            base, name="SYS", bus_gbs=rate, reduce_gbs=rate, bus_low_gbs=rate / 2, bus_high_gbs=base.bus_gbs
        )
    found = known.get(own.get(word, word))
    if found is None:
        names = [*known, *own, "NV4", "SYS"]
        raise InputError(Problem("link", "no such link", name[:60], ", ".join(names), nearest(word, names)))
    return msgspec.structs.replace(found, name=name.strip()) if word in ("pix", "pxb", "phb", "node") else found


def _bridge(device: Device) -> str:
    if device.arch == "Turing":
        return "bridge2"
    return "bridge12" if device.name.startswith(("A100", "A800", "H100", "H800", "H200")) else "bridge"


def _bonded(links: int, device: Device) -> Link:
    """NV4 and the like: that many NVLinks between two cards."""
    is_ga102 = device.arch == "Ampere" and not device.name.startswith(("A100", "A800", "A30"))
    each = _BONDED_GBS.get("GA102" if is_ga102 else device.arch, _ONE_BONDED_GBS)
    rate = max(1, links) * each
    like = _named("link")[f"nvlink{_nvlink(device)}" if "SXM" in device.name else _bridge(device)]
    return msgspec.structs.replace(
        like, name=f"NV{links}", gbs=rate / 0.8, bus_gbs=rate, bus_low_gbs=0.85 * rate, bus_high_gbs=1.1 * rate,
        reduce_gbs=rate,
    )  # fmt: skip


def usual_network(device: Device) -> tuple[str, str]:
    """The network assumed between machines with such cards if none is given, and why."""
    if "SXM" in device.name or device.name.startswith(("GH200", "H20 ", "Instinct")):
        name = {"Hopper": "ib400", "Blackwell": "ib400", "Ampere": "ib200"}.get(device.arch, "ib100")
        return name, f"assumed: one port for each {device.name}, as in NVIDIA's DGX"
    return "eth25", "assumed: one port for each card"


def find_network(name: str) -> Link:
    """One card's port of that network. Raises `InputError` if there is none."""
    known = _named("network")
    found = known.get(name.strip().lower())
    if found is None:
        names = list(known)
        raise InputError(Problem("network", "no such network", name[:60], ", ".join(names), nearest(name, names)))
    return found
