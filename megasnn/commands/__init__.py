"""Installed programs besides training, one file each."""
