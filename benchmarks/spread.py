"""Residuals of the published rows by kind of program: what the shares in oomph/predict/spread.py rest on.

    .venv/bin/python benchmarks/spread.py

For each kind (described or traced, eager or compiled): how many rows of the same program, the median and the largest
residual as a share of what was predicted, and the largest as a share of the gap between allocated and reserved memory,
of the rows that speak of reserved memory. Then how many rows the 95 % interval covers, and its median width.
"""

from __future__ import annotations

import argparse
from statistics import median

from accuracy import MEMORY, Outcome, outcomes, plan_of, rows_of

RESERVED = ("nvidia_smi_mib", "reserved_mib")


def kind_of(outcome: Outcome) -> str:
    return f"{outcome.source.partition(',')[0]}, {'compiled' if outcome.compiled else 'eager'}"


def of_the_gap(outcome: Outcome) -> float:
    """The residual as a share of the gap between allocated and reserved memory."""
    memory = plan_of(outcome.row).memory
    return abs(outcome.measured - outcome.predicted) / max(1.0, memory.reserved_mib - memory.allocated_mib)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = [each for each in outcomes(rows_of(*MEMORY)) if each.counts]
    kinds = sorted({(kind_of(each), each.row["measure"] in RESERVED) for each in found})
    for kind, reserved in kinds:
        own = [each for each in found if kind_of(each) == kind and (each.row["measure"] in RESERVED) == reserved]
        shares = [abs(each.error) for each in own]
        gap = f"; of the gap at most {max(map(of_the_gap, own)):.2f}" if reserved else ""
        what = "reserved" if reserved else "allocated"
        print(f"{kind}, {what}: {len(own)} rows, median {median(shares):.2%}, largest {max(shares):.2%}{gap}")
    covered = sum(each.inside for each in found)
    width = median((each.high - each.low) / each.predicted for each in found)
    print(f"inside the interval: {covered} of {len(found)}; median width {width:.1%} of the prediction")


if __name__ == "__main__":
    main()
