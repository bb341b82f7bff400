"""Files that can be made again (indexes, unpacked shards, sample data, machine code), in a folder of the user's own."""

from megasnn.cache.build import build_once, cached_name
from megasnn.cache.folder import CacheError, cache_folder

__all__ = ["CacheError", "build_once", "cache_folder", "cached_name"]
