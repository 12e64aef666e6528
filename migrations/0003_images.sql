-- Blobs and their locations, artifacts, uploads.

-- The only node that can run the operation. Null if all nodes can.
ALTER TABLE operations ADD COLUMN node_uuid VARCHAR(36);

-- The progress of the operation.
ALTER TABLE operations ADD COLUMN progress LONGTEXT;

CREATE TABLE IF NOT EXISTS blobs (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    state VARCHAR(16) NOT NULL,
    size BIGINT NOT NULL,
    sha1 VARCHAR(40) NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    sha512 VARCHAR(128) NOT NULL,
    xxh128 VARCHAR(32) NOT NULL,
    -- The Last-Modified header of the source.
    modified VARCHAR(255),
    depends_on VARCHAR(36),
    -- The properties of the disk image.
    image LONGTEXT,
    last_used DOUBLE,
    created DOUBLE NOT NULL,
    -- The last change of the state or of the references.
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS blobs_by_state ON blobs (state, updated);
CREATE INDEX IF NOT EXISTS blobs_by_sha1 ON blobs (sha1);
CREATE INDEX IF NOT EXISTS blobs_by_sha256 ON blobs (sha256);
CREATE INDEX IF NOT EXISTS blobs_by_sha512 ON blobs (sha512);
CREATE INDEX IF NOT EXISTS blobs_by_xxh128 ON blobs (xxh128);

-- The blob of each content, for deduplication. Inserting the row makes the blob the owner of the content.
CREATE TABLE IF NOT EXISTS blob_contents (
    sha512 VARCHAR(128) NOT NULL PRIMARY KEY,
    blob_uuid VARCHAR(36) NOT NULL
);

-- The replicas of blobs on nodes.
CREATE TABLE IF NOT EXISTS blob_locations (
    blob_uuid VARCHAR(36) NOT NULL,
    node_uuid VARCHAR(36) NOT NULL,
    state VARCHAR(16) NOT NULL,
    -- When the checksum of the replica was last verified.
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
    -- A hash of namespace, type and source. Unique. Null once the artifact is deleted.
    source_key VARCHAR(64),
    shared BIGINT NOT NULL,
    max_versions BIGINT NOT NULL,
    -- The highest version number so far.
    newest BIGINT NOT NULL,
    state VARCHAR(16) NOT NULL,
    error_message LONGTEXT,
    -- The validators of the newest version, to check the source for changes.
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
    -- Whether the upload was used or aborted, so that only its file remains to be deleted.
    ended BIGINT NOT NULL,
    created DOUBLE NOT NULL
);
CREATE INDEX IF NOT EXISTS uploads_by_node ON uploads (node_uuid, created);
