"""What `import chaz` gives, what it does not load, and that the two ways of calling it stay the same."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest

import chaz
from chaz import AgentResult, AsyncAgentResult, AsyncChaz, AsyncSession, Chaz, Session
from chaz.owning import AsyncSchedules, Schedules


def test_all_is_what_is_exported() -> None:
    exported = {
        name for name, value in vars(chaz).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert exported == set(chaz.__all__)
    assert len(chaz.__all__) == len(set(chaz.__all__))


@pytest.mark.parametrize("name", chaz.__all__)
def test_what_is_exported_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(chaz, name))


def loaded(code: str, *packages: str) -> set[str]:
    """Which of these packages a fresh Python has loaded after ``code``."""
    code += f"\nimport sys\nprint(*{set(packages)!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_a_producer_loads_no_broker_no_sdk_and_no_migrations() -> None:
    # An agent's definition names its model, and does not load it.
    code = 'import chaz; chaz.Agent("a", instructions="", model="openai:gpt-5-mini", tools=["spawn_agent"])'
    assert loaded(code, "celery", "kombu", "amqp", "redis", "openai", "alembic", "psycopg") == {"psycopg"}


def test_a_listener_loads_no_celery_and_no_model() -> None:
    found = loaded("import chaz.listener", "celery", "openai", "alembic", "chaz.worker", "chaz.tasks", "kombu")
    assert found == {"kombu"}


def test_a_worker_loads_no_sdk_that_no_agent_names() -> None:
    assert loaded("import chaz.tasks", "celery", "openai", "alembic") == {"celery"}


FACADES = [
    (AsyncChaz, Chaz),
    (AsyncSession, Session),
    (AsyncAgentResult, AgentResult),
    (AsyncSchedules, Schedules),
]

# What one side has for itself: the machinery of the facade, and of the source.
OWN = {"database", "future", "inner", "loop", "sibling", "status"}


def signatures(of: type) -> dict[str, str]:
    """The public methods and properties, with their parameters and without what is async about them."""
    found: dict[str, str] = {}
    for name, member in inspect.getmembers_static(of):
        if name in OWN or (name.startswith("_") and name not in {"__init__", "__await__"}):
            continue
        function: object = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not inspect.isfunction(function):
            continue
        text = str(inspect.signature(function))
        found[name] = re.sub(r"\bAsync(?=[A-Z])", "", text).replace("Generator[Entry]", "Iterator[Entry]")
        found[name] = found[name].replace("Awaitable[UUID | None]", "UUID | None")
    return found


@pytest.mark.parametrize(("source", "facade"), FACADES, ids=lambda of: of.__name__)
def test_the_sync_facade_offers_what_the_async_source_does(source: type, facade: type) -> None:
    expected, found = signatures(source), signatures(facade)
    if source in {AsyncAgentResult, AsyncSchedules}:
        # Made by the producer, never by hand.
        del expected["__init__"], found["__init__"]
    assert found == expected
    assert len(found) > 3


@pytest.mark.parametrize(("source", "facade"), FACADES, ids=lambda of: of.__name__)
def test_nothing_of_the_facade_is_async(source: type, facade: type) -> None:
    for name, member in inspect.getmembers_static(facade):
        assert not inspect.iscoroutinefunction(member), name
        assert not inspect.isasyncgenfunction(member), name
    assert any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers_static(source))


def test_sending_takes_the_same_options_everywhere() -> None:
    for method in ("send", "say", "direct"):
        options = [
            inspect.signature(getattr(of, method)).parameters["options"].annotation for of in (AsyncSession, Session)
        ]
        assert options == ["Unpack[SendOptions]"] * 2
