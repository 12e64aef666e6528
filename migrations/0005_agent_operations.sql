-- Agent operations. Those of one instance run in the order of `sequence`.

CREATE TABLE IF NOT EXISTS agent_operations (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    instance_uuid VARCHAR(36) NOT NULL,
    namespace VARCHAR(255) NOT NULL,
    -- The position among the operations of the instance.
    sequence BIGINT NOT NULL,
    state VARCHAR(16) NOT NULL,
    -- JSON.
    commands LONGTEXT NOT NULL,
    results LONGTEXT NOT NULL,
    attempts BIGINT NOT NULL,
    -- Unix time, and seconds. 0 means no limit.
    deadline DOUBLE NOT NULL,
    progress_timeout DOUBLE NOT NULL,
    last_progress DOUBLE,
    expiry_reason VARCHAR(16),
    error_message LONGTEXT,
    -- The boot ID of the guest when the current command was sent. Null if none was.
    sent_boot VARCHAR(255),
    -- The API request that created it.
    request_id VARCHAR(64),
    created DOUBLE NOT NULL,
    -- The last change of the state.
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS agent_operations_by_instance ON agent_operations (instance_uuid, sequence);
CREATE INDEX IF NOT EXISTS agent_operations_by_state ON agent_operations (state, updated);
