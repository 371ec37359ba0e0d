"""The device for a name, as people type it or as nvidia-smi and torch print it; or a card from its numbers.

Names are compared word by word, never as substrings: "a40" does not match "A4000", and "4070" is the desktop card, not
the Ti, SUPER or laptop one. A name that fits cards of different memory is an error that lists them: a wrong guess costs
the user a day.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from msgspec.structs import replace

from oomph.devices.device import Device, DeviceKind, context_by_rule, usable_by_rule
from oomph.errors import InputError, Problem, nearest

BY_NUMBERS = "describe the card with --gpu_mib, --gpu_tflops, --gpu_gbs and --gpu_watts"

# Words that never distinguish two devices.
_MAKERS = {"nvidia", "amd", "apple", "geforce", "tesla", "radeon", "instinct"}
_MEMORY_KINDS = {"hbm2", "hbm2e", "hbm3", "hbm3e", "gddr5", "gddr5x", "gddr6", "gddr6x", "gddr7", "gb", "gib", "g"}
_NOISE = _MAKERS | _MEMORY_KINDS | {"gpu", "graphics", "card", "generation", "edition"}
# Words in a device's name that may be left out.
_OPTIONAL = frozenset(
    ("rtx", "gtx", "rx", "quadro", "ada", "blackwell", "workstation", "pascal", "sxm", "pcie", "nvl", "per", "gcd")
)
_SAME_WORD = {"mobile": "laptop", "notebook": "laptop"}
_BRAND_GLUED = re.compile(r"^(nvidia|geforce|quadro|tesla|rtx|gtx|rx)(?=[a-z]?\d)")
_NUMBER_GLUED = re.compile(r"^(\d{3,4})(tisuper|tis|ti|super|s|xtx|xt|d|m|laptop|mobile)$")
_CHIP_GLUED = re.compile(r"^(m\d)(pro|max|ultra)$")
_SUFFIXES = {"tisuper": ("ti", "super"), "tis": ("ti", "super"), "s": ("super",), "m": ("laptop",)}
_MEMORY = re.compile(r"^(\d{1,6})(gb|gib|g|mib|mb)$")
_LIMITS = {  # option: (least, most, unit)
    "mib": (64.0, 64e6, "MiB"),
    "tflops": (1e-3, 1e6, "TFLOPS, dense, half precision"),
    "gbs": (1e-2, 1e6, "GB/s"),
    "watts": (0.1, 1e5, "watts"),
}


class Words(NamedTuple):
    """A device name split into words."""

    model: frozenset[str]  # the words that name a model
    memory_mib: int | None  # a size that the name states
    bare_numbers: tuple[int, ...]  # small numbers that may be a size in GB: the 16 of "4060 ti 16"


def find(name: str, memory_mib: int | None = None) -> Device:
    """The catalogue's device for `name`. Raises `InputError` if none matches, or several do.

    `memory_mib` is the card's real total, as nvidia-smi prints it: it decides between cards of one name, and is set
    in the returned device.
    """
    fitting = list(_exact().get(_plain(name), ()))
    if len(fitting) != 1:
        fitting = _fitting(take_apart(name))
    if not fitting:
        raise InputError(_unknown(name))
    if memory_mib is not None:
        return with_memory(_one_form(name, _closest(fitting, memory_mib)), memory_mib)
    if len({device.memory_mib for device in fitting}) > 1:
        if not any(device.usual for device in fitting):
            raise InputError(_several(name, fitting))
        fitting.sort(key=lambda device: not device.usual)
    return _one_form(name, fitting)


_BEFORE = re.compile(r"^\s*(\d{1,6})\s*[x×*]\s*(\S.*?)\s*$", re.IGNORECASE)
_AFTER = re.compile(r"^\s*(.*[\d\s)])[x×*]\s*(\d{1,6})\s*$", re.IGNORECASE)
_MODEL_DIGITS = 3  # at least, in a number that names a card: 2x4090 and 4090x2 are two cards


MACHINE_CARDS = 8  # on an NVIDIA HGX board and in most servers


def all_cards(count: int, nodes: int | None) -> tuple[int, int]:
    """How many cards there are, and in how many machines: `count` in each of `nodes`. If the number of machines is
    not given, more cards than one holds are in several full ones."""
    if nodes is not None:
        return count * nodes, nodes
    several = count > MACHINE_CARDS and count % MACHINE_CARDS == 0
    return count, count // MACHINE_CARDS if several else 1


def split_count(name: str) -> tuple[str, int | None]:
    """The card's name and the number of cards in "8xH100", "4090x4" and "RTX 3090 x2"; None if there is no number.

    With a number, an ambiguous name means the SXM card of that name, if only one such card is for rent.
    """
    if (found := _BEFORE.match(name)) and len(found[1]) < _MODEL_DIGITS + (not found[2].isdigit()):
        return _on_a_board(found[2]), int(found[1])
    if (found := _AFTER.match(name)) and found[1].strip():
        return _on_a_board(found[1].strip()), int(found[2])
    return name, None


def _on_a_board(name: str) -> str:
    fitting = _fitting(take_apart(name)) if _plain(name) not in _exact() else []
    boards = [device for device in fitting if "SXM" in device.name and device.usd_per_hour_low is not None]
    ambiguous = len({device.memory_mib for device in fitting}) > 1 and not any(device.usual for device in fitting)
    return boards[0].name if ambiguous and len(boards) == 1 else name


def with_memory(device: Device, memory_mib: int) -> Device:
    """The card with another memory total; old drivers report up to 2 % less for the same memory."""
    if memory_mib == device.memory_mib:
        return device
    reported = abs(memory_mib - device.memory_mib) <= 0.02 * device.memory_mib
    usable_mib = min(device.usable_mib, memory_mib) if reported else usable_by_rule(memory_mib, device.kind)
    return replace(device, memory_mib=memory_mib, usable_mib=usable_mib)


def take_apart(name: str) -> Words:
    """The words of a name that identify its model, and the memory it states."""
    text = re.sub(r"max[\s_-]?q\b", "maxq", name.lower())
    words: list[str] = []
    for chunk in re.findall(r"[a-z0-9]+", text):
        words.extend(_unglue(chunk))
    model: set[str] = set()
    bare: list[int] = []
    memory_mib: int | None = None
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if stated := _MEMORY.match(word):
            memory_mib = int(stated[1]) * (1 if stated[2] in ("mib", "mb") else 1024)
        elif word.isdigit() and len(word) <= 3 and following in ("gb", "gib", "g"):
            memory_mib = int(word) * 1024
        elif word.isdigit() and len(word) <= 3:
            bare.append(int(word))
        elif word not in _NOISE:
            model.add(word)
    return Words(frozenset(model), memory_mib, tuple(bare))


def _unglue(chunk: str) -> list[str]:
    """Split "rtx4070ti" into its words; letters and digits of a model such as "a100" stay together."""
    words: list[str] = []
    while glued := _BRAND_GLUED.match(chunk):
        words.append(glued[1])
        chunk = chunk[glued.end() :]
    if number := _NUMBER_GLUED.match(chunk):
        suffix = _SUFFIXES.get(number[2], (number[2],))
        return [*words, number[1], *(_SAME_WORD.get(word, word) for word in suffix)]
    if chip := _CHIP_GLUED.match(chunk):
        return [*words, chip[1], chip[2]]
    if re.match(r"^sxm\d?$", chunk):
        chunk = "sxm"
    return [*words, _SAME_WORD.get(chunk, chunk)]


@cache
def _model_words() -> tuple[tuple[Device, frozenset[str], frozenset[str]], ...]:
    """Each device with the words its name must have and those it may have."""
    table = []
    for device in all_devices():
        words = take_apart(device.name).model
        optional = words & _OPTIONAL
        if "titan" in words:  # "TITAN RTX" and "TITAN X (Pascal)": the second word is the model
            optional &= {"pascal"}
        table.append((device, words - optional, words))
    return tuple(table)


@cache
def _exact() -> dict[str, tuple[Device, ...]]:
    """Every name and alias, without case and maker, and the devices that have it."""
    names: dict[str, tuple[Device, ...]] = {}
    for device in all_devices():
        for name in dict.fromkeys(_plain(name) for name in (device.name, *device.aliases)):
            names[name] = (*names.get(name, ()), device)
    return names


def _plain(name: str) -> str:
    return " ".join(word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in ("nvidia", "amd"))


def _fitting(words: Words) -> list[Device]:
    """The devices with these model words, whose memory does not contradict the name."""
    if not words.model:
        return []
    named = [device for device, must, may in _model_words() if must <= words.model <= may]
    if not named and "maxq" in words.model:  # NVIDIA's older word for the laptop versions
        return _fitting(words._replace(model=words.model - {"maxq"} | {"laptop"}))
    sizes = [words.memory_mib] if words.memory_mib is not None else [number * 1024 for number in words.bare_numbers]
    for size in sizes:
        named = _closest([device for device in named if _is_size(device, size)], size)
    return named


def _closest(devices: list[Device], memory_mib: int) -> list[Device]:
    """The devices whose memory is nearest to the given size."""
    distance = min((abs(device.memory_mib - memory_mib) for device in devices), default=0)
    return [device for device in devices if abs(device.memory_mib - memory_mib) == distance]


def _is_size(device: Device, marketed_mib: int) -> bool:
    """Whether the card is sold with that much memory: nvidia-smi shows up to 7 % less (ECC)."""
    return 0.93 * marketed_mib <= device.memory_mib <= 1.05 * marketed_mib


def _one_form(name: str, fitting: Sequence[Device]) -> Device:
    """The first device; with a note if there are others, which differ in their socket or are less usual."""
    first, *others = fitting
    if not others:
        return first
    note = f"{name!r} was taken as {first.name}; it may also be {', '.join(device.name for device in others)}."
    return replace(first, notes=(*first.notes, note))


def _several(name: str, fitting: Sequence[Device]) -> Problem:
    return Problem(
        where="gpu",
        what="several cards have this name",
        found=repr(name),
        allowed=", ".join(repr(device.name) for device in fitting) + ", or give its memory with --gpu_mib",
    )


def _unknown(name: str) -> Problem:
    words = take_apart(name)
    same_model = _fitting(Words(words.model, None, ())) if words.memory_mib or words.bare_numbers else []
    if same_model:
        sizes = ", ".join(f"{device.name!r} ({device.memory_mib} MiB)" for device in same_model)
        return Problem("gpu", "no such card with this memory", repr(name), f"{sizes}, or another size with --gpu_mib")
    close = " or ".join(repr(device.name) for device in _nearest(words.model))
    return Problem("gpu", "unknown device", repr(name), f"a name of the catalogue; or {BY_NUMBERS}", close or None)


def _nearest(model: frozenset[str]) -> list[Device]:
    """Up to three devices that share most words with an unknown name, else the closest in spelling."""
    model -= _OPTIONAL
    shared = {device.name: (len(model & must), -len(model ^ must)) for device, must, _ in _model_words()}
    best = max(shared.values())
    if best[0] > 0:
        return [device for device in all_devices() if shared[device.name] == best][:3]
    spelt = {" ".join(sorted(must)): device for device, must, _ in _model_words()}
    close = nearest(" ".join(sorted(model)), list(spelt))
    return [spelt[close]] if close else []


# --- a card by its numbers ----------------------------------------------------------------------------


def custom(
    name: str | None = None,
    *,
    mib: int | float | str | None = None,
    tflops: int | float | str | None = None,
    gbs: int | float | str | None = None,
    watts: int | float | str | None = None,
    compute_capability: float | None = None,
) -> Device:
    """A device from its memory (MiB), half-precision peak (TFLOPS), bandwidth (GB/s) and power (W).

    With the name of a known card, the given numbers replace that card's. A figure neither given nor known is None, and
    predictions that need it are left out.
    """
    problems: list[Problem] = []
    figures = {
        option: _read(option, value, problems)
        for option, value in {"mib": mib, "tflops": tflops, "gbs": gbs, "watts": watts}.items()
    }
    memory = figures["mib"]
    memory_mib = None if memory is None else round(memory)
    base = _known(name, memory_mib, problems)
    if base is None and memory_mib is None and not problems:
        problems.append(
            Problem("--gpu_mib", "is needed for a card that is not in the catalogue", allowed=_allowed("mib"))
        )
    if problems:
        raise InputError(problems)
    if base is None:
        base = _blank(name or "custom GPU", memory_mib or 0, compute_capability)
    elif memory_mib is not None:
        base = with_memory(base, memory_mib)
    return _with_figures(base, figures["tflops"], figures["gbs"], figures["watts"])


def _read(option: str, value: int | float | str | None, problems: list[Problem]) -> float | None:
    if value is None:
        return None
    least, most, _ = _LIMITS[option]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if least <= number <= most:  # false for nan
        return number
    problems.append(Problem(f"--gpu_{option}", "is out of range", found=str(value), allowed=_allowed(option)))
    return None


def _allowed(option: str) -> str:
    least, most, unit = _LIMITS[option]
    return f"{least:g} to {most:g} {unit}"


def _known(name: str | None, memory_mib: int | None, problems: list[Problem]) -> Device | None:
    """The catalogue's card of that name. An unknown name is allowed if the memory is given."""
    if name is None:
        return None
    try:
        return find(name, memory_mib)
    except InputError as error:
        if memory_mib is None:
            problems.extend(error.problems)
        return None


def _blank(name: str, memory_mib: int, compute_capability: float | None) -> Device:
    has_bf16 = compute_capability is None or compute_capability >= 8.0
    notes = () if compute_capability is not None else ("Assumed to have bfloat16 in hardware.",)
    return Device(
        name=name,
        kind="cuda",
        vendor="",
        arch="",
        compute_capability=compute_capability,
        memory_mib=memory_mib,
        usable_mib=usable_by_rule(memory_mib),
        context_mib=context_by_rule(None),
        has_bf16=has_bf16,
        source="given",
        notes=notes,
    )


def _with_figures(device: Device, tflops: float | None, gbs: float | None, watts: float | None) -> Device:
    given = [word for word, value in (("peak", tflops), ("bandwidth", gbs), ("power", watts)) if value is not None]
    if tflops is not None:
        known = device.source != "given"
        device = replace(
            device,
            tflops_fp16=tflops,
            tflops_bf16=tflops if device.has_bf16 else None,
            tflops_tf32=device.tflops_tf32 if known else tflops / 2,
            tflops_fp32=device.tflops_fp32 if known else tflops / 4,
            gemm_tflops_low=None,  # measured against the peak that was replaced
            gemm_tflops_high=None,
        )
        if not known:
            note = "float32 is taken as a half (TF32) and a quarter of the half-precision peak."
            device = replace(device, notes=(*device.notes, note))
    if gbs is not None:
        device = replace(device, bandwidth_gbs=gbs)
    if watts is not None:
        if device.watts and watts < device.watts and device.gemm_tflops_low and device.gemm_tflops_high:
            slower = (watts / device.watts) ** (1 / 3)  # power grows with the cube of the clock, as voltage follows it
            low, high = slower * device.gemm_tflops_low, slower * device.gemm_tflops_high
            device = replace(device, gemm_tflops_low=low, gemm_tflops_high=high)
        device = replace(device, watts=watts)
    if given and device.source != "given":
        device = replace(device, source=f"{device.source}; {', '.join(given)} as given")
    return device


TABLE = Path(__file__).with_name("catalogue.txt")


@cache
def all_devices() -> tuple[Device, ...]:
    """Every device in the catalogue: by maker and generation, then class, then speed or memory."""
    return tuple(parse(TABLE.read_text(encoding="utf-8")))


def parse(text: str) -> Iterator[Device]:
    """The devices in a table of the catalogue's format."""
    section: tuple[str, str, str, str] | None = None
    figures: list[str] = []
    details: dict[str, str] = {}
    for line in [*text.splitlines(), "[end]"]:
        if line.startswith("    "):
            key, _, value = line.strip().partition(": ")
            details[key] = value
        elif line and not line.startswith("#"):
            if figures and section is not None:
                yield from _devices(section, figures, details)
            figures, details = [], {}
            if line.startswith("["):
                rate_class, _, rest = line[1:].partition("]")
                vendor, _, kind_and_arch = rest.partition("#")[0].strip().partition(", ")
                kind, _, arch = kind_and_arch.partition(", ")
                section = (rate_class, vendor, kind, arch)
            else:
                figures = [cell.strip() for cell in line.split("|")]


def _devices(section: tuple[str, str, str, str], figures: list[str], details: dict[str, str]) -> Iterator[Device]:
    """One device, or one for each size if the memory column lists several."""
    rate_class, vendor, kind_text, arch = section
    kind = cast(DeviceKind, kind_text)
    name, capability, sm, mhz, memory, usable, context, *rest = figures
    compute_capability, sm_count = _number(capability), _whole(sm)
    bandwidth, fp16, bf16, tf32, fp32, emulated, low, high, watts, usd_low, usd_high = map(_number, rest)
    sizes = [int(size) for size in memory.split("/")]
    for memory_mib in sizes:
        context_mib, usable_mib = _whole(context), _whole(usable)
        yield Device(
            name=name if len(sizes) == 1 else f"{name} {memory_mib // 1024}GB",
            kind=kind,
            vendor=vendor,
            arch=arch,
            rate_class=rate_class,
            compute_capability=compute_capability,
            sm_count=sm_count,
            boost_mhz=_whole(mhz),
            memory_mib=memory_mib,
            usable_mib=usable_by_rule(memory_mib, kind) if usable_mib is None else usable_mib,
            context_mib=context_by_rule(sm_count, arch, kind) if context_mib is None else context_mib,
            bandwidth_gbs=bandwidth,
            tflops_fp16=fp16,
            tflops_bf16=bf16,
            tflops_tf32=tf32,
            tflops_fp32=fp32,
            bf16_emulated_tflops=emulated,
            gemm_tflops_low=low,
            gemm_tflops_high=high,
            watts=watts,
            usd_per_hour_low=usd_low,
            usd_per_hour_high=usd_high,
            has_bf16=bf16 is not None,
            usual="usual" in details,
            aliases=tuple(details["also"].split("; ")) if "also" in details else (),
            source=details["from"],
            notes=(details["note"],) if "note" in details else (),
        )


def _number(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


def _whole(cell: str) -> int | None:
    return None if cell == "-" else int(cell)
