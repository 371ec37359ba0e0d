"""The application: which address answers what. Computing is the workers' part; this one only passes on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from oomph.web import events
from oomph.web.folders import NoSuchRunError, RunsFolder
from oomph.web.guard import Guard, refuse
from oomph.web.halves import ask_plan
from oomph.web.measuring import Measuring
from oomph.web.openapi import document
from oomph.web.pool import Pool, TooBusyError, TooLongError
from oomph.web.replies import TooLargeError, TooSlowError, read_body, reply, takes_gzip
from oomph.web.static import INDEX, Static
from oomph.web.tables import gpus, keys, presets
from oomph.web.worker import Answer

QUESTION_BYTES = 2 * 2**20
LOG_BYTES = 8 * 2**20
KEPT_ANSWERS = 512
KEPT_BYTES = 64 * 2**20
KEPT_S = 60.0  # what is on the disk may change: data, a measured ratio


class Verb(msgspec.Struct, frozen=True):
    """How a question is handled."""

    seconds: float
    heavy: bool = False
    most_bytes: int = QUESTION_BYTES
    kept: bool = True  # whether the same question has the same answer for a while


POSTS = {
    "plan": Verb(20.0),
    "report": Verb(20.0),
    "config": Verb(20.0),
    "fit": Verb(120.0, heavy=True),
    "explain": Verb(120.0, heavy=True, most_bytes=LOG_BYTES),
    "compare": Verb(60.0, heavy=True, kept=False),
}
LOOK = Verb(30.0, kept=False)
Handler = Callable[[Request], Coroutine[Any, Any, Any]]


class Answers:
    """Answers kept for a while, so that a slider moved back is quick."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, bytes], tuple[float, Answer]] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[str, bytes]) -> Answer | None:
        found = self._kept.get(key)
        if found is None or time.monotonic() - found[0] > KEPT_S:
            return None
        self._kept.move_to_end(key)
        return found[1]

    def clear(self) -> None:
        """Forget them: what they rest on has changed."""
        self._kept.clear()
        self._bytes = 0

    def put(self, key: tuple[str, bytes], answer: Answer) -> None:
        self._drop(key)
        self._kept[key] = (time.monotonic(), answer)
        self._bytes += len(key[1]) + len(answer.body)
        while len(self._kept) > KEPT_ANSWERS or self._bytes > KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, bytes]) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._bytes -= len(key[1]) + len(found[1].body)


class GoneError(Exception):
    """Whoever asked has left while waiting."""


class Flight:
    """A question on its way, and everybody who waits for its answer. When all have left it is called back."""

    def __init__(self, answer: Coroutine[Any, Any, Answer], ended: Callable[[], object]) -> None:
        self._task = asyncio.create_task(answer)
        self._ended = ended
        self._passengers = 0
        self._over = False

    async def board(self, request: Request) -> Answer:
        """The answer. Raises `GoneError` where the asker left before it came."""
        leaving = asyncio.create_task(_left(request))
        self._passengers += 1
        try:
            await asyncio.wait({self._task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            self._passengers -= 1
            if not self._over and (self._task.done() or not self._passengers):
                self._over = True
                self._ended()
                self._task.cancel()
        if not self._task.done():
            raise GoneError
        return await self._task


async def _left(request: Request) -> None:
    """Wait until the asker closes the connection. The body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


class Web:
    """The page's server: its pool, its kept answers, its streams."""

    def __init__(self, runs_folder: Path, workers: int = 2) -> None:
        self.runs = RunsFolder(runs_folder)
        self.pool = Pool(workers, str(runs_folder))
        self.answers = Answers()
        self.static = Static()
        self.measuring = Measuring(self.answers.clear)
        self.closing = asyncio.Event()
        self._streams = 0
        self._flying: dict[tuple[str, bytes], Flight] = {}

    def application(self, hosts: frozenset[str] | None, token: str | None) -> Starlette:
        """The ASGI application, guarded."""
        routes = [
            Route("/", self.page),
            Route("/static/{name:path}", self.file),
            Route("/openapi.json", _ready(msgspec.json.encode(document()))),
            Route("/api/presets", _ready(msgspec.json.encode(presets()))),
            Route("/api/gpus", _ready(msgspec.json.encode(gpus()))),
            Route("/api/keys", _ready(msgspec.json.encode(keys()))),
            Route("/api/machine", self.machine),
            Route("/api/runs", self._looker("runs")),
            Route("/api/runs/{name}", self._looker("run")),
            Route("/api/runs/{name}/events", self.events),
            *(Route(f"/api/{name}", self._poster(name, verb), methods=["POST"]) for name, verb in POSTS.items()),
        ]
        return Starlette(
            routes=routes,
            lifespan=self._life,
            middleware=[Middleware(Guard, hosts=hosts, token=token)],
            exception_handlers={HTTPException: _problem, Exception: _fault},
        )

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        await self.pool.start()
        try:
            yield
        finally:
            await self.measuring.close()
            await self.pool.close()

    async def page(self, request: Request) -> Response:
        return self.static.serve(INDEX, request.headers)

    async def file(self, request: Request) -> Response:
        return self.static.serve(request.path_params["name"], request.headers)

    def _poster(self, name: str, verb: Verb) -> Handler:
        async def post(request: Request) -> Response:
            media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json":
                return refuse(415, "Content-Type", "not JSON", media, "application/json")
            try:
                body = await read_body(request, verb.most_bytes)
            except TooLargeError:
                return refuse(413, "body", "too large", allowed=f"at most {verb.most_bytes // 2**20} MiB")
            except TooSlowError:
                return refuse(408, "body", "it did not arrive in time")
            return await self._answer(name, verb, body, request)

        return post

    def _looker(self, name: str) -> Handler:
        async def look(request: Request) -> Response:
            return await self._answer(name, LOOK, request.path_params.get("name", "").encode(), request)

        return look

    async def machine(self, request: Request) -> Response:
        """This machine as far as it is known. A CPU that was never measured is measured now; nobody waits for it."""

        def with_standing(answer: Answer) -> Answer:
            told = msgspec.json.decode(answer.plain())
            if told.get("measuring"):
                self.measuring.begin()
                told["measuring"] = self.measuring.is_under_way
            return Answer(answer.status, msgspec.json.encode(told))

        return await self._answer("machine", LOOK, b"", request, with_standing)

    async def _answer(
        self, name: str, verb: Verb, body: bytes, request: Request, amend: Callable[[Answer], Answer] | None = None
    ) -> Response:
        key = (name, body)
        kept = self.answers.get(key) if verb.kept else None
        if kept is not None:
            return _told(kept, request)
        try:
            answer = await self._ask(key, verb, request)
        except TooBusyError:
            refusal = refuse(503, "server", "too many questions at once")
            refusal.headers["retry-after"] = "1"
            return refusal
        except TooLongError:
            return refuse(
                400, "body", f"this takes longer than {verb.seconds:.0f} s to answer", allowed="a smaller run"
            )
        except GoneError:
            return refuse(400, "request", "whoever asked has left")
        except EOFError:
            return refuse(500, "oomph", "the process that worked on this ended, perhaps for want of memory")
        if answer.status == 200 and verb.kept:
            self.answers.put(key, answer)
        return _told(amend(answer) if amend else answer, request)

    async def _ask(self, key: tuple[str, bytes], verb: Verb, request: Request) -> Answer:
        """Ask a worker; who asks what somebody is waiting for already waits with them."""
        if not verb.kept:
            return await Flight(self._work(key, verb), lambda: None).board(request)
        if key not in self._flying:
            ended = functools.partial(self._flying.pop, key, None)
            self._flying[key] = Flight(self._work(key, verb), ended)
        return await self._flying[key].board(request)

    def _work(self, key: tuple[str, bytes], verb: Verb) -> Coroutine[Any, Any, Answer]:
        if key[0] == "plan":
            return ask_plan(self.pool, key[1], verb.seconds)
        return self.pool.ask(*key, verb.seconds, verb.heavy)

    async def events(self, request: Request) -> Any:
        """A run's figures as they come."""
        try:
            path = await asyncio.to_thread(self.runs.path_of, request.path_params["name"])
        except NoSuchRunError as error:
            return refuse(404, "run", "no such run", error.problems[0].found)
        if self._streams >= events.MAX_STREAMS:
            return refuse(429, "server", "too many streams are open", allowed=f"{events.MAX_STREAMS} at once")
        start = request.headers.get("last-event-id") or request.query_params.get("from", "0")
        if not (start.isascii() and start.isdigit() and len(start) <= 15):
            return refuse(400, "from", "not a number of bytes", start)
        if request.method == "HEAD":
            return reply(b"", media="text/event-stream")
        return StreamingResponse(
            self._counted(events.stream(path, int(start), self.closing)), media_type="text/event-stream"
        )

    async def _counted(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            async for event in stream:
                yield event
        finally:
            self._streams -= 1


def _told(answer: Answer, request: Request) -> Response:
    """An answer as its asker can read it."""
    if not answer.packed:
        return reply(answer.body, answer.status)
    if takes_gzip(request.headers.get("accept-encoding", "")):
        return reply(answer.body, answer.status, {"content-encoding": "gzip", "vary": "accept-encoding"})
    return reply(answer.plain(), answer.status, {"vary": "accept-encoding"})


def _ready(body: bytes) -> Handler:
    """A reply that never changes."""

    async def tell(_: Request) -> Response:
        return reply(body)

    return tell


async def _fault(_: Request, error: Exception) -> Response:
    """A fault of ours, in the form of every other error; uvicorn prints its traceback."""
    return refuse(500, "oomph", f"oomph failed: {type(error).__name__}: {error}"[:500])


async def _problem(request: Request, error: Exception) -> Response:
    """What Starlette refuses by itself: an address that is none, a method that does not go with it."""
    assert isinstance(error, HTTPException)
    found = f"{request.method} {request.url.path}"
    refusal = refuse(error.status_code, "address", error.detail.lower(), found, "what /openapi.json lists")
    refusal.headers.update(error.headers or {})
    return refusal
