"""Alembic's side of the schema: one revision per file of ``chaz/sql``."""
