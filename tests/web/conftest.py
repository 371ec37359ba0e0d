"""One server for all tests that only ask it something."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from web_helpers import Running, running, write_run


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two runs: "a", finished, and "b", going on."""
    runs: Path = tmp_path_factory.mktemp("served") / "out"
    write_run(runs, 30, name="a", finished=True)
    write_run(runs, 20, name="b", loss=12.0)
    with running(runs) as found:
        yield found


@pytest.fixture
def client(server: Running) -> httpx.Client:
    """Asks that server."""
    return server.client
