"""Files that can be made again (indexes, unpacked shards, sample data, machine code), in a folder of the user's own."""

from megasnn.cache.build import build_once as build_once
from megasnn.cache.build import cached_name as cached_name
from megasnn.cache.build import name_in_cache as name_in_cache
from megasnn.cache.folder import CacheError as CacheError
from megasnn.cache.folder import cache_folder as cache_folder
