"""Jobs remember the request that they came with, so that it is known again by its key."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("body_digest", sa.Text))
