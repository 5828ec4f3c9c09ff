"""Tool policies: how a tool may be called. Said by the tool, changed by the agent, and last by the deployment."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from chaz.entries import MAX_TIMEOUT, SecretsPolicy

DEFAULT_TIMEOUT = 60.0
MAX_RETRIES = 100
PERIODS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

Risk = Literal["low", "medium", "high"]
Approval = Literal["never", "unless_auto_approved", "always"]


class PolicyFields(TypedDict, total=False):
    """What :func:`chaz.tool` and an override may say; an override changes only what it says."""

    risk: Risk
    approval: Approval
    approval_timeout: float | None
    timeout: float
    rate_limit: str | None
    idempotent: bool
    sensitive_params: Sequence[str]
    retries: int
    secrets: SecretsPolicy | None


@dataclass(frozen=True)
class Rate:
    """So many calls at once, and then one every ``interval`` seconds."""

    burst: int
    interval: float


class ToolPolicy(BaseModel):
    """How a tool may be called. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    risk: Risk = "low"
    """For those who decide about a call."""
    approval: Approval = "never"
    """Whether a person has to allow each call; ``unless_auto_approved``: not where the tool is on a list."""
    approval_timeout: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT)
    """How long it may take to decide; None: as the session or the deployment says."""
    timeout: float = Field(default=DEFAULT_TIMEOUT, gt=0, le=MAX_TIMEOUT)
    """How long a call may take."""
    rate_limit: str | None = None
    """How often it may be called on all machines together, in Celery's notation: ``10/m``, ``1/s``, ``100/h``."""
    idempotent: bool = False
    """Whether a call may be made again when its worker was lost during it."""
    sensitive_params: tuple[str, ...] = Field(default=(), strict=False)
    """The parameters whose values stay with the workers."""
    retries: int = Field(default=0, ge=0, le=MAX_RETRIES)
    """How often a call that raised or took too long is tried again; of an idempotent tool only."""
    secrets: SecretsPolicy | None = None
    """What is done with secrets in its arguments and its result; None: as ``CHAZ_SECRETS`` says."""

    @field_validator("rate_limit")
    @classmethod
    def _is_a_rate(cls, text: str | None) -> str | None:
        if text is not None:
            parse_rate(text)
        return text

    @model_validator(mode="after")
    def _retries_only_what_may_be_repeated(self) -> ToolPolicy:
        if self.retries and not self.idempotent:
            raise ValueError(
                f"retries is {self.retries}, but the tool is not idempotent; say idempotent=True if a call may be made "
                "twice, or retries=0"
            )
        return self

    @property
    def rate(self) -> Rate | None:
        """Its rate limit in numbers."""
        return None if self.rate_limit is None else parse_rate(self.rate_limit)


ALL = frozenset(ToolPolicy.model_fields)


def parse_rate(text: str) -> Rate:
    """The rate that ``text`` says. Raises ValueError.

    As a token bucket has it: what was not called in a period may be called at once in the next one.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/([smh]))?", text, re.ASCII)
    count = float(found[1]) if found else 0.0
    if found is None or not 0 < count <= 1_000_000:
        raise ValueError(f"rate_limit is {text!r}; write a number more than 0 and /s, /m or /h, such as '10/m'")
    return Rate(burst=max(1, int(count)), interval=PERIODS[found[2] or ""] / count)


def policy_of(fields: Mapping[str, Any]) -> ToolPolicy:
    """The policy that these fields make. Raises ValueError, in words for whoever wrote them."""
    try:
        return ToolPolicy.model_validate(fields)
    except ValidationError as error:
        raise ValueError(_described(error)) from None


def _described(error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    name = ".".join(map(str, found["loc"]))
    match found["type"]:
        case "extra_forbidden":
            return f"a policy has no {name!r}; it has {', '.join(ToolPolicy.model_fields)}"
        case "value_error":
            return found["msg"].removeprefix("Value error, ")
        case _:
            return f"{name} is {found['input']!r}: {found['msg'][:1].lower()}{found['msg'][1:]}"


class Overrides:
    """What an agent or a deployment changes, by the tools' names and globs over them.

    Of several that match, a later one wins, and a tool's very name wins over globs. Raises ValueError.
    """

    def __init__(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._globs: dict[str, Mapping[str, Any]] = {}
        self.named: dict[str, Mapping[str, Any]] = {}
        """The changes of tools by their very names."""
        for name, fields in changes.items():
            try:
                # Of whether it may be retried, the tool's own policy has a say.
                checked = policy_of({"idempotent": True, **fields})
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
            found = {field: getattr(checked, field) for field in fields}
            (self._globs if re.search(r"[*?\[]", name) else self.named)[name] = found

    def over(
        self, policy: ToolPolicy, tool: str, parameters: Collection[str], fields: Collection[str] = ALL
    ) -> ToolPolicy:
        """The policy as changed for a tool with these parameters, of which it takes these fields. Raises ValueError.

        Sensitive parameters are added to those that there are, by a glob as far as the tool has them.
        """
        values = policy.model_dump()
        sensitive = list(policy.sensitive_params)
        matching = [change for glob, change in self._globs.items() if fnmatchcase(tool, glob)]
        for change in matching:
            sensitive += [name for name in change.get("sensitive_params", ()) if name in parameters]
        named = self.named.get(tool, {})
        sensitive += named.get("sensitive_params", ())
        for change in [*matching, named]:
            values |= {field: value for field, value in change.items() if field in fields}
        try:
            check_sensitive(sensitive, parameters)
            return policy_of({**values, "sensitive_params": tuple(dict.fromkeys(sensitive))})
        except ValueError as error:
            raise ValueError(f"{tool!r}: {error}") from None


def check_sensitive(names: Collection[str], parameters: Collection[str]) -> None:
    """Raises ValueError where a sensitive parameter is none of the tool's, as after a slip of the pen."""
    unknown = [name for name in names if name not in parameters]
    if unknown:
        known = ", ".join(parameters) or "none"
        raise ValueError(f"sensitive_params names {unknown[0]!r}, which is none of its parameters: {known}")
