-- What callers want done inside guests. Rows of one instance are taken up in the order of `sequence`.

CREATE TABLE IF NOT EXISTS agent_operations (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    instance_uuid VARCHAR(36) NOT NULL,
    namespace VARCHAR(255) NOT NULL,
    -- Its place among those of its instance.
    sequence BIGINT NOT NULL,
    state VARCHAR(16) NOT NULL,
    -- As JSON.
    commands LONGTEXT NOT NULL,
    results LONGTEXT NOT NULL,
    attempts BIGINT NOT NULL,
    -- Unix time and seconds, both 0 without an end.
    deadline DOUBLE NOT NULL,
    progress_timeout DOUBLE NOT NULL,
    last_progress DOUBLE,
    expiry_reason VARCHAR(16),
    error_message LONGTEXT,
    -- During which start of the guest the command that is under way was sent, nothing if none was.
    sent_boot VARCHAR(255),
    -- The request that asked for it.
    request_id VARCHAR(64),
    created DOUBLE NOT NULL,
    -- When the state last changed.
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS agent_operations_by_instance ON agent_operations (instance_uuid, sequence);
CREATE INDEX IF NOT EXISTS agent_operations_by_state ON agent_operations (state, updated);
