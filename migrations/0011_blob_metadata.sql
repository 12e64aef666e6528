-- The metadata of blobs is in blob_metadata since migration 8, which copied it. Nothing reads or removes these rows.
DELETE FROM metadata WHERE object_type = 'blob';
