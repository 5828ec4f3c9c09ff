"""0001_session_log.sql"""

from alembic import op

from chaz.schema import apply_file

revision = "0001"
down_revision = None


def upgrade() -> None:
    apply_file(op.get_bind(), revision)
