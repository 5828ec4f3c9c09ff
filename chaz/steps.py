"""The Celery task ``chaz.step``: an agent's run as a step of a chain, which holds no worker. See ``agent_step``.

The step sends a directive under its own task id, with what follows it in the chain as ``on_complete``, and ends as a
task does that is replaced by another one: the run goes on under its id.
"""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from celery import Task, group
from celery.exceptions import Ignore

from chaz.backend import producer
from chaz.callbacks import TaskCallback
from chaz.celery import app
from chaz.channels import STEP
from chaz.errors import DatabaseUnavailable, InvalidEntry
from chaz.submitting import SendOptions


class Step(Task[Any, None]):
    """Acknowledged late and named by its own id: delivered twice, it sends one directive."""

    name = STEP
    ignore_result = True
    acks_late = True

    def run(
        self,
        *previous: Any,
        agent: str,
        instruction: str | None = None,
        session: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send the directive. Raises InvalidEntry; then the chain fails here, as with any task."""
        request: Any = self.request
        if request.chord:
            raise InvalidEntry(
                "an agent's step cannot be in a chord's header, which counts results; wait for the runs' handles"
            )
        options: SendOptions = {
            "id": UUID(request.id),
            "sender": "celery",
            "author": "program",
            "on_complete": TaskCallback(success=_what_follows(request), failure=tuple(_plain(request.errbacks or []))),
        }
        if timeout is not None:
            options["timeout"] = timeout
        text = "\n\n".join(filter(None, [instruction, *map(_as_text, previous)]))
        try:
            producer().session(session or f"celery {request.root_id or request.id}").direct(agent, text, **options)
        except DatabaseUnavailable as error:
            raise self.retry(exc=error, countdown=min(2**request.retries, 60), max_retries=None) from error
        # Its end is the run's. To return would tell Celery, and what follows, that there is a result.
        request.chain = request.callbacks = None
        raise Ignore(f"agent {agent} answers as run {request.id}")


def _what_follows(request: Any) -> dict[str, Any] | None:
    """The signature that goes on with the answer, as Celery itself does after a task: links, then the chain's rest."""
    lineage = {"parent_id": request.id, "root_id": request.root_id or request.id}
    links: list[Any] = request.callbacks or []
    following: list[Any] = [app.signature(link) for link in links]
    if request.chain:
        *rest, then = request.chain
        # In Celery's order: what comes first is last.
        following.append(app.signature(then))
        following[-1].set(chain=rest or None)
    following = [one.set(**lineage) for one in following]
    if not following:
        return None
    return _plain(following[0] if len(following) == 1 else group(following))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


app.register_task(Step())
