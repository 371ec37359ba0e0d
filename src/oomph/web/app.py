"""The ASGI application: routes and caching. Workers compute the answers."""

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
from starlette.responses import Response
from starlette.routing import Route

from oomph import devices
from oomph.web import events
from oomph.web.answers import Answer, keys, presets
from oomph.web.guard import Guard
from oomph.web.metrics import read_position
from oomph.web.openapi import document
from oomph.web.replies import TooLargeError, TooSlowError, read_body, refuse, reply, takes_gzip
from oomph.web.runs import NoSuchRunError, RunsFolder
from oomph.web.static import INDEX, Static
from oomph.web.workers import CpuMeasurement, Role, TooBusyError, TooLongError, WorkerDiedError, WorkerPool, ask_plan

QUESTION_BYTES = 2 * 2**20
LOG_BYTES = 8 * 2**20
KEPT_ANSWERS = 512
KEPT_BYTES = 64 * 2**20
KEPT_S = 60.0  # not longer: answers depend on files that may change, such as data and measured rates


class QuestionLimits(msgspec.Struct, frozen=True):
    """Limits on a question, the worker that answers it, and whether the answer is cached."""

    seconds: float
    role: Role = "planner"  # the kind of worker that answers
    max_bytes: int = QUESTION_BYTES
    cached: bool = True


POSTS = {
    "plan": QuestionLimits(20.0),
    "report": QuestionLimits(20.0),
    "config": QuestionLimits(20.0),
    "picture": QuestionLimits(20.0),
    "moment": QuestionLimits(20.0),
    "snapshot": QuestionLimits(60.0, role="searcher", cached=False),
    "fit": QuestionLimits(120.0, role="searcher"),
    "explain": QuestionLimits(120.0, role="searcher", max_bytes=LOG_BYTES),
    "compare": QuestionLimits(60.0, role="reader", cached=False),
}
MACHINE = QuestionLimits(30.0, cached=False)
RUNS = QuestionLimits(120.0, role="reader", cached=False)
Handler = Callable[[Request], Coroutine[Any, Any, Any]]


class AnswerCache:
    """Answers of the last minute, so that moving a slider back is quick."""

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
        """Drop all answers, when the files they depend on have changed."""
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


class ClientGoneError(Exception):
    """The client closed the connection while waiting."""


class SharedAnswer:
    """An answer in progress and how many requests wait for it. Cancelled once all of them have disconnected."""

    def __init__(self, answer: Coroutine[Any, Any, Answer], on_end: Callable[[], object]) -> None:
        self._task = asyncio.create_task(answer)
        self._on_end = on_end
        self._waiting = 0
        self._ended = False

    async def wait(self, request: Request) -> Answer:
        """The answer. Raises `ClientGoneError` if the client disconnects first."""
        leaving = asyncio.create_task(_disconnected(request))
        self._waiting += 1
        try:
            await asyncio.wait({self._task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            self._waiting -= 1
            if not self._ended and (self._task.done() or not self._waiting):
                self._ended = True
                self._on_end()
                self._task.cancel()
        if not self._task.done():
            raise ClientGoneError
        return await self._task


async def _disconnected(request: Request) -> None:
    """Return when the client disconnects. Its body has been read, so no other message can come."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


class Web:
    """The server's state: workers, cached answers, event streams."""

    def __init__(self, runs_folder: Path, workers: int = 2) -> None:
        self.runs = RunsFolder(runs_folder)
        sizes: dict[Role, int] = {"planner": workers, "searcher": max(1, workers - 1), "reader": 1}
        self.pools = {role: WorkerPool(size, str(runs_folder), role) for role, size in sizes.items()}
        self.cache = AnswerCache()
        self.static = Static()
        self.measurement = CpuMeasurement(self.cache.clear)
        self.closing = asyncio.Event()
        self.streams = events.Streams()
        self._pending: dict[tuple[str, bytes], SharedAnswer] = {}

    def application(self, hosts: frozenset[str] | None, token: str | None) -> Starlette:
        """The ASGI application, behind its `Guard`."""
        routes = [
            Route("/", self.page),
            Route("/static/{name:path}", self.file),
            Route("/openapi.json", _constant(document())),
            Route("/api/presets", _constant(presets())),
            Route("/api/gpus", _constant(devices.all_devices())),
            Route("/api/keys", _constant(keys())),
            Route("/api/machine", self.machine),
            Route("/api/runs", self._looker("runs")),
            Route("/api/runs/{name}", self._looker("run")),
            Route("/api/events", self.events),
            *(Route(f"/api/{name}", self._poster(name, limits), methods=["POST"]) for name, limits in POSTS.items()),
        ]
        return Starlette(
            routes=routes,
            lifespan=self._life,
            middleware=[Middleware(Guard, hosts=hosts, token=token)],
            exception_handlers={HTTPException: _problem, Exception: _fault},
        )

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        await self.pools["planner"].start()
        try:
            yield
        finally:
            await self.measurement.close()
            await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    async def page(self, request: Request) -> Response:
        return self.static.serve(INDEX, request.headers)

    async def file(self, request: Request) -> Response:
        return self.static.serve(request.path_params["name"], request.headers)

    def _poster(self, name: str, limits: QuestionLimits) -> Handler:
        async def post(request: Request) -> Response:
            media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json":
                return refuse(415, "Content-Type", "not JSON", media, "application/json")
            try:
                body = await read_body(request, limits.max_bytes)
            except TooLargeError:
                return refuse(413, "body", "too large", allowed=f"at most {limits.max_bytes // 2**20} MiB")
            except TooSlowError:
                return refuse(408, "body", "it did not arrive in time")
            return await self._answer(name, limits, body, request)

        return post

    def _looker(self, name: str) -> Handler:
        async def look(request: Request) -> Response:
            return await self._answer(name, RUNS, request.path_params.get("name", "").encode(), request)

        return look

    async def machine(self, request: Request) -> Response:
        """This machine. Starts measuring its CPU in the background if there are no rates yet."""

        def with_state(answer: Answer) -> Answer:
            told = msgspec.json.decode(answer.plain())
            if told.get("measuring"):
                self.measurement.start()
                told["measuring"] = self.measurement.is_running
            return Answer(answer.status, msgspec.json.encode(told))

        return await self._answer("machine", MACHINE, b"", request, with_state)

    async def _answer(
        self,
        name: str,
        limits: QuestionLimits,
        body: bytes,
        request: Request,
        amend: Callable[[Answer], Answer] | None = None,
    ) -> Response:
        key = (name, body)
        kept = self.cache.get(key) if limits.cached else None
        if kept is not None:
            return _reply_with(kept, request)
        try:
            answer = await self._ask(key, limits, request)
        except TooBusyError:
            refusal = refuse(503, "server", "too many questions at once")
            refusal.headers["retry-after"] = "1"
            return refusal
        except TooLongError:
            return refuse(
                400, "body", f"this takes longer than {limits.seconds:.0f} s to answer", allowed="a smaller run"
            )
        except ClientGoneError:
            return refuse(400, "request", "the client closed the connection")
        except WorkerDiedError:
            return refuse(500, "oomph", "the process that worked on this ended, perhaps for lack of memory")
        if answer.status == 200 and limits.cached:
            self.cache.put(key, answer)
        return _reply_with(amend(answer) if amend else answer, request)

    async def _ask(self, key: tuple[str, bytes], limits: QuestionLimits, request: Request) -> Answer:
        """The reply from a worker. Identical questions at the same time share one answer."""
        if not limits.cached:
            return await SharedAnswer(self._work(key, limits), lambda: None).wait(request)
        if key not in self._pending:
            on_end = functools.partial(self._pending.pop, key, None)
            self._pending[key] = SharedAnswer(self._work(key, limits), on_end)
        return await self._pending[key].wait(request)

    def _work(self, key: tuple[str, bytes], limits: QuestionLimits) -> Coroutine[Any, Any, Answer]:
        if key[0] == "plan":
            return ask_plan(self.pools["planner"], key[1], limits.seconds)
        return self.pools[limits.role].ask(*key, limits.seconds)

    async def events(self, request: Request) -> Response:
        """One event stream with the new figures of all requested runs."""
        names = request.query_params.getlist("run")
        starts = (request.headers.get("last-event-id") or ",".join(request.query_params.getlist("from"))).split(",")
        if not 1 <= len(names) <= events.MAX_RUNS:
            return refuse(400, "run", "not so many at once", str(len(names)), f"1 to {events.MAX_RUNS}")
        positions = [read_position(start or "0") for start in [*starts, *["0"] * (len(names) - len(starts))]]
        if None in positions or len(positions) > len(names):
            return refuse(400, "from", "not a position for each run", ",".join(starts), "the `position` of each run")
        if not self.streams.reserve():
            return refuse(429, "server", "too many streams are open", allowed=f"{events.MAX_STREAMS} at once")
        try:
            paths = await asyncio.to_thread(self.runs.paths_of, names)
            tails = [events.Tail(path, *start) for path, start in zip(paths, positions, strict=True) if start]
        except NoSuchRunError as error:
            self.streams.release()
            return refuse(404, "run", "no such run", error.problems[0].found)
        except BaseException:
            self.streams.release()
            raise
        if request.method == "HEAD":
            self.streams.release()
            return reply(b"", media="text/event-stream")
        return events.EventStream(tails, self.closing, self.streams)


def _reply_with(answer: Answer, request: Request) -> Response:
    """A reply with this answer, gzipped if the client accepts it."""
    if not answer.packed:
        return reply(answer.body, answer.status)
    if takes_gzip(request.headers.get("accept-encoding", "")):
        return reply(answer.body, answer.status, {"content-encoding": "gzip", "vary": "accept-encoding"})
    return reply(answer.plain(), answer.status, {"vary": "accept-encoding"})


def _constant(value: Any) -> Handler:
    """A reply that never changes."""
    body = msgspec.json.encode(value)

    async def get(_: Request) -> Response:
        return reply(body)

    return get


async def _fault(_: Request, error: Exception) -> Response:
    """An internal error, in the form of all errors; uvicorn prints its traceback."""
    return refuse(500, "oomph", f"oomph failed: {type(error).__name__}: {error}"[:500])


async def _problem(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown address, wrong method), in the form of all errors."""
    assert isinstance(error, HTTPException)
    found = f"{request.method} {request.url.path}"
    refusal = refuse(error.status_code, "address", error.detail.lower(), found, "what /openapi.json lists")
    refusal.headers.update(error.headers or {})
    return refusal
