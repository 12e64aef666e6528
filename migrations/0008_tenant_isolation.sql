-- What belongs to one namespace although the content is shared.

-- Whether the newest version was fetched from the source, not uploaded.
ALTER TABLE artifacts ADD COLUMN fetched BIGINT NOT NULL DEFAULT 0;
UPDATE artifacts SET fetched = 1 WHERE etag IS NOT NULL OR modified IS NOT NULL OR length IS NOT NULL;

-- The namespace whose request caused the event. Null if it was the system itself.
ALTER TABLE event_links ADD COLUMN namespace VARCHAR(255);

-- The metadata of blobs, which have no owner: each namespace has its own.
CREATE TABLE IF NOT EXISTS blob_metadata (
    blob_uuid VARCHAR(36) NOT NULL,
    namespace VARCHAR(255) NOT NULL,
    name VARCHAR(255) NOT NULL,
    value LONGTEXT NOT NULL,
    PRIMARY KEY (blob_uuid, namespace, name)
);
CREATE INDEX IF NOT EXISTS blob_metadata_by_namespace ON blob_metadata (namespace);
-- Existing metadata goes to the only namespace that uses the blob, or to system if there are several.
REPLACE INTO blob_metadata (blob_uuid, namespace, name, value)
    SELECT m.object_id,
        CASE WHEN COUNT(DISTINCT COALESCE(a.namespace, i.namespace)) = 1
            THEN MIN(COALESCE(a.namespace, i.namespace)) ELSE 'system' END,
        m.name, MIN(m.value)
    FROM metadata m
    LEFT JOIN object_references r ON r.target_type = 'blob' AND r.target_id = m.object_id
    LEFT JOIN artifacts a ON r.source_type = 'artifact' AND a.uuid = r.source_id
    LEFT JOIN instances i ON r.source_type = 'instance' AND i.uuid = r.source_id
    WHERE m.object_type = 'blob'
    GROUP BY m.object_id, m.name;

-- When and with which properties each namespace received the content of a blob.
CREATE TABLE IF NOT EXISTS blob_namespaces (
    blob_uuid VARCHAR(36) NOT NULL,
    namespace VARCHAR(255) NOT NULL,
    received DOUBLE NOT NULL,
    -- The Last-Modified header of the source.
    modified VARCHAR(255),
    last_used DOUBLE,
    PRIMARY KEY (blob_uuid, namespace)
);
CREATE INDEX IF NOT EXISTS blob_namespaces_by_namespace ON blob_namespaces (namespace);
REPLACE INTO blob_namespaces (blob_uuid, namespace, received)
    SELECT r.target_id, a.namespace, MIN(r.created)
    FROM object_references r JOIN artifacts a ON a.uuid = r.source_id
    WHERE r.source_type = 'artifact' AND r.target_type = 'blob'
    GROUP BY r.target_id, a.namespace;
