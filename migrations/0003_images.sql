-- Content and what names it: blobs and where they are, artifacts, uploads.

-- The node that alone can do an operation, if not every node can.
ALTER TABLE operations ADD COLUMN node_uuid VARCHAR(36);

-- How far an operation has come.
ALTER TABLE operations ADD COLUMN progress LONGTEXT;

CREATE TABLE IF NOT EXISTS blobs (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    state VARCHAR(16) NOT NULL,
    size BIGINT NOT NULL,
    sha1 VARCHAR(40) NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    sha512 VARCHAR(128) NOT NULL,
    xxh128 VARCHAR(32) NOT NULL,
    -- When the source says that it last changed, in its words.
    modified VARCHAR(255),
    depends_on VARCHAR(36),
    -- What was found out about it as a disk image.
    image LONGTEXT,
    last_used DOUBLE,
    created DOUBLE NOT NULL,
    -- The last change of state, or of what uses it.
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS blobs_by_state ON blobs (state, updated);
CREATE INDEX IF NOT EXISTS blobs_by_sha1 ON blobs (sha1);
CREATE INDEX IF NOT EXISTS blobs_by_sha256 ON blobs (sha256);
CREATE INDEX IF NOT EXISTS blobs_by_sha512 ON blobs (sha512);
CREATE INDEX IF NOT EXISTS blobs_by_xxh128 ON blobs (xxh128);

-- The one blob that holds a content. The key is the claim: whoever inserts the row has made that blob.
CREATE TABLE IF NOT EXISTS blob_contents (
    sha512 VARCHAR(128) NOT NULL PRIMARY KEY,
    blob_uuid VARCHAR(36) NOT NULL
);

-- Which node has a copy, and how it is.
CREATE TABLE IF NOT EXISTS blob_locations (
    blob_uuid VARCHAR(36) NOT NULL,
    node_uuid VARCHAR(36) NOT NULL,
    state VARCHAR(16) NOT NULL,
    -- When every byte of it was last compared.
    verified DOUBLE NOT NULL,
    PRIMARY KEY (blob_uuid, node_uuid)
);
CREATE INDEX IF NOT EXISTS blob_locations_by_node ON blob_locations (node_uuid, state, verified);

CREATE TABLE IF NOT EXISTS artifacts (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    name VARCHAR(255) NOT NULL,
    namespace VARCHAR(255) NOT NULL,
    artifact_type VARCHAR(16) NOT NULL,
    source_url LONGTEXT NOT NULL,
    -- Stands for namespace, type and source while it is not deleted: of each there is one.
    source_key VARCHAR(64),
    shared BIGINT NOT NULL,
    max_versions BIGINT NOT NULL,
    -- The highest number that a version has had.
    newest BIGINT NOT NULL,
    state VARCHAR(16) NOT NULL,
    error_message LONGTEXT,
    -- What the source said of the newest version: how to ask whether there is another.
    etag VARCHAR(255),
    modified VARCHAR(255),
    length BIGINT,
    last_operation VARCHAR(36),
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS artifacts_by_source ON artifacts (source_key);
CREATE INDEX IF NOT EXISTS artifacts_by_name ON artifacts (name, namespace);
CREATE INDEX IF NOT EXISTS artifacts_by_namespace ON artifacts (namespace, state);
CREATE INDEX IF NOT EXISTS artifacts_by_state ON artifacts (state, updated);

CREATE TABLE IF NOT EXISTS uploads (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    namespace VARCHAR(255) NOT NULL,
    node_uuid VARCHAR(36) NOT NULL,
    -- Whether it is used up or given up: only its file is still to be removed.
    ended BIGINT NOT NULL,
    created DOUBLE NOT NULL
);
CREATE INDEX IF NOT EXISTS uploads_by_node ON uploads (node_uuid, created);
