-- Live migrations in progress. A row reserves the capacity of the target, and moving the instance removes it.
CREATE TABLE IF NOT EXISTS instance_migrations (
    instance_uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    source_uuid VARCHAR(36) NOT NULL,
    target_uuid VARCHAR(36) NOT NULL,
    -- The generation of the VM on the target.
    generation BIGINT NOT NULL,
    -- 1 once its cancellation was requested.
    cancelled BIGINT NOT NULL,
    -- The capacity reserved on the target: CPUs, MB, GB.
    claimed_cpus BIGINT NOT NULL,
    claimed_memory BIGINT NOT NULL,
    claimed_disk BIGINT NOT NULL,
    -- The ports on the target, once they are chosen.
    console_port BIGINT,
    vdi_port BIGINT,
    vdi_tls_port BIGINT,
    created DOUBLE NOT NULL
);
-- The highest generation that a migration has used, also one that failed.
ALTER TABLE instances ADD COLUMN reserved_generation BIGINT NOT NULL DEFAULT 0;
