-- The versions that a deleted artifact had, as JSON: their index, and their entry in the record. Null before the deletion.
ALTER TABLE artifacts ADD COLUMN deleted_versions LONGTEXT;
