"""What models cost by a maintained list: the package ``genai-prices``, whose data is its own and needs no network."""

from __future__ import annotations

import os
from decimal import Decimal

from chaz.outcomes import Usage


def listed_cost(model: str, usage: Usage) -> Decimal | None:
    """What this usage of ``provider:model`` costs, in dollars; None where the list, if installed, does not know it.

    Behind ``OPENAI_BASE_URL`` it is that endpoint's price, since the same name may cost another sum there.
    """
    provider, _, name = model.partition(":")
    if provider == "scripted":
        return None
    try:
        # Not at the top: the list takes long to read, and who names his own prices does without.
        import genai_prices
    except ImportError:
        return None
    tokens = genai_prices.Usage(
        input_tokens=usage.prompt, cache_read_tokens=min(usage.cached, usage.prompt), output_tokens=usage.completion
    )
    endpoint = os.environ.get("OPENAI_BASE_URL") if provider == "openai" else None
    try:
        if endpoint:
            return genai_prices.calc_price(tokens, name, provider_api_url=endpoint).total_price
        return genai_prices.calc_price(tokens, name, provider_id=provider).total_price
    except (LookupError, ValueError):
        return None
