"""The store of what trees of runs may use: held for a step before the model is asked, settled with the stored step.

What a run holds stands on its own row too, so that a crash neither leaks nor doubles it: the reservation of its next
claim takes that one's place, and its end gives it back. A run's row is locked before its tree's.
"""

from __future__ import annotations

from decimal import Decimal
from typing import LiteralString
from uuid import UUID

from chaz.database import Row, Transaction
from chaz.entries import Budget
from chaz.errors import UnknownPrice
from chaz.outcomes import Room

LIMITED: LiteralString = """
    exists (select from chaz.tree_budgets b where b.root_run_id = r.root_run_id
        and (b.max_steps is not null or b.max_tokens is not null or b.max_cost is not null))
"""
"""Whether the tree of ``chaz.runs r`` has a budget at all."""


async def limit(tx: Transaction, root_run_id: UUID, budget: Budget) -> None:
    """Give a tree no more than this; it may have less already."""
    await tx.execute(
        """
        update chaz.tree_budgets set max_steps = least(max_steps, %(steps)s::int),
            max_tokens = least(max_tokens, %(tokens)s::bigint), max_cost = least(max_cost, %(cost)s::numeric)
        where root_run_id = %(root)s
        """,
        {"root": root_run_id, **budget.model_dump()},
    )


async def reserve(
    tx: Transaction, run_id: UUID, root_run_id: UUID, *, step: int, tokens: int, cost: Decimal | None, model: str
) -> Room:
    """Hold a step, and as many tokens and as much cost as it is thought to take, or as is left. The run is locked.

    A step is let in while something is left, so that only a tree's last one may use more than there was. Raises
    UnknownPrice where the tree's cost is limited and that of ``model`` is not known (None).
    """
    await release(tx, run_id)
    cursor = await tx.execute(
        "select * from chaz.tree_budgets where root_run_id = %(root)s for update", {"root": root_run_id}
    )
    tree = await cursor.fetchone()
    if tree is None:
        return "free"
    if cost is None:
        if tree["max_cost"] is not None:
            raise UnknownPrice(model, "its tree of runs")
        cost = Decimal(0)
    left = {kind: _left(tree, kind) for kind in ("steps", "tokens", "cost")}
    if any(each is not None and each <= 0 for each in left.values()):
        return "none" if used_up(tree) else "held"
    if left["tokens"] is not None:
        tokens = min(tokens, int(left["tokens"]))
    if left["cost"] is not None:
        cost = min(cost, Decimal(left["cost"]))
    await tx.execute(
        """
        with run as (
            update chaz.runs set reserved_step = %(step)s, reserved_tokens = %(tokens)s, reserved_cost = %(cost)s
            where id = %(run)s)
        update chaz.tree_budgets set reserved_steps = reserved_steps + 1,
            reserved_tokens = reserved_tokens + %(tokens)s, reserved_cost = reserved_cost + %(cost)s
        where root_run_id = %(root)s
        """,
        {"run": run_id, "root": root_run_id, "step": step, "tokens": tokens, "cost": cost},
    )
    return "last" if left["steps"] == 1 else "free"


async def release(tx: Transaction, run_id: UUID) -> None:
    """Give back what the run holds, if it holds anything. The run is locked."""
    await tx.execute(
        """
        with held as (
            select id, root_run_id, reserved_tokens, reserved_cost from chaz.runs
            where id = %(run)s and reserved_step is not null),
        run as (
            update chaz.runs set reserved_step = null, reserved_tokens = 0, reserved_cost = 0
            where id = (select id from held))
        update chaz.tree_budgets b set reserved_steps = b.reserved_steps - 1,
            reserved_tokens = b.reserved_tokens - held.reserved_tokens,
            reserved_cost = b.reserved_cost - held.reserved_cost
        from held where b.root_run_id = held.root_run_id
        """,
        {"run": run_id},
    )


def used_up(tree: Row) -> bool:
    """Whether stored steps have used one of a tree's limits up; what is only held may yet come back."""
    return any(
        tree[f"max_{kind}"] is not None and tree[kind] >= tree[f"max_{kind}"] for kind in ("steps", "tokens", "cost")
    )


def _left(tree: Row, kind: str) -> Decimal | int | None:
    most = tree[f"max_{kind}"]
    return None if most is None else most - tree[kind] - tree[f"reserved_{kind}"]
