"""Errors: every one pickles, is in the drawn tree, and has an exit code that was meant."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import pytest

from chaz import errors
from chaz.errors import (
    AgentsError,
    AlreadyRequeued,
    BrokerUnavailable,
    ChazError,
    ConfigurationError,
    Conflict,
    DatabaseTooOld,
    DatabaseUnavailable,
    EmbeddedError,
    InvalidEntry,
    InvalidLimit,
    InvalidQuery,
    InvalidSchedule,
    InvalidSubject,
    LimitReached,
    ModelError,
    ModelUnavailable,
    NotPermitted,
    NotRequeueable,
    RequeueRefused,
    RunCancelled,
    RunError,
    RunFailed,
    SchemaError,
    StaleAttempt,
    UnknownAgent,
    UnknownPrice,
    UnknownRequest,
    UnknownRun,
    UnknownSchedule,
    UnknownSession,
    WaitInsideRun,
    WaitTimeout,
)

# Of each: the values it is raised with, what it then says, and the exit code of the command line.
SAMPLES: dict[type[ChazError], tuple[tuple[object, ...], str, int]] = {
    ChazError: (("something {odd}",), "something {odd}", 1),
    ConfigurationError: (("CHAZ_BEAT: no",), "CHAZ_BEAT: no", 78),
    AgentsError: (("agents.py:3", "no docstring"), "agents.py:3: no docstring", 78),
    DatabaseUnavailable: (("db/app", "refused"), "PostgreSQL at db/app is not available: refused", 69),
    DatabaseTooOld: (("db/app", "13.4", "14"), "PostgreSQL at db/app is version 13.4; chaz needs 14 or later", 69),
    SchemaError: (("there is none",), "there is none; run `chaz schema upgrade`", 78),
    BrokerUnavailable: (("mq", "refused"), "the broker at mq is not available: refused", 69),
    EmbeddedError: (("no wheel",), "no wheel", 69),
    InvalidSchedule: (("cron", "it is wrong"), "cron: it is wrong", 65),
    UnknownSchedule: (
        ("solo", "daily"),
        "agent 'solo' has no schedule 'daily'; `chaz schedules list` shows those that there are",
        66,
    ),
    InvalidEntry: (("empty",), "empty", 65),
    Conflict: (
        ("1f", "content"),
        "entry 1f exists with another content; use a new id or idempotency key for a new entry",
        65,
    ),
    UnknownSession: (
        ("weekly",),
        "no session 'weekly'; sending to a name creates it, an id must exist",
        66,
    ),
    InvalidSubject: (
        ("agents",),
        "there is nothing like 'agents' to pause, resume or limit; write agent:NAME, session:NAME (or its id), or all",
        65,
    ),
    InvalidLimit: (("its tokens are 0; use 1 or more",), "its tokens are 0; use 1 or more", 65),
    InvalidQuery: (("there is no usage by 'colour'",), "there is no usage by 'colour'", 65),
    LimitReached: (
        ("agent:reader", "9 of 9 tokens used", "2030-01-02"),
        "the limit of agent:reader is reached: 9 of 9 tokens used; the period ends at 2030-01-02",
        1,
    ),
    UnknownPrice: (
        ("openai:x", "agent:reader"),
        "the cost of agent:reader is limited, and the price of model openai:x is not known; give its agent prices=…",
        1,
    ),
    AlreadyRequeued: (
        ("1f", "2e", "running"),
        "run 1f was requeued as 2e, which is running; requeue that one, should it fail",
        65,
    ),
    NotRequeueable: (
        ("1f", "running"),
        "run 1f is running; only a run that failed or was cancelled can be requeued",
        65,
    ),
    RequeueRefused: (
        ("1f", "its time is over"),
        "run 1f cannot be requeued: its time is over",
        65,
    ),
    UnknownAgent: (
        ("reader",),
        "no worker has registered an agent 'reader'; start one with CHAZ_AGENTS naming a module that has it",
        66,
    ),
    UnknownRequest: (("nope",), "no request nope; `chaz approvals` lists those that wait", 66),
    NotPermitted: (("the role 'eve' may not decide", "grant it"), "the role 'eve' may not decide; grant it", 77),
    UnknownRun: (
        ("1f",),
        "no run 1f; if its transaction is still open, wait on the handle that `send` returned",
        66,
    ),
    RunError: (("1f", "crashes", "gone"), "run 1f ended: crashes: gone", 1),
    RunFailed: (("1f", "crashes", "gone"), "run 1f failed (crashes): gone", 1),
    RunCancelled: (("1f", "by", "ada"), "run 1f was cancelled (by): ada", 3),
    WaitTimeout: (("1f", "parked", 2.50), "run 1f is parked after 2.5 s; it goes on, only the wait has ended", 75),
    WaitInsideRun: (
        ("get()",),
        "get() inside a run would hold its worker; let the model call spawn_agent, which parks the run",
        1,
    ),
    StaleAttempt: (("1f", 3), "attempt 3 of run 1f is over: another attempt or an end has replaced it", 1),
    ModelError: (("openai:x", "refused"), "model openai:x: refused", 1),
    ModelUnavailable: (("openai:x", "busy", 7.0, {"prompt": 3}), "model openai:x is not available: busy", 1),
}


def tree(error: type[ChazError]) -> Iterator[type[ChazError]]:
    yield error
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def test_every_error_has_a_sample_here_and_is_in_the_one_module() -> None:
    assert set(SAMPLES) == set(tree(ChazError))
    exceptions = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert exceptions == set(SAMPLES)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: error.__name__)
def test_it_says_what_it_was_given(error: type[ChazError]) -> None:
    args, text, exit_code = SAMPLES[error]
    assert (str(error(*args)), error(*args).args, error.exit_code) == (text, args, exit_code)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: error.__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_it_survives_pickling(error: type[ChazError], protocol: int) -> None:
    args, text, _ = SAMPLES[error]
    again = pickle.loads(pickle.dumps(error(*args), protocol))
    assert (type(again), again.args, str(again)) == (error, args, text)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: error.__name__)
def test_its_docstring_says_what_it_means_and_takes(error: type[ChazError]) -> None:
    doc = error.__doc__ or ""
    assert error is ChazError or "Args:" in doc


def test_a_wait_timeout_is_a_timeout_error_too() -> None:
    assert issubclass(WaitTimeout, TimeoutError)


def test_the_providers_wait_is_kept() -> None:
    assert ModelUnavailable("openai:x", "busy", 7.0).retry_after == 7.0
    assert ModelUnavailable("openai:x", "busy", None).retry_after is None


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: dict[str, str] = {}
    path = ["ChazError"]
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ([│ ]*)[├└]── ([A-Z]\w+(?:, [A-Z]\w+)*)", line):
            depth = len(found[1]) // 4 + 1
            names = found[2].split(", ")
            path[depth:] = [names[-1]]
            drawn |= dict.fromkeys(names, path[depth - 1])
    assert drawn == {error.__name__: error.__bases__[0].__name__ for error in tree(ChazError) if error is not ChazError}
