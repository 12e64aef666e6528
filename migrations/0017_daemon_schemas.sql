-- The schema version of the node's daemon, and the epoch under which the daemon recorded it. A daemon of a release before this
-- migration begins an epoch without recording its version, which is unknown then.
ALTER TABLE nodes ADD COLUMN schema_version BIGINT NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN schema_epoch BIGINT NOT NULL DEFAULT 0;
