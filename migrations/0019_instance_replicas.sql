-- Copies of the disks of instances on other nodes. A row exists as long as its node may have files of the replica.
CREATE TABLE IF NOT EXISTS instance_replicas (
    instance_uuid VARCHAR(36) NOT NULL,
    node_uuid VARCHAR(36) NOT NULL,
    state VARCHAR(32) NOT NULL,
    -- The disk space reserved on the node, in GB.
    claimed_disk BIGINT NOT NULL,
    -- The generation of the VM that the last complete copy was taken of.
    generation BIGINT NOT NULL,
    -- The Unix time that the last complete copy dates from, by the clock of the database.
    last_complete DOUBLE,
    -- Why the last copy failed.
    error LONGTEXT,
    created DOUBLE NOT NULL,
    PRIMARY KEY (instance_uuid, node_uuid)
);
