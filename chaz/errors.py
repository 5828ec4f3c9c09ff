"""Every error that chaz raises, in one tree.

::

    ChazError
    ├── ConfigurationError          a setting, an agents module or a model name is wrong
    │   └── AgentsError             ... with the file and the line
    ├── DatabaseUnavailable         PostgreSQL does not answer, or refuses the login
    │   └── DatabaseTooOld
    ├── SchemaError                 the schema is missing, or not the one this version needs
    ├── BrokerUnavailable
    ├── EmbeddedError               an embedded service cannot be installed, started or kept
    ├── InvalidEntry                what a producer sent cannot be an entry
    ├── Conflict                    an id or idempotency key was used for another entry
    ├── UnknownSession, UnknownAgent, UnknownRun, UnknownRequest
    ├── NotPermitted                the database's role may not do this
    ├── InvalidSubject              what is to be paused, resumed or limited is named wrongly
    ├── InvalidLimit                a limit limits nothing, or is less than nothing
    ├── InvalidQuery                usage is asked for by what it is not kept by
    ├── InvalidSchedule             what is asked for is no schedule, or more than the deployment allows
    ├── UnknownSchedule
    ├── NotRequeueable              a run that is to be run anew has neither failed nor been cancelled
    │   ├── AlreadyRequeued         ... or has been, and goes on as another
    │   └── RequeueRefused          ... or could only fail again
    ├── RunError                    how a run ended, raised by a handle
    │   ├── RunFailed
    │   └── RunCancelled
    ├── WaitTimeout                 (also a TimeoutError) a wait ended before the run did
    ├── WaitInsideRun               a blocking wait in a tool
    ├── LimitReached                an agent, a session or the deployment has used what it may in a period
    ├── UnknownPrice                a cost is limited, and the model's price is not known
    ├── StaleAttempt                a worker writes for a run that it no longer owns
    └── ModelError                  a model gave no usable turn
        └── ModelUnavailable        ... but may if asked again

An error carries all of its values in ``args``, so that it survives pickling (Celery pickles the exceptions of a
pool's child; one whose ``args`` cannot rebuild it kills the worker, https://github.com/celery/celery/issues/6990).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class ChazError(Exception):
    """The base of every error of chaz. ``exit_code`` is what the command line ends with."""

    message: ClassVar[str] = "{0}"
    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        try:
            return self.message.format(*self.args)
        except IndexError:
            return " ".join((type(self).__name__, *map(str, self.args)))


class ConfigurationError(ChazError):
    """A setting, an agents module or a model's name is wrong. Args: what is wrong and what to do."""

    exit_code = 78  # EX_CONFIG of sysexits.h


class AgentsError(ConfigurationError):
    """An agents module is wrong. Args: place (``file:line``), what is wrong and what to do."""

    message = "{0}: {1}"


class DatabaseUnavailable(ChazError):
    """PostgreSQL does not answer or refuses the login. Args: the address without secrets, the reason."""

    message = "PostgreSQL at {0} is not available: {1}"
    exit_code = 69  # EX_UNAVAILABLE


class DatabaseTooOld(DatabaseUnavailable):
    """The server is older than chaz supports. Args: the address, its version, the version needed."""

    message = "PostgreSQL at {0} is version {1}; chaz needs {2} or later"


class SchemaError(ChazError):
    """The schema ``chaz`` is missing or not the one that this version needs. Args: what was found."""

    message = "{0}; run `chaz schema upgrade`"
    exit_code = 78


class BrokerUnavailable(ChazError):
    """The broker does not answer or refuses the login. Args: the address without secrets, the reason."""

    message = "the broker at {0} is not available: {1}"
    exit_code = 69


class EmbeddedError(ChazError):
    """An embedded service cannot be started or kept. Args: what is wrong and what to do."""

    exit_code = 69


class InvalidEntry(ChazError):
    """What was sent cannot be an entry. Args: what is wrong, with the value."""

    exit_code = 65  # EX_DATAERR


class Conflict(ChazError):
    """An id or idempotency key was already used for another entry. Args: the entry's id, what differs."""

    message = "entry {0} exists with another {1}; use a new id or idempotency key for a new entry"
    exit_code = 65


class UnknownSession(ChazError):
    """No session has this name or id. Args: the name or id."""

    message = "no session {0!r}; sending to a name creates it, an id must exist"
    exit_code = 66  # EX_NOINPUT


class UnknownAgent(ChazError):
    """No worker ever registered this agent. Args: the name."""

    message = "no worker has registered an agent {0!r}; start one with CHAZ_AGENTS naming a module that has it"
    exit_code = 66


class UnknownRun(ChazError):
    """No run or entry has this id. Args: the id."""

    message = "no run {0}; if its transaction is still open, wait on the handle that `send` returned"
    exit_code = 66


class UnknownRequest(ChazError):
    """No run has asked for an approval or an answer by this id. Args: the id."""

    message = "no request {0}; `chaz approvals` lists those that wait"
    exit_code = 66


class NotPermitted(ChazError):
    """PostgreSQL does not let this role do that. Args: its words, what to do."""

    message = "{0}; {1}"
    exit_code = 77  # EX_NOPERM


class InvalidSubject(ChazError):
    """What is to be paused, resumed or limited is no such thing. Args: what was given."""

    message = (
        "there is nothing like {0!r} to pause, resume or limit; write agent:NAME, session:NAME (or its id), or all"
    )
    exit_code = 65


class InvalidLimit(ChazError):
    """A limit cannot be. Args: what is wrong, with the value."""

    exit_code = 65


class InvalidQuery(ChazError):
    """Usage cannot be told so. Args: what is wrong, with the value."""

    exit_code = 65


class InvalidSchedule(ChazError):
    """What is asked for is no schedule, or more than is allowed. Args: the field, what is wrong and what to do."""

    message = "{0}: {1}"
    exit_code = 65


class UnknownSchedule(ChazError):
    """The agent has no schedule of this id. Args: the agent, the id."""

    message = "agent {0!r} has no schedule {1!r}; `chaz schedules list` shows those that there are"
    exit_code = 66


class NotRequeueable(ChazError):
    """Only a run that failed or was cancelled can be run anew. Args: the run's id, the state it is in."""

    message = "run {0} is {1}; only a run that failed or was cancelled can be requeued"
    exit_code = 65


class AlreadyRequeued(NotRequeueable):
    """The run was requeued before, and that run goes on or has succeeded. Args: both ids, and its state."""

    message = "run {0} was requeued as {1}, which is {2}; requeue that one, should it fail"


class RequeueRefused(NotRequeueable):
    """The run could only fail again. Args: its id, why."""

    message = "run {0} cannot be requeued: {1}"


class RunError(ChazError):
    """How a run ended when it did not succeed. Args: the run's id, the reason, the text."""

    message = "run {0} ended: {1}: {2}"


class RunFailed(RunError):
    """The run failed. Args: the run's id, the reason (one word), the text."""

    message = "run {0} failed ({1}): {2}"


class RunCancelled(RunError):
    """The run was cancelled. Args: the run's id, the reason (one word), the text."""

    message = "run {0} was cancelled ({1}): {2}"
    exit_code = 3


class WaitTimeout(ChazError, TimeoutError):
    """A wait ended before the run did; the run goes on. Args: the run's id, its state, the seconds waited."""

    message = "run {0} is {1} after {2:g} s; it goes on, only the wait has ended"
    exit_code = 75  # EX_TEMPFAIL

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # A TimeoutError is an OSError, which takes three arguments for errno, text and file name.
        self.args = args


class WaitInsideRun(ChazError):
    """A blocking wait in a tool, which would hold a worker's slot. Args: the method."""

    message = "{0} inside a run would hold its worker; let the model call spawn_agent, which parks the run"


class StaleAttempt(ChazError):
    """A write for a run that this process no longer owns; the log refused it. Args: run id, attempt."""

    message = "attempt {1} of run {0} is over: another attempt or an end has replaced it"


class LimitReached(ChazError):
    """No model is asked before the period is over. Args: whose limit, what was used of what, when the period ends."""

    message = "the limit of {0} is reached: {1}; the period ends at {2}"


class UnknownPrice(ChazError):
    """A cost is limited, and cannot be counted. Args: the model's name, what has the limit."""

    message = "the cost of {1} is limited, and the price of model {0} is not known; give its agent prices=…"


class ModelError(ChazError):
    """A model gave no usable turn, and asking again would not help. Args: the model's name, the reason.

    And, of a turn that was given and is refused, a mapping of the tokens that it took (the fields of
    :class:`~chaz.outcomes.Usage`): it is paid for.
    """

    message = "model {0}: {1}"

    @property
    def usage(self) -> Mapping[str, int] | None:
        """The tokens of the turn that is refused; None where the model gave none, or did not say."""
        return self.args[2] if len(self.args) > 2 else None


class ModelUnavailable(ModelError):
    """A model may answer if asked again. Args: name, reason, seconds to wait as the provider said, or None.

    And the tokens of a turn that was given and is refused, as :class:`ModelError` has them.
    """

    message = "model {0} is not available: {1}"

    @property
    def retry_after(self) -> float | None:
        """Seconds that the provider asked to wait (its Retry-After header), or None."""
        return self.args[2]

    @property
    def usage(self) -> Mapping[str, int] | None:
        """The tokens of the turn that is refused; None where the model gave none, or did not say."""
        return self.args[3] if len(self.args) > 3 else None
