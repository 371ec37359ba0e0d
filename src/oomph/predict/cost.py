"""Energy and money: watts times hours, and a price. Your own card costs electricity, a rented one a rate per hour."""

from __future__ import annotations

import msgspec

from oomph.devices import Device

# Share of the rated board power that GPT training draws: nvidia-smi during training shows 0.80 to 1.0 of it
# (RTX 4090 362 to 435 of 450 W, RTX 3060 155 of 170, A6000 295 of 300, T4 65 of 70, A4500 167 of 200).
POWER_SHARE = 0.90
PRICE_PER_KWH = 0.16  # US dollars, households, world average in 2025 (globalpetrolprices.com); 0.05 to 0.45 by country
PRICE_CURRENCY = "USD"
# Assumed, for a desktop computer: processor, memory, drives and fans while one process feeds the cards, and the
# efficiency of an 80 PLUS Gold power supply at half its load (87 to 92 %).
REST_WATTS = 90.0
SUPPLY_EFFICIENCY = 0.90


class Energy(msgspec.Struct, frozen=True):
    """What the run draws and costs. Rents are None if no hourly price is known."""

    watts: float  # the cards alone, all of them
    kwh: float
    cost: float  # electricity for the cards alone
    currency: str
    price_kwh: float
    measured: bool  # whether the watts were measured
    machine_watts: float  # at the wall: cards, the rest of the machine, the power supply's loss
    machine_kwh: float
    machine_cost: float
    price_hour: float | None = None  # of one rented card, if given
    rent: float | None = None  # all cards for the whole run, in `currency`
    rent_usd_low: float | None = None  # the same at the catalogue's lowest and highest on-demand prices
    rent_usd_high: float | None = None


def drawn_watts(device: Device) -> float | None:
    """Watts of one card in training: as measured, or else a share of its rated power; None if neither is known."""
    if device.drawn_watts is not None:
        return device.drawn_watts
    return None if device.watts is None else POWER_SHARE * device.watts


def energy(
    device: Device,
    hours: float | None,
    price_kwh: float = PRICE_PER_KWH,
    currency: str = PRICE_CURRENCY,
    cards: int = 1,
    watts: float | None = None,
    price_hour: float | None = None,
) -> Energy | None:
    """Energy and cost over all cards; `watts` is one card's measured draw. None if watts or hours are unknown."""
    each = watts if watts is not None else drawn_watts(device)
    if each is None or hours is None:
        return None
    cards_watts = each * cards
    machine_watts = (cards_watts + REST_WATTS) / SUPPLY_EFFICIENCY
    kwh, machine_kwh = (drawn * hours / 1000 for drawn in (cards_watts, machine_watts))
    low, high = device.usd_per_hour_low, device.usd_per_hour_high
    return Energy(
        watts=cards_watts,
        kwh=kwh,
        cost=kwh * price_kwh,
        currency=currency,
        price_kwh=price_kwh,
        measured=watts is not None or device.drawn_watts is not None,
        machine_watts=machine_watts,
        machine_kwh=machine_kwh,
        machine_cost=machine_kwh * price_kwh,
        price_hour=price_hour,
        rent=None if price_hour is None else price_hour * cards * hours,
        rent_usd_low=None if low is None else low * cards * hours,
        rent_usd_high=None if (high or low) is None else (high or low or 0.0) * cards * hours,
    )
