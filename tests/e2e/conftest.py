"""One server for all end-to-end tests that leave it as they found it."""

from collections.abc import Generator

import openai
import pytest

from tests.e2e.server import Server, serving, wait_for


@pytest.fixture(scope="session")
def shared() -> Generator[Server]:
    """Two replicas of the demo model."""
    with serving("--virtual-nodes", "2") as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Generator[Server]:
    """Lend the shared server, and see that it is idle again afterwards."""
    yield shared
    wait_for(shared.idle, what="every sequence freed")


@pytest.fixture
def client(server: Server) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
