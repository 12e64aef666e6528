-- The same text for SQLite and MariaDB. Every statement may run twice: after a crash the last one is repeated.

CREATE TABLE IF NOT EXISTS cluster_values (
    name VARCHAR(64) NOT NULL PRIMARY KEY,
    value LONGTEXT NOT NULL,
    version BIGINT NOT NULL
);

CREATE TABLE IF NOT EXISTS namespaces (
    name VARCHAR(255) NOT NULL PRIMARY KEY,
    state VARCHAR(16) NOT NULL,
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS namespaces_by_state ON namespaces (state, updated);

CREATE TABLE IF NOT EXISTS namespace_keys (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    namespace VARCHAR(255) NOT NULL,
    name VARCHAR(255) NOT NULL,
    state VARCHAR(16) NOT NULL,
    tag BIGINT NOT NULL,
    hash VARCHAR(255) NOT NULL,
    nonce VARCHAR(32) NOT NULL,
    expiry DOUBLE,
    scopes LONGTEXT,
    provenance LONGTEXT,
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS namespace_keys_by_name ON namespace_keys (namespace, name);
CREATE INDEX IF NOT EXISTS namespace_keys_by_tag ON namespace_keys (namespace, tag);
CREATE INDEX IF NOT EXISTS namespace_keys_by_expiry ON namespace_keys (state, expiry);

CREATE TABLE IF NOT EXISTS trusts (
    namespace VARCHAR(255) NOT NULL,
    trusted VARCHAR(255) NOT NULL,
    created DOUBLE NOT NULL,
    PRIMARY KEY (namespace, trusted)
);
CREATE INDEX IF NOT EXISTS trusts_by_trusted ON trusts (trusted, namespace);

CREATE TABLE IF NOT EXISTS metadata (
    object_type VARCHAR(32) NOT NULL,
    object_id VARCHAR(255) NOT NULL,
    name VARCHAR(255) NOT NULL,
    value LONGTEXT NOT NULL,
    PRIMARY KEY (object_type, object_id, name)
);

CREATE TABLE IF NOT EXISTS object_references (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    source_type VARCHAR(32) NOT NULL,
    source_id VARCHAR(255) NOT NULL,
    relationship VARCHAR(64) NOT NULL,
    relationship_value VARCHAR(255),
    target_type VARCHAR(32) NOT NULL,
    target_id VARCHAR(255) NOT NULL,
    created DOUBLE NOT NULL,
    last_active DOUBLE NOT NULL
);
CREATE INDEX IF NOT EXISTS object_references_by_source ON object_references (source_type, source_id);
CREATE INDEX IF NOT EXISTS object_references_by_target ON object_references (target_type, target_id);

CREATE TABLE IF NOT EXISTS nodes (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    name VARCHAR(255) NOT NULL,
    ip VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    software VARCHAR(64) NOT NULL,
    simulated BIGINT NOT NULL,
    is_hypervisor BIGINT NOT NULL,
    is_network_node BIGINT NOT NULL,
    is_database_node BIGINT NOT NULL,
    lastseen DOUBLE NOT NULL,
    report LONGTEXT NOT NULL,
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS nodes_by_name ON nodes (name);

CREATE TABLE IF NOT EXISTS operations (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    operation_type VARCHAR(32) NOT NULL,
    name VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    tasks LONGTEXT NOT NULL,
    step BIGINT NOT NULL,
    arguments LONGTEXT NOT NULL,
    depends_on LONGTEXT NOT NULL,
    namespace VARCHAR(255),
    target_type VARCHAR(32) NOT NULL,
    target_id VARCHAR(255) NOT NULL,
    attempts BIGINT NOT NULL,
    holder VARCHAR(64) NOT NULL,
    lease_expires DOUBLE NOT NULL,
    run_after DOUBLE NOT NULL,
    error_report LONGTEXT,
    request_id VARCHAR(128),
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS operations_by_state ON operations (state, run_after);
CREATE INDEX IF NOT EXISTS operations_by_target ON operations (target_type, target_id);

CREATE TABLE IF NOT EXISTS events (
    event_uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    timestamp DOUBLE NOT NULL,
    event_type VARCHAR(16) NOT NULL,
    message LONGTEXT NOT NULL,
    extra LONGTEXT NOT NULL,
    node VARCHAR(255) NOT NULL,
    request_id VARCHAR(128),
    duration DOUBLE
);

CREATE TABLE IF NOT EXISTS event_links (
    object_type VARCHAR(32) NOT NULL,
    object_id VARCHAR(255) NOT NULL,
    timestamp DOUBLE NOT NULL,
    event_uuid VARCHAR(36) NOT NULL,
    event_type VARCHAR(16) NOT NULL,
    PRIMARY KEY (object_type, object_id, timestamp, event_uuid)
);
CREATE INDEX IF NOT EXISTS event_links_by_age ON event_links (event_type, timestamp, event_uuid);
