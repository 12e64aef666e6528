-- Whose tokens can be exchanged for keys, and for which.

-- What whoever gave the trust was scoped for, as JSON. Nothing is everything.
ALTER TABLE trusts ADD COLUMN scopes LONGTEXT;

CREATE TABLE IF NOT EXISTS issuers (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    name VARCHAR(255) NOT NULL,
    -- The name while it is not deleted: of each there is one.
    live_name VARCHAR(255),
    state VARCHAR(16) NOT NULL,
    issuer_url LONGTEXT NOT NULL,
    -- Stands for the URL while it is not deleted: of each there is one, and URLs may be longer than a key.
    live_url VARCHAR(64),
    jwks_uri LONGTEXT NOT NULL,
    audience LONGTEXT NOT NULL,
    created DOUBLE NOT NULL,
    -- When the state last changed.
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
    -- The name while it is not deleted: of each there is one in a namespace.
    live_name VARCHAR(255),
    state VARCHAR(16) NOT NULL,
    -- A name: an issuer that is made again under it is meant, too.
    issuer VARCHAR(255) NOT NULL,
    -- As JSON.
    bound_claims LONGTEXT NOT NULL,
    scopes LONGTEXT NOT NULL,
    -- Seconds that a key lives.
    key_ttl BIGINT NOT NULL,
    key_name_prefix VARCHAR(64) NOT NULL,
    created DOUBLE NOT NULL,
    -- When the state last changed.
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS rules_by_name ON rules (namespace, live_name);
CREATE INDEX IF NOT EXISTS rules_by_state ON rules (state, updated);

-- Attempts to exchange a token, of one address in one calendar minute.
CREATE TABLE IF NOT EXISTS exchange_attempts (
    source VARCHAR(64) NOT NULL,
    -- Minutes since the epoch.
    minute BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    PRIMARY KEY (source, minute)
);
CREATE INDEX IF NOT EXISTS exchange_attempts_by_minute ON exchange_attempts (minute);

-- Tokens that a rule has taken: each once, until it expires.
CREATE TABLE IF NOT EXISTS exchanged_tokens (
    rule VARCHAR(36) NOT NULL,
    -- A hash of what names the token among all of its issuer, and of the issuer.
    token VARCHAR(64) NOT NULL,
    -- Unix time.
    expires DOUBLE NOT NULL,
    PRIMARY KEY (rule, token)
);
CREATE INDEX IF NOT EXISTS exchanged_tokens_by_expiry ON exchanged_tokens (expires);
