"""Energy and money: watts times hours, and a price."""

from __future__ import annotations

import msgspec

# Share of the rated board power that GPT training draws: nvidia-smi during training shows 0.80 to 1.0 of it
# (RTX 4090 362 to 435 of 450 W, RTX 3060 155 of 170, A6000 295 of 300, T4 65 of 70, A4500 167 of 200).
POWER_SHARE = 0.90
PRICE_PER_KWH = 0.16  # US dollars, households, world average in 2025 (globalpetrolprices.com); 0.05 to 0.45 by country


class Energy(msgspec.Struct, frozen=True):
    """What the card draws over the run, and what that costs."""

    watts: float  # the cards alone, all of them
    kwh: float
    cost: float
    currency: str
    price_kwh: float


def energy(
    board_watts: float | None,
    hours: float | None,
    price_kwh: float = PRICE_PER_KWH,
    currency: str = "USD",
    cards: int = 1,
) -> Energy | None:
    """kWh = watts × hours / 1000, over all cards. None where their power or the run's length is not known."""
    if board_watts is None or hours is None:
        return None
    watts = POWER_SHARE * board_watts * cards
    kwh = watts * hours / 1000
    return Energy(watts, kwh, kwh * price_kwh, currency, price_kwh)
