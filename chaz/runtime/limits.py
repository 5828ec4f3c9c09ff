"""How many tokens a model's window holds, where its agent does not say."""

from __future__ import annotations

from functools import cache

DEFAULT_WINDOW = 128_000
"""Tokens that a model is thought to hold of which nothing is known."""
RESERVED_OUTPUT = 8_192
"""Tokens of a window that are kept free for the answer, but no more than a quarter of it."""


@cache
def known_window(model: str) -> int:
    """The window of ``provider:model``, if the package ``genai-prices`` is installed and knows it, else the default."""
    provider, _, name = model.partition(":")
    if not name or provider == "scripted":
        return DEFAULT_WINDOW
    try:
        # Its table takes 30 MB, and most agents say themselves how much their model holds, or have room enough.
        from genai_prices.data_snapshot import get_snapshot
    except ModuleNotFoundError:
        return DEFAULT_WINDOW
    try:
        _, found = get_snapshot().find_provider_model(name, None, provider, None)
    except LookupError:
        return DEFAULT_WINDOW
    return found.context_window or DEFAULT_WINDOW
