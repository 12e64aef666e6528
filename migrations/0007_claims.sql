-- What namespaces were promised of the whole cluster.

CREATE TABLE IF NOT EXISTS namespace_claims (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    namespace VARCHAR(255) NOT NULL,
    -- Processors, megabytes, gigabytes.
    limit_cpus BIGINT NOT NULL,
    limit_memory BIGINT NOT NULL,
    limit_disk BIGINT NOT NULL,
    -- What the instances of the namespace hold. Follows them until the claim expires.
    used_cpus BIGINT NOT NULL,
    used_memory BIGINT NOT NULL,
    used_disk BIGINT NOT NULL,
    -- Unix time from which on it promises nothing.
    expires DOUBLE NOT NULL,
    created DOUBLE NOT NULL,
    -- When limits, use or end last changed.
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS namespace_claims_by_namespace ON namespace_claims (namespace, created);
CREATE INDEX IF NOT EXISTS namespace_claims_by_end ON namespace_claims (expires);
