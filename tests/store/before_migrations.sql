-- The schema of stores from before migrations (until 0.1.0), as their SQLite files have it.

CREATE TABLE IF NOT EXISTS jobs (
    tenant_id  TEXT NOT NULL,
    name       TEXT NOT NULL,
    state      TEXT NOT NULL DEFAULT 'queued'
               CHECK (state IN ('queued', 'running', 'done', 'held', 'failed', 'cancelled')),
    reason     TEXT NOT NULL DEFAULT '',
    step       INTEGER NOT NULL DEFAULT 0 CHECK (step >= 0),  -- the cursor: steps committed
    elapsed_s  REAL NOT NULL DEFAULT 0,                       -- of all runs together
    created_s  REAL NOT NULL,                                 -- since the epoch, for people
    spec       BLOB NOT NULL,
    PRIMARY KEY (tenant_id, name)
) STRICT;

CREATE INDEX IF NOT EXISTS unfinished_jobs ON jobs (created_s) WHERE state IN ('queued', 'running');

-- open -> finished -> trained | dropped. A group that is open when the process dies is opened again.
CREATE TABLE IF NOT EXISTS groups (
    tenant_id    TEXT NOT NULL,
    job          TEXT NOT NULL,
    idx          INTEGER NOT NULL,
    state        TEXT NOT NULL CHECK (state IN ('open', 'finished', 'trained', 'dropped')),
    reason       TEXT NOT NULL DEFAULT '',
    version      INTEGER NOT NULL,                            -- policy version it started with
    step         INTEGER,                                     -- the step that consumed it
    record       BLOB,
    PRIMARY KEY (tenant_id, job, idx),
    FOREIGN KEY (tenant_id, job) REFERENCES jobs (tenant_id, name),
    CHECK ((state = 'open') = (record IS NULL)),
    CHECK ((state IN ('trained', 'dropped')) = (step IS NOT NULL)),
    CHECK ((state = 'dropped') = (reason <> ''))
) STRICT;

CREATE TABLE IF NOT EXISTS steps (
    tenant_id  TEXT NOT NULL,
    job        TEXT NOT NULL,
    step       INTEGER NOT NULL,
    record     BLOB NOT NULL,
    PRIMARY KEY (tenant_id, job, step),
    FOREIGN KEY (tenant_id, job) REFERENCES jobs (tenant_id, name)
) STRICT;

CREATE TABLE IF NOT EXISTS evaluations (
    tenant_id  TEXT NOT NULL,
    job        TEXT NOT NULL,
    version    INTEGER NOT NULL,
    success    REAL NOT NULL,
    record     BLOB NOT NULL,
    PRIMARY KEY (tenant_id, job, version),
    FOREIGN KEY (tenant_id, job) REFERENCES jobs (tenant_id, name)
) STRICT;

-- A version exists once its row does; its files lie in `Files.version(tenant, job, version)`.
CREATE TABLE IF NOT EXISTS versions (
    tenant_id     TEXT NOT NULL,
    job           TEXT NOT NULL,
    version       INTEGER NOT NULL,
    adapter_hash  TEXT NOT NULL,
    has_state     INTEGER NOT NULL DEFAULT 0,  -- the state snapshot is on disk
    has_adapter   INTEGER NOT NULL DEFAULT 0,  -- the PEFT folder is on disk
    PRIMARY KEY (tenant_id, job, version),
    FOREIGN KEY (tenant_id, job) REFERENCES jobs (tenant_id, name)
) STRICT;
