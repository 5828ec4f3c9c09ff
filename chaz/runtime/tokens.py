"""How many tokens a text is, to the model that is shown it."""

from __future__ import annotations

import json
from collections.abc import Callable

from chaz.runtime.models import AssistantMessage, ChatModel, CountsTokens, HistoryMessage, ToolSchema, UserMessage

Count = Callable[[str], int]
"""The tokens of a text."""
BYTES_OF_A_TOKEN = 4
"""Read of a conversation for each token that there is room for; what does not fit after all is left out then."""
MESSAGE = 8
"""Tokens that a message is thought to take besides its text: its role, its frame, a call's id."""


def estimate(text: str) -> int:
    """About how many tokens a text is, rather too many than too few: a token for 3 bytes of ASCII, for 2 of the rest.

    English is some 4 characters a token; code, numbers and ids are 2 to 3. Chinese and Japanese (3 bytes a character)
    are 1 token a character or less, Cyrillic and Greek (2 bytes) a half, emoji (4 bytes) up to 3.
    """
    ascii = len(text.encode("ascii", "ignore"))
    rest = len(text.encode("utf-8", "surrogatepass")) - ascii
    return (2 * ascii + 3 * rest + 5) // 6


def counter(model: ChatModel) -> Count:
    """How this model's tokens are counted: by itself if it can, else by estimate."""
    return model.count if isinstance(model, CountsTokens) else estimate


def schema_tokens(schemas: list[ToolSchema], count: Count) -> int:
    """The tokens of tools as they are shown."""
    return sum(MESSAGE + count(schema.model_dump_json()) for schema in schemas)


def frame_tokens(message: HistoryMessage, count: Count) -> int:
    """The tokens of a message without the text that may be cut: of the model's own turn all, as it is sent back."""
    if isinstance(message, UserMessage):
        return MESSAGE
    if not isinstance(message, AssistantMessage):
        return MESSAGE + count(message.tool)
    turn = message.turn
    if turn.native is not None:
        return MESSAGE + count(json.dumps(turn.native, ensure_ascii=False))
    return MESSAGE + count(turn.text) + sum(MESSAGE + count(call.tool) + count(call.arguments) for call in turn.calls)
