"""What leaves a worker, without the secrets in it: to the log, the audit queue and the models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from chaz.entries import SecretsPolicy, safe_text
from chaz.outcomes import MAX_RESULT, CallOutcome, ToolCall, typed_error
from chaz.runtime.scanner import Scanned, SecretScanner

AT_ONCE = 4096
"""The most characters that are scanned on the loop: a fraction of a millisecond. Longer texts go to a thread."""


class Egress:
    """The deployment's policy for secrets, and the scanner; ``own`` are secrets that the deployment knows itself."""

    def __init__(self, policy: SecretsPolicy, own: Mapping[str, str] | None = None) -> None:
        self.policy: SecretsPolicy = policy
        self._own = own or {}
        self._scanner = None if policy == "off" else SecretScanner(self._own)
        self._loaded = False

    def load(self) -> None:
        """Load the scanner now, so that the first text need not wait for it. Blocks for about a second."""
        if self._scanner is not None:
            self._scanner.load()
            self._loaded = True

    async def text(self, text: str) -> str:
        """A model's text, or an error's, as it may be written to the log; a secret in it is redacted at least."""
        return text if self.policy == "off" else (await self._scan(text)).text

    async def shown(self, call: ToolCall, masked: str, policy: SecretsPolicy) -> ToolCall:
        """The call, with its arguments as they may be shown: ``masked``, and without the secrets that are in them."""
        text, kinds = masked, ()
        if policy != "off":
            scanned = await self._scan(safe_text(masked, len(masked)), json=True)
            text, kinds = (scanned.text, scanned.kinds) if scanned.kinds else (masked, ())
        if text == call.arguments:
            return call
        return call.model_copy(update={"shown": text, "secrets": kinds})

    async def outcome(self, tool: str, outcome: CallOutcome, policy: SecretsPolicy) -> CallOutcome:
        """What the tool gave as it may be kept, shown to the model and audited: redacted or withheld, and cut."""
        # Cut last: what is left of a secret that was cut would not be known for one.
        text = safe_text(outcome.content, max(len(outcome.content), MAX_RESULT))
        if policy != "off":
            scanned = await self._scan(text)
            if scanned.kinds and policy == "block":
                what = ", ".join(scanned.kinds)
                return typed_error("withheld", f"the output of {tool} was withheld: it contains a secret ({what})")
            text = scanned.text
        return outcome.model_copy(update={"content": safe_text(text, MAX_RESULT)})

    async def _scan(self, text: str, *, json: bool = False) -> Scanned:
        if self._scanner is None:
            # The deployment scans nothing, but one of its tools is to be scanned.
            self._scanner = SecretScanner(self._own)
        scan = self._scanner.scan_json if json else self._scanner.scan
        if self._loaded and len(text) <= AT_ONCE:
            return scan(text)
        scanned = await asyncio.to_thread(scan, text)
        self._loaded = True
        return scanned
