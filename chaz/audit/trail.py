"""Is the audit trail complete? What runs counted, against what consumers recorded."""

from __future__ import annotations

from uuid import UUID

from chaz.database import Database


async def missing(database: Database, root_run_id: UUID) -> dict[UUID, int]:
    """By run of the tree: how many of its events are not recorded. Complete runs are left out."""
    rows = await database.fetch(
        """
        select r.id, r.event_seq - count(e.id) as missing
        from chaz.runs r left join chaz.entries e on e.run_id = r.id and e.seq > 0
        where r.root_run_id = %(root)s
        group by r.id having r.event_seq <> count(e.id)
        """,
        {"root": root_run_id},
    )
    return {row["id"]: row["missing"] for row in rows}
