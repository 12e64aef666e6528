-- The bytes that the guest has written since the last complete copy, as of the last measurement. NULL if that is not known.
ALTER TABLE instance_replicas ADD COLUMN bytes_behind BIGINT;
