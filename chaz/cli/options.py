"""What the commands share: their settings, and the helpers to add them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pydantic import ValidationError

from chaz.entries import Budget
from chaz.producer import Chaz
from chaz.settings import Settings

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]

Run = Callable[[argparse.Namespace], int]


def settings_of(options: argparse.Namespace) -> Settings:
    """The environment's settings, and the command line's over them."""
    return Settings.from_env(
        database_url=options.database,
        broker_url=getattr(options, "broker", None),
        agents=getattr(options, "agents", None),
    )


def producer_of(options: argparse.Namespace) -> Chaz:
    """A producer of these settings, to be used as a context manager."""
    return Chaz(settings=settings_of(options))


def add_command(
    commands: Commands, common: argparse.ArgumentParser, name: str, run: Run, help: str
) -> argparse.ArgumentParser:
    """Add a command with the common options."""
    command = commands.add_parser(name, parents=[common], help=help, description=help)
    command.set_defaults(run=run)
    return command


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def budget(text: str) -> Budget:
    """What a tree of runs may use, as ``steps=5,tokens=50000,cost=0.5`` or some of it, for argparse."""
    pairs = [(kind, number) for kind, _, number in (part.strip().partition("=") for part in text.split(","))]
    try:
        if len(dict(pairs)) < len(pairs):
            raise argparse.ArgumentTypeError(f"{text!r} names a kind twice")
        return Budget.model_validate(dict(pairs))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise argparse.ArgumentTypeError(
            f"{text!r} is no budget ({where}: {first['msg']}); write it as steps=5,tokens=50000,cost=0.5, or some of it"
        ) from None


_SPAN = re.compile(r"(\d+)([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def span(text: str) -> timedelta:
    """A span of time such as ``90s``, ``30m``, ``24h``, ``7d`` or ``2w``, for argparse."""
    found = _SPAN.fullmatch(text)
    try:
        if found is not None:
            return timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no span of time; write it as in 90s, 30m, 24h, 7d or 2w")


def since(text: str) -> datetime:
    """When a span began that ends now, or a date or time as ISO 8601 has it (here, if without a zone), for argparse."""
    if _SPAN.fullmatch(text):
        return datetime.now(UTC) - span(text)
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; write a span, as in 7d, or a date, as in 2026-03-01"
        ) from None


def print_json(value: Any) -> None:
    """One JSON document on one line."""

    def plain(item: Any) -> Any:
        return item.isoformat() if isinstance(item, date) else str(item)

    print(json.dumps(value, default=plain, ensure_ascii=False), flush=True)


def on_terminal() -> bool:
    """Whether a person reads the output."""
    return sys.stdout.isatty()


def session_target(text: str) -> tuple[str | None, UUID | None]:
    """A session as given on the command line: a name, or an id."""
    try:
        return None, UUID(text)
    except ValueError:
        return text, None
