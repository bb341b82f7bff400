"""From a data set as it is downloaded to webdataset shards with an index: what tools/preprocess_data.py does.

Nothing here needs torch, so that its worker processes start at once.
"""
