-- Federated identity: issuers, rules, and exchanges of tokens for keys.

-- The scopes of the key that granted the trust, as JSON. Null means all scopes.
ALTER TABLE trusts ADD COLUMN scopes LONGTEXT;

CREATE TABLE IF NOT EXISTS issuers (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    name VARCHAR(255) NOT NULL,
    -- The name. Unique. Null once the issuer is deleted.
    live_name VARCHAR(255),
    state VARCHAR(16) NOT NULL,
    issuer_url LONGTEXT NOT NULL,
    -- A hash of the URL, which may be too long for an index. Unique. Null once the issuer is deleted.
    live_url VARCHAR(64),
    jwks_uri LONGTEXT NOT NULL,
    audience LONGTEXT NOT NULL,
    created DOUBLE NOT NULL,
    -- The last change of the state.
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS issuers_by_name ON issuers (live_name);
CREATE UNIQUE INDEX IF NOT EXISTS issuers_by_url ON issuers (live_url);
CREATE INDEX IF NOT EXISTS issuers_by_state ON issuers (state, updated);

CREATE TABLE IF NOT EXISTS rules (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    namespace VARCHAR(255) NOT NULL,
    name VARCHAR(255) NOT NULL,
    -- The name. Unique in the namespace. Null once the rule is deleted.
    live_name VARCHAR(255),
    state VARCHAR(16) NOT NULL,
    -- The name of the issuer, also valid for a later issuer of the same name.
    issuer VARCHAR(255) NOT NULL,
    -- JSON.
    bound_claims LONGTEXT NOT NULL,
    scopes LONGTEXT NOT NULL,
    -- The lifetime of keys in seconds.
    key_ttl BIGINT NOT NULL,
    key_name_prefix VARCHAR(64) NOT NULL,
    created DOUBLE NOT NULL,
    -- The last change of the state.
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS rules_by_name ON rules (namespace, live_name);
CREATE INDEX IF NOT EXISTS rules_by_state ON rules (state, updated);

-- Attempts to exchange a token per source address and calendar minute.
CREATE TABLE IF NOT EXISTS exchange_attempts (
    source VARCHAR(64) NOT NULL,
    -- Minutes since the epoch.
    minute BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    PRIMARY KEY (source, minute)
);
CREATE INDEX IF NOT EXISTS exchange_attempts_by_minute ON exchange_attempts (minute);

-- Tokens that were exchanged, kept until they expire to prevent replays.
CREATE TABLE IF NOT EXISTS exchanged_tokens (
    rule VARCHAR(36) NOT NULL,
    -- A hash of the issuer and of the token ID.
    token VARCHAR(64) NOT NULL,
    -- Unix time.
    expires DOUBLE NOT NULL,
    PRIMARY KEY (rule, token)
);
CREATE INDEX IF NOT EXISTS exchanged_tokens_by_expiry ON exchanged_tokens (expires);
