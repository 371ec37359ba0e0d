"""Finds the device that somebody means, from what people type and what nvidia-smi and torch print.

Names are compared word by word, never as substrings: "a40" is no part of "A4000", "4070" is the
desktop card and no Ti, SUPER or laptop. A name that fits cards of different memory is refused with
the list, because guessing wrong costs a day.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from msgspec.structs import replace

from oomph.devices.catalogue import all_devices
from oomph.devices.device import Device, usable_by_rule
from oomph.errors import InputError, Problem, nearest

BY_NUMBERS = "describe the card with --gpu_mib, --gpu_tflops, --gpu_gbs and --gpu_watts"

# Words that carry no choice, on any device.
_MAKERS = {"nvidia", "amd", "apple", "geforce", "tesla", "radeon", "instinct"}
_MEMORY_KINDS = {"hbm2", "hbm2e", "hbm3", "hbm3e", "gddr5", "gddr5x", "gddr6", "gddr6x", "gddr7", "gb", "gib", "g"}
_NOISE = _MAKERS | _MEMORY_KINDS | {"gpu", "graphics", "card", "generation", "edition"}
# Words of a device's name that one may leave out.
_OPTIONAL = frozenset(
    ("rtx", "gtx", "rx", "quadro", "ada", "blackwell", "workstation", "pascal", "sxm", "pcie", "nvl", "per", "gcd")
)
_SAME_WORD = {"mobile": "laptop", "notebook": "laptop"}
_BRAND_GLUED = re.compile(r"^(nvidia|geforce|quadro|tesla|rtx|gtx|rx)(?=[a-z]?\d)")
_NUMBER_GLUED = re.compile(r"^(\d{3,4})(tisuper|tis|ti|super|s|xtx|xt|d|m|laptop|mobile)$")
_CHIP_GLUED = re.compile(r"^(m\d)(pro|max|ultra)$")
_SUFFIXES = {"tisuper": ("ti", "super"), "tis": ("ti", "super"), "s": ("super",), "m": ("laptop",)}
_MEMORY = re.compile(r"^(\d{1,6})(gb|gib|g|mib|mb)$")


class Words(NamedTuple):
    """A name taken apart."""

    model: frozenset[str]  # the words that name a model
    memory_mib: int | None  # a size that the name states
    bare_numbers: tuple[int, ...]  # small numbers that may be a size in GB: the 16 of "4060 ti 16"


def find(name: str, memory_mib: int | None = None) -> Device:
    """The catalogue's device for `name`; raises InputError where none fits, or several do.

    `memory_mib` is the card's real total, as nvidia-smi prints it: it decides between cards of one
    name, and the device returned has it.
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


def with_memory(device: Device, memory_mib: int) -> Device:
    """The same card with another memory total; old drivers show up to 2 % less of the same memory."""
    if memory_mib == device.memory_mib:
        return device
    reported = abs(memory_mib - device.memory_mib) <= 0.02 * device.memory_mib
    usable_mib = min(device.usable_mib, memory_mib) if reported else usable_by_rule(memory_mib, device.kind)
    return replace(device, memory_mib=memory_mib, usable_mib=usable_mib)


def take_apart(name: str) -> Words:
    """Splits a name into the words that choose a model and the memory it states."""
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
    """ "rtx4070ti" into its words; letters and digits of a model such as "a100" stay together."""
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
    """Every name and alias, as typed without case and maker, and the devices that carry it."""
    names: dict[str, tuple[Device, ...]] = {}
    for device in all_devices():
        for name in dict.fromkeys(_plain(name) for name in (device.name, *device.aliases)):
            names[name] = (*names.get(name, ()), device)
    return names


def _plain(name: str) -> str:
    return " ".join(word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in ("nvidia", "amd"))


def _fitting(words: Words) -> list[Device]:
    """The devices whose model words are those given, and whose memory does not contradict them."""
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
    """Those whose memory is nearest to the size given."""
    distance = min((abs(device.memory_mib - memory_mib) for device in devices), default=0)
    return [device for device in devices if abs(device.memory_mib - memory_mib) == distance]


def _is_size(device: Device, marketed_mib: int) -> bool:
    """Whether the card is sold with that much memory: nvidia-smi shows up to 7 % less (ECC)."""
    return 0.93 * marketed_mib <= device.memory_mib <= 1.05 * marketed_mib


def _one_form(name: str, fitting: Sequence[Device]) -> Device:
    """The first of versions that differ in their socket alone, or the usual one, with a note that says so."""
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
    """Up to three devices that share most words with a name that fits none, else the closest in spelling."""
    model -= _OPTIONAL
    shared = {device.name: (len(model & must), -len(model ^ must)) for device, must, _ in _model_words()}
    best = max(shared.values())
    if best[0] > 0:
        return [device for device in all_devices() if shared[device.name] == best][:3]
    spelt = {" ".join(sorted(must)): device for device, must, _ in _model_words()}
    close = nearest(" ".join(sorted(model)), list(spelt))
    return [spelt[close]] if close else []
