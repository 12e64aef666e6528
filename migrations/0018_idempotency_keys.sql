-- Requests that their callers may repeat: the response to the first one is kept for the others.
CREATE TABLE IF NOT EXISTS idempotency_keys (
    -- A hash of the caller and its key.
    hash VARCHAR(64) NOT NULL PRIMARY KEY,
    namespace VARCHAR(255) NOT NULL,
    -- A hash of the method, the path and the body.
    request_hash VARCHAR(64) NOT NULL,
    request_id VARCHAR(255) NOT NULL,
    -- running, changed or finished.
    state VARCHAR(16) NOT NULL,
    -- Identifies the execution of the request.
    owner VARCHAR(64) NOT NULL,
    -- Until when the execution counts as running, in Unix time of the database.
    leased_until DOUBLE NOT NULL,
    -- The encrypted response. Empty until the request is finished.
    response LONGTEXT NOT NULL,
    -- Unix time of the database.
    expires DOUBLE NOT NULL
);
CREATE INDEX IF NOT EXISTS idempotency_keys_by_namespace ON idempotency_keys (namespace, expires);
CREATE INDEX IF NOT EXISTS idempotency_keys_by_expiry ON idempotency_keys (expires);
