-- Quotas of namespaces, and what counts against them.

-- The limits that were set for a namespace. The defaults of the cluster apply to the others.
CREATE TABLE IF NOT EXISTS namespace_quotas (
    namespace VARCHAR(255) NOT NULL,
    name VARCHAR(32) NOT NULL,
    -- 0 means unlimited.
    value BIGINT NOT NULL,
    PRIMARY KEY (namespace, name)
);

-- The size that the upload may have: at least that of its file.
ALTER TABLE uploads ADD COLUMN bytes BIGINT NOT NULL DEFAULT 0;
-- How often it was truncated, so that data sent before is not appended afterwards.
ALTER TABLE uploads ADD COLUMN truncations BIGINT NOT NULL DEFAULT 0;
CREATE INDEX IF NOT EXISTS uploads_by_namespace ON uploads (namespace, ended);

-- These contain every column that is counted.
CREATE INDEX IF NOT EXISTS instances_by_capacity
    ON instances (namespace, state, claimed_cpus, claimed_memory, claimed_disk);
CREATE INDEX IF NOT EXISTS interfaces_by_namespace ON interfaces (namespace, state, floating);

-- For a fair choice of the next operation.
CREATE INDEX IF NOT EXISTS operations_by_namespace ON operations (state, namespace, name, run_after, node_uuid);
