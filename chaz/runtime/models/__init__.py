"""The models' protocol: what the engine asks of a model, and how a model's name becomes one.

A model is named ``provider:model`` (``openai:gpt-5-mini``) or ``scripted``. To add one of your own, write a class
with :meth:`ChatModel.complete` and give it to :func:`register_provider`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from chaz.errors import ConfigurationError
from chaz.outcomes import Turn

__all__ = [
    "AssistantMessage",
    "ChatModel",
    "CountsTokens",
    "HistoryMessage",
    "ToolMessage",
    "ToolSchema",
    "UserMessage",
    "check_model_name",
    "register_provider",
    "resolve_model",
]


class UserMessage(BaseModel):
    """What somebody other than the running agent said."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["user"] = "user"
    text: str


class AssistantMessage(BaseModel):
    """What the running agent said, or asked its tools."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["assistant"] = "assistant"
    turn: Turn


class ToolMessage(BaseModel):
    """What a tool call of the assistant message before it came to."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["tool"] = "tool"
    call_id: str
    tool: str
    content: str
    is_error: bool = False


HistoryMessage = UserMessage | AssistantMessage | ToolMessage


class ToolSchema(BaseModel):
    """A tool as it is shown to a model; ``parameters`` is a JSON schema of an object."""

    model_config = ConfigDict(frozen=True)

    name: str
    description: str
    parameters: dict[str, Any]


class ChatModel(Protocol):
    """A model that answers one turn at a time and keeps nothing between them."""

    async def complete(
        self,
        system: str,
        history: Sequence[HistoryMessage],
        tools: Sequence[ToolSchema],
        *,
        timeout: float,
        on_delta: Callable[[str], None] | None = None,
    ) -> Turn:
        """Give the next turn of the assistant.

        ``timeout`` is in seconds, for the whole turn. ``on_delta`` gets pieces of text as they come.
        Raises :class:`~chaz.errors.ModelUnavailable` for what may pass (429, 5xx, time-out, network) and
        :class:`~chaz.errors.ModelError` for what will not; either with the usage of a turn that was given and is
        refused, since it is paid for. It does not retry: the engine does.
        """
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A model that can say how many tokens a text is to it. Of another it is estimated.

    ``count`` has to give the same on every machine and to be quick, without network: it runs on the loop of all runs.
    """

    def count(self, text: str) -> int:
        """The tokens of a text."""
        ...


ModelFactory = Callable[[str], ChatModel]

# provider -> factory, or the module that holds `def model(name) -> ChatModel`, imported when first used so that
# nobody loads an SDK that no agent names.
_providers: dict[str, ModelFactory | str] = {
    "scripted": "chaz.runtime.models.scripted",
    "openai": "chaz.runtime.models.openai",
}


def register_provider(provider: str, factory: ModelFactory) -> None:
    """Make ``provider:name`` a model's name: ``factory(name)`` is called once per process and name."""
    _providers[provider] = factory


def check_model_name(name: str) -> None:
    """Raise :class:`~chaz.errors.ConfigurationError` unless ``name`` is of a known provider and complete."""
    provider, _, model = name.partition(":")
    if provider not in _providers:
        known = ", ".join(sorted(_providers))
        raise ConfigurationError(
            f"model {name!r} has the unknown provider {provider!r}; known are {known} (as in 'openai:gpt-5-mini')"
        )
    if provider != "scripted" and not model:
        raise ConfigurationError(f"model {name!r} names no model; write it as '{provider}:MODEL'")


def resolve_model(name: str) -> ChatModel:
    """Make the model of this name. Raises ConfigurationError for an unknown provider or a missing extra."""
    check_model_name(name)
    provider, _, model = name.partition(":")
    factory = _providers[provider]
    if isinstance(factory, str):
        try:
            factory = importlib.import_module(factory).model
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"model {name!r} needs the package {error.name!r}; install it with: pip install 'chaz[{provider}]'"
            ) from error
    return factory(model)
