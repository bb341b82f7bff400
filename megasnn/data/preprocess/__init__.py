"""Makes webdataset shards and their index from downloaded data sets."""
