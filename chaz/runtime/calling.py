"""One call of a run's step: from the journal as far as it is there, else for real, once it may be made."""

from __future__ import annotations

import logging
import math
from uuid import UUID

from chaz.asking import GRANTED, Ask, digest_of, not_approved
from chaz.entries import SecretsPolicy
from chaz.lineage import Spawn, in_scope
from chaz.outcomes import CallOutcome, ToolCall, Turn, typed_error
from chaz.planning import ScheduleCall
from chaz.runtime.builtin import AGENT_RESULT, ASK_HUMAN, COMPACT, SPAWN_AGENT, CompactArguments
from chaz.runtime.masking import sensitive_values, shown_arguments, without, without_in
from chaz.runtime.running import (
    FIRST_SLEEP,
    LONGEST_SLEEP,
    GivenBack,
    Record,
    RunContext,
    Waiting,
    stops_within,
)
from chaz.runtime.scheduletools import SCHEDULE_TOOLS, wanted_scheduling
from chaz.runtime.spawning import spawned_agent, wanted_compaction, wanted_question, wanted_result, wanted_spawn
from chaz.runtime.tools import CallContext

logger = logging.getLogger("chaz.worker")

MAY_HAVE_RUN = CallOutcome(
    kind="unknown",
    content="the worker was lost during this call: it may or may not have run. Check before you repeat it.",
)
HARMLESS = frozenset({ASK_HUMAN, AGENT_RESULT})
"""They do nothing that would need a person's word, whatever a glob in a policy says."""


def remember_sensitive(context: RunContext, turn: Turn) -> None:
    """Keep what the turn's calls were given in sensitive parameters, to mask it wherever it stands from now on."""
    for call in turn.calls:
        policy = context.agent.policy(context.agent.named(call.tool))
        context.sensitive |= sensitive_values(call.arguments, policy.sensitive_params)


async def make_call(context: RunContext, step: int, ordinal: int, call: ToolCall) -> CallOutcome | Waiting | GivenBack:
    """What a call comes to. Raises what the journal raises.

    GivenBack, with nothing written, where it has not begun (again) when the worker's process is to end.
    """
    journal = context.journal
    call = call.model_copy(update={"tool": context.agent.named(call.tool)})
    policy = context.agent.policy(call.tool)
    record = context.calls.get((step, ordinal))
    if record is not None and record.outcome is not None:
        return record.outcome
    if record is not None and record.waiting:
        return _waiting(call, started=record.started)
    shown = shown_arguments(call.arguments, policy.sensitive_params)
    masked = without_in(shown, context.sensitive, context.agent.parameters(call.tool))
    call = await context.egress.shown(call, masked, _secrets(context, call))
    if record is not None and record.started:
        outcome = await _resumed(context, step, ordinal, call, record)
        if isinstance(outcome, CallOutcome):
            await journal.finish_call(step, ordinal, call, outcome)
        return outcome
    await journal.wait_for_lease()
    wanted = _wanted(context, call)
    outcome = wanted if isinstance(wanted, CallOutcome) else await _word(context, step, ordinal, call, record)
    if outcome is None:
        return _waiting(call, started=False)
    if outcome is GRANTED and wanted is None:
        outcome = await _turn_of(context, call) or GRANTED
    if isinstance(outcome, GivenBack):
        return outcome
    if outcome is not GRANTED:
        await journal.refuse_call(step, ordinal, call, outcome)
        return outcome
    match wanted:
        case Spawn():
            outcome = await journal.start_spawn(step, ordinal, call, wanted)
        case UUID():
            outcome = await journal.ask_for(step, ordinal, call, wanted)
        case Ask():
            outcome = await journal.ask(step, ordinal, call, wanted)
        case CompactArguments():
            outcome = await journal.request_compaction(step, ordinal, call)
        case ScheduleCall():
            outcome = await journal.schedule(step, ordinal, call, wanted)
        case _:
            await journal.start_call(step, ordinal, call)
            outcome = await _execute(context, step, ordinal, call)
            await journal.finish_call(step, ordinal, call, outcome)
    return _waiting(call, started=True) if outcome is None else outcome


def _waiting(call: ToolCall, *, started: bool) -> Waiting:
    if not started:
        return Waiting(f"approval of {call.tool}")
    return Waiting("an answer" if call.tool == ASK_HUMAN else spawned_agent(call))


async def _resumed(
    context: RunContext, step: int, ordinal: int, call: ToolCall, record: Record
) -> CallOutcome | GivenBack:
    """What a call comes to that had started: in an earlier attempt, or before its wait."""
    if record.answer is not None:
        return record.answer
    if not context.agent.policy(call.tool).idempotent:
        return MAY_HAVE_RUN
    outcome = _refused(context, call) or await _turn_of(context, call)
    return await _execute(context, step, ordinal, call) if outcome is None else outcome


def _wanted(
    context: RunContext, call: ToolCall
) -> Spawn | UUID | Ask | CompactArguments | ScheduleCall | CallOutcome | None:
    """What the call asks for, None: that a function be called; or why that cannot be."""
    if refused := _refused(context, call):
        return refused
    # What another agent or a person is told goes to the log.
    said = call if call.shown is None else call.model_copy(update={"arguments": call.shown})
    match call.tool:
        case t if t == SPAWN_AGENT:
            return wanted_spawn(said, context.agent, context.scope, context.depth_left)
        case t if t == AGENT_RESULT:
            return wanted_result(said)
        case t if t == ASK_HUMAN:
            return wanted_question(said)
        case t if t == COMPACT:
            return wanted_compaction(said)
        case t if t in SCHEDULE_TOOLS:
            return wanted_scheduling(said, context.agent.name, context.session_id)
        case _:
            return context.agent.tools[call.tool].refusal(call.arguments)


async def _word(
    context: RunContext, step: int, ordinal: int, call: ToolCall, record: Record | None
) -> CallOutcome | None:
    """GRANTED if the call may be made, by its policy or a person's word; or why not. None: that word is waited for."""
    if record is not None and record.answer is not None:
        if record.answer.kind != "ok":
            return record.answer
        return GRANTED if record.digest == digest_of(call) else not_approved()
    policy = context.agent.policy(call.tool)
    if policy.approval == "never" or call.tool in HARMLESS:
        return GRANTED
    ask = Ask(
        kind="approval",
        tool=call.tool,
        shown=call.arguments if call.shown is None else call.shown,
        digest=digest_of(call),
        risk=policy.risk,
        timeout=policy.approval_timeout,
        unless_auto_approved=policy.approval == "unless_auto_approved",
    )
    outcome = await context.journal.ask(step, ordinal, call, ask)
    return GRANTED if outcome is not None and outcome.kind == "ok" else outcome


def _refused(context: RunContext, call: ToolCall) -> CallOutcome | None:
    """Why the run may not call this tool; None if it may."""
    if call.tool not in context.agent.tool_names:
        word, why = "unknown_tool", f"there is no tool {call.tool!r}"
    elif not in_scope(context.scope, call.tool):
        word, why = "not_allowed", f"you were spawned without the tool {call.tool!r}"
    elif call.secrets and _secrets(context, call) == "block":
        what = ", ".join(call.secrets)
        return typed_error("secret_arguments", f"{call.tool} was not called: its arguments contain a secret ({what})")
    else:
        return None
    known = ", ".join(schema.name for schema in context.agent.schemas(context.scope)) or "none"
    return typed_error(word, f"{why}; your tools are: {known}")


def _secrets(context: RunContext, call: ToolCall) -> SecretsPolicy:
    return context.agent.policy(call.tool).secrets or context.egress.policy


async def _turn_of(context: RunContext, call: ToolCall) -> CallOutcome | GivenBack | None:
    """Wait until the tool may be called at its rate. None then; else a refusal, or that its worker is to end."""
    rate = context.agent.policy(call.tool).rate
    if rate is None or context.agent.tools[call.tool].refusal(call.arguments) is not None:
        return None
    wait = await context.journal.admit(call.tool, rate, within=LONGEST_SLEEP)
    if wait > LONGEST_SLEEP:
        return typed_error("rate_limited", f"{call.tool} is called too often; try again in {math.ceil(wait)} s")
    if wait > 0 and await stops_within(context.shutdown, wait):
        return GivenBack(wait, "its worker is stopping")
    return None


async def _execute(context: RunContext, step: int, ordinal: int, call: ToolCall) -> CallOutcome:
    """Call a tool whose turn it is, as often as its policy has it tried; the last outcome counts."""
    tool, policy = context.agent.tools[call.tool], context.agent.policy(call.tool)
    tries = 1 + (0 if tool.refusal(call.arguments) else policy.retries)
    for attempt in range(1, tries + 1):
        # To store the start, or to wait for this try, may have taken long.
        await context.journal.wait_for_lease()
        outcome = await tool.call(
            call.arguments,
            CallContext(context.run_id, context.session_id, context.agent.name, step, ordinal),
            context.threads,
            timeout=policy.timeout,
        )
        outcome = outcome.model_copy(update={"content": without(outcome.content, context.sensitive)})
        outcome = await context.egress.outcome(call.tool, outcome, _secrets(context, call))
        if outcome.kind == "ok" or attempt == tries:
            return outcome
        pause = min(FIRST_SLEEP * 2 ** (attempt - 1), LONGEST_SLEEP)
        # Not what it raised: that may hold what it was called with.
        logger.warning(
            "tool %s of run=%s failed in try %d of %d; again in %g s",
            *(call.tool, context.run_id, attempt, tries, pause),
        )
        if await stops_within(context.shutdown, pause) or await _turn_of(context, call) is not None:
            return outcome
    raise AssertionError("unreachable")
