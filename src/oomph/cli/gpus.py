"""`oomph gpus [NAME]`: the catalogue, or one card with the source of its figures."""

from __future__ import annotations

from oomph import devices
from oomph.cli.arguments import VerbParser
from oomph.devices import Device


def run(argv: list[str]) -> int:
    """Print the table of cards, or one card."""
    parser = VerbParser("gpus", "The cards oomph knows, with what a process can use of each.")
    parser.add_argument("name", nargs="*", metavar="NAME", help="a card, as people or nvidia-smi write it")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    name = " ".join(options.name)
    chosen = [devices.find(name)] if name else list(devices.all_devices())
    if options.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(chosen[0] if name else chosen), indent=2).decode())
    elif name:
        _print_one(chosen[0])
    else:
        _print_table(chosen)
    return 0
