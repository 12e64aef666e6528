-- Incremented when the node's daemon starts, and when the node is deleted: writes of a daemon with an older epoch are
-- rejected.
ALTER TABLE nodes ADD COLUMN epoch BIGINT NOT NULL DEFAULT 0;
-- When the node's daemon started, in Unix time of the database.
ALTER TABLE nodes ADD COLUMN started DOUBLE NOT NULL DEFAULT 0;
-- The lock file of the data directory of the node's daemon: boot id of the host, device and inode.
ALTER TABLE nodes ADD COLUMN lock_file VARCHAR(128) NOT NULL DEFAULT '';
-- The seconds by which the clock of the host is ahead of that of the database.
ALTER TABLE nodes ADD COLUMN clock_skew DOUBLE NOT NULL DEFAULT 0;
