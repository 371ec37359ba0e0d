"""One plan question, two workers: each trainer's plan is made by one of them while both have nothing else to do."""

from __future__ import annotations

import asyncio

import msgspec

from oomph.report.summary import Summary, joined
from oomph.web.pool import Pool
from oomph.web.worker import HALVES, Answer, pack


class Half(msgspec.Struct, frozen=True):
    """What one worker makes: its plan and timeline are passed on unread."""

    plan: msgspec.Raw
    timeline: msgspec.Raw
    summary: Summary


async def ask_plan(pool: Pool, body: bytes, seconds: float) -> Answer:
    """The answer to a plan question, by one worker or by two: it is the same."""
    if not pool.is_free:
        return await pool.ask("plan", body, seconds, False)
    halves = [asyncio.create_task(pool.ask(verb, body, seconds, False)) for verb in HALVES]
    try:
        asked, other = await asyncio.gather(*halves)
    finally:
        for half in halves:
            half.cancel()
    return next((answer for answer in (asked, other) if answer.status != 200), None) or join(asked.body, other.body)


def join(asked: bytes, other: bytes) -> Answer:
    """Both halves as `answers.answer_plan` would have told them."""
    mine, its = (msgspec.json.decode(half, type=Half) for half in (asked, other))
    whole = {
        "plan": mine.plan,
        "other": its.plan,
        "timeline": mine.timeline,
        "other_timeline": its.timeline,
        "summary": joined(mine.summary, its.summary),
    }
    return pack(200, msgspec.json.encode(whole))
