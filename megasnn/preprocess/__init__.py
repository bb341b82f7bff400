"""From a data set as it is downloaded to webdataset shards with an index: what megasnn-preprocess-data does.

Nothing here needs torch, so that its worker processes start at once.
"""
