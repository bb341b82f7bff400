"""Files of strangers, read strictly and within bounds; locks that say who holds them."""
