"""Makes webdataset shards with an index of data sets as they are downloaded."""
