"""Run the revisions on the connection that :func:`chaz.schema.upgrade` holds its lock on."""

from alembic import context
from sqlalchemy import text

connection = context.config.attributes["connection"]
connection.execute(text("create schema if not exists chaz"))
context.configure(connection=connection, version_table_schema="chaz", transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
connection.commit()
