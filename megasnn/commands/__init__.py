"""The programs beside training that are installed: one file for each."""
