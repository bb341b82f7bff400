"""Programs beside training, one for each file or folder."""
