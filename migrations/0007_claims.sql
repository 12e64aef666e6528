-- Capacity claims of namespaces.

CREATE TABLE IF NOT EXISTS namespace_claims (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    namespace VARCHAR(255) NOT NULL,
    -- CPUs, MB, GB.
    limit_cpus BIGINT NOT NULL,
    limit_memory BIGINT NOT NULL,
    limit_disk BIGINT NOT NULL,
    -- The usage of the instances of the namespace, updated until the claim expires.
    used_cpus BIGINT NOT NULL,
    used_memory BIGINT NOT NULL,
    used_disk BIGINT NOT NULL,
    -- The expiry as Unix time.
    expires DOUBLE NOT NULL,
    created DOUBLE NOT NULL,
    -- The last change of limits, usage or expiry.
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS namespace_claims_by_namespace ON namespace_claims (namespace, created);
CREATE INDEX IF NOT EXISTS namespace_claims_by_end ON namespace_claims (expires);
