-- The span of an operation that a traced request queued: the id of its parent, and the span in the form of a traceparent.
ALTER TABLE operations ADD COLUMN trace VARCHAR(128);
