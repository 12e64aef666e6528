-- What belongs to one namespace although the content is shared.

-- Whether the newest version was fetched from the source, not uploaded.
ALTER TABLE artifacts ADD COLUMN fetched BIGINT NOT NULL DEFAULT 0;
UPDATE artifacts SET fetched = 1 WHERE etag IS NOT NULL OR modified IS NOT NULL OR length IS NOT NULL;
