"""Shards behind URLs: fetched into the cache once a node, ahead of their use, and again where they were removed."""
