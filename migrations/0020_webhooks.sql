-- Webhooks: where the events of a namespace are sent.
CREATE TABLE IF NOT EXISTS webhooks (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    namespace VARCHAR(255) NOT NULL,
    name VARCHAR(64) NOT NULL,
    url LONGTEXT NOT NULL,
    -- JSON.
    event_types LONGTEXT NOT NULL,
    object_types LONGTEXT NOT NULL,
    message_prefix VARCHAR(128),
    -- Events that were stored since this time are sent, in Unix time of the database. Null if the webhook is disabled.
    enabled_since DOUBLE,
    -- The encrypted secret that signs deliveries, and the one that it has replaced.
    secret LONGTEXT NOT NULL,
    previous_secret LONGTEXT,
    -- Until when the previous secret signs, too, in Unix time of the database.
    previous_secret_expires DOUBLE,
    -- The number of deliveries that were dropped, and when the last event about them was recorded.
    dropped BIGINT NOT NULL,
    drop_recorded DOUBLE,
    -- The last attempts.
    last_delivered DOUBLE,
    last_failed DOUBLE,
    last_error LONGTEXT,
    version BIGINT NOT NULL,
    UNIQUE (namespace, name)
);

-- Events that are or were sent to a webhook.
CREATE TABLE IF NOT EXISTS webhook_deliveries (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    webhook_uuid VARCHAR(36) NOT NULL,
    event_uuid VARCHAR(36) NOT NULL,
    event_type VARCHAR(16) NOT NULL,
    message LONGTEXT NOT NULL,
    object_type VARCHAR(32) NOT NULL,
    object_id VARCHAR(255) NOT NULL,
    -- The body of the request, the same in all attempts.
    body LONGTEXT NOT NULL,
    -- pending, delivered, failed or dropped.
    state VARCHAR(16) NOT NULL,
    attempts BIGINT NOT NULL,
    -- Unix times of the database.
    created DOUBLE NOT NULL,
    next_attempt DOUBLE NOT NULL,
    finished DOUBLE,
    -- The last attempt.
    response_status BIGINT,
    error LONGTEXT,
    UNIQUE (webhook_uuid, event_uuid)
);
CREATE INDEX IF NOT EXISTS webhook_deliveries_by_attempt ON webhook_deliveries (state, next_attempt, webhook_uuid);
CREATE INDEX IF NOT EXISTS webhook_deliveries_by_webhook ON webhook_deliveries (webhook_uuid, state, next_attempt);
