"""Help for testing agents: waiting without sleeps, and a model endpoint that plays scripts."""

from __future__ import annotations

from chaz.testing.eventually import eventually, eventually_async
from chaz.testing.stub import StubServer

__all__ = ["StubServer", "eventually", "eventually_async"]
