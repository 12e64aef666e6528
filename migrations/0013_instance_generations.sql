-- The number of times that an instance was placed on a node. The directory of a VM has the generation that it was started
-- with, and a VM of an earlier generation must not run.
ALTER TABLE instances ADD COLUMN generation BIGINT NOT NULL DEFAULT 1;
-- Since when the power state has its value.
ALTER TABLE instances ADD COLUMN power_state_since DOUBLE;
