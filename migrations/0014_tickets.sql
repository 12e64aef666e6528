-- One-time tickets: their owner exchanges them for a browser session or for the connection to a console.
CREATE TABLE IF NOT EXISTS tickets (
    -- A hash of the ticket.
    hash VARCHAR(64) NOT NULL PRIMARY KEY,
    -- What the ticket is exchanged for.
    purpose VARCHAR(16) NOT NULL,
    -- The key that the ticket was created with.
    namespace VARCHAR(255) NOT NULL,
    key_name VARCHAR(255) NOT NULL,
    -- What the ticket allows, as JSON.
    document LONGTEXT NOT NULL,
    -- Unix time.
    expires DOUBLE NOT NULL
);
CREATE INDEX IF NOT EXISTS tickets_by_key ON tickets (namespace, key_name);
CREATE INDEX IF NOT EXISTS tickets_by_expiry ON tickets (expires);

-- When the event was stored, in Unix time of the database. 0 for events that an earlier release has stored.
ALTER TABLE events ADD COLUMN stored DOUBLE NOT NULL DEFAULT 0;
CREATE INDEX IF NOT EXISTS events_by_storing ON events (stored, event_uuid);
