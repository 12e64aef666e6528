-- Why a node gets no new instances by request, as JSON, or NULL.
ALTER TABLE nodes ADD COLUMN cordon LONGTEXT;
