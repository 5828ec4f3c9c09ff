"""Settings: read from the environment, wrong ones named, secrets never shown."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from chaz.errors import ConfigurationError
from chaz.settings import Settings, without_secrets

URL = "postgresql://ada:hunter2@db.example:5433/app"


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("CHAZ_DATABASE_URL", URL, "database_url", URL),
        ("CHAZ_LISTEN_URL", URL, "listen_url", URL),
        ("CHAZ_BROKER_URL", "redis://:hunter2@cache", "broker_url", "redis://:hunter2@cache"),
        ("CHAZ_BROKER_PREFIX", "team-1.test_2", "broker_prefix", "team-1.test_2"),
        ("CHAZ_AGENTS", "shop.agents, shop.more", "agents", "shop.agents, shop.more"),
        ("CHAZ_DEFAULT_AGENT", "helper", "default_agent", "helper"),
        ("CHAZ_BURST", "0", "burst", 0),
        ("CHAZ_SECRETS", "block", "secrets", "block"),
        ("CHAZ_TENANT", "acme", "tenant", "acme"),
        ("CHAZ_TOOL_POLICIES", '{"a.*": {"retries": 1}}', "tool_policies", {"a.*": {"retries": 1}}),
        ("CHAZ_BEAT", "0.5", "beat", 0.5),
        ("CHAZ_LEASE", "60", "lease", 60.0),
        ("CHAZ_SWEEP", "7", "sweep", 7.0),
        ("CHAZ_SHORT_POLL", "0.01", "short_poll", 0.01),
        ("CHAZ_LONG_POLL", "2", "long_poll", 2.0),
        ("CHAZ_UNKNOWN_AGENT_GRACE", "0", "unknown_agent_grace", 0.0),
        ("CHAZ_SHUTDOWN_GRACE", "0", "shutdown_grace", 0.0),
        ("CHAZ_DATABASE_POOL", "3", "database_pool", 3),
        ("CHAZ_TOOL_THREADS", "5", "tool_threads", 5),
        ("CHAZ_DATABASE_SILENCE", "7.5", "database_silence", 7.5),
    ],
)
def test_each_variable_is_read(variable: str, value: str, field: str, expected: object) -> None:
    settings = Settings.from_env({variable: value, "CHAZ_UNHEARD_OF": "1", "BEAT": "9"})
    assert getattr(settings, field) == expected
    assert settings.model_dump(exclude={field}) == Settings().model_dump(exclude={field})


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAZ_TENANT", "acme")
    assert Settings.from_env().tenant == "acme"


def test_an_empty_variable_counts_as_unset() -> None:
    assert Settings.from_env({"CHAZ_BEAT": "", "CHAZ_BROKER_URL": ""}) == Settings()


def test_overrides_win_unless_they_are_none() -> None:
    environ = {"CHAZ_TENANT": "acme", "CHAZ_AGENTS": "shop.agents"}
    settings = Settings.from_env(environ, tenant="other", agents=None)
    assert (settings.tenant, settings.agents) == ("other", "shop.agents")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CHAZ_BEAT", "hunter2"),
        ("CHAZ_BEAT", "0"),
        ("CHAZ_LEASE", "-1"),
        ("CHAZ_SWEEP", "nan"),
        ("CHAZ_SHUTDOWN_GRACE", "-0.1"),
        ("CHAZ_DATABASE_POOL", "0"),
        ("CHAZ_DATABASE_POOL", "2.5"),
        ("CHAZ_TOOL_THREADS", "many"),
        ("CHAZ_TOOL_POLICIES", "{"),
        ("CHAZ_TOOL_POLICIES", "[]"),
        ("CHAZ_TOOL_POLICIES", '{"delete": "always"}'),
        ("CHAZ_DATABASE_SILENCE", "0.5"),
        ("CHAZ_BROKER_PREFIX", "two words"),
        ("CHAZ_BROKER_PREFIX", "x" * 61),
        ("CHAZ_BROKER_PREFIX", "line\n"),
    ],
)
def test_a_wrong_value_is_told_by_its_variable_and_not_repeated(variable: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{variable}: ") as error:
        Settings.from_env({variable: value})
    assert "hunter2" not in str(error.value)
    with pytest.raises(ConfigurationError, match=f"^{variable}: "):
        Settings.from_env({}, **{variable.removeprefix("CHAZ_").lower(): value})


def test_an_unknown_override_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="CHAZ_COLOUR"):
        Settings.from_env({}, colour="red")


def test_a_lease_outlasts_two_beats() -> None:
    assert Settings.from_env({"CHAZ_BEAT": "5", "CHAZ_LEASE": "10"}).lease == 10
    with pytest.raises(ConfigurationError, match=r"CHAZ_LEASE is 9\.9 s and CHAZ_BEAT 5 s"):
        Settings.from_env({"CHAZ_BEAT": "5", "CHAZ_LEASE": "9.9"})


@pytest.mark.parametrize("url", [URL, "postgres://db.example/app", "postgresql:///app?host=/run/postgresql"])
def test_the_databases_url_is_handed_out_as_it_is(url: str) -> None:
    assert Settings(database_url=url).require_database() == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("", "set CHAZ_DATABASE_URL to postgresql://"),
        ("mysql://ada:hunter2@db/app", "not 'mysql'"),
        ("postgresql+psycopg://ada:hunter2@db/app", r"not 'postgresql\+psycopg'"),
        ("ada:hunter2@db/app", "must start with postgresql://"),
        ("host=db password=hunter2", "must start with postgresql://"),
        ("hunter2", "must start with postgresql://"),
        ("postgresql://ada:hunter2/x@db/app", "CHAZ_DATABASE_URL is no URL"),
        ("postgresql://ada:hunter2#x@db/app", "CHAZ_DATABASE_URL is no URL"),
        ("postgresql://ada:hunter2@db:port/app", "CHAZ_DATABASE_URL is no URL"),
        ("postgresql://ada:hunter2@[db/app", "CHAZ_DATABASE_URL is no URL"),
    ],
)
def test_no_or_a_wrong_database_url_is_told_without_its_secret(url: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as error:
        Settings(database_url=url).require_database()
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "postgresql://ada@db.example:5433/app"),
        ("postgresql://ada:hunter2@@db/app", "postgresql://ada@db/app"),
        ("postgresql://ada:hunter2:@p@db/app", "postgresql://ada@db/app"),
        ("postgresql://ada:hunter2%2F%40%3A@db/app", "postgresql://ada@db/app"),
        ("postgresql://db/app?password=hunter2&sslmode=require", "postgresql://db/app"),
        ("postgresql:///app?host=/tmp&password=hunter2", "postgresql:///app"),
        ("postgresql://db/app#hunter2", "postgresql://db/app"),
        ("postgresql://a%40b:hunter2@db/app", "postgresql://a%40b@db/app"),
        ("postgresql://ada:hunter2@[::1]:5432/app", "postgresql://ada@[::1]:5432/app"),
        ("redis://:hunter2@cache:6379/0", "redis://cache:6379/0"),
        ("amqp://guest:hunter2@127.0.0.1:5672//", "amqp://guest@127.0.0.1:5672//"),
        ("postgresql://ada:hunter2/x@db/app", "(not a URL)"),
        ("postgresql://ada:hunter2@db:port/app", "(not a URL)"),
        ("postgresql://[ada:hunter2@db", "(not a URL)"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    "text", ["hunter2", "host=db password=hunter2", "ada:hunter2@db/app", "postgresql://ada:12345/hunter2@db/app"]
)
def test_what_is_no_url_shows_nothing(text: str) -> None:
    assert without_secrets(text) == "(not a URL)"


def test_settings_show_no_secret() -> None:
    settings = Settings(database_url=URL, listen_url=URL, broker_url="amqp://ada:hunter2@mq//")
    assert "hunter2" not in repr(settings) + str(settings)
    assert "beat=3.0" in repr(settings)


def test_a_validation_error_of_pydantic_shows_no_secret_either() -> None:
    wrong: dict[str, Any] = {"database_url": ["hunter2"], "broker_url": {"password": "hunter2"}}
    with pytest.raises(ValidationError) as error:
        Settings.model_validate(wrong)
    assert "hunter2" not in str(error.value)
