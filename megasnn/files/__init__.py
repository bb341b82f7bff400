"""Files of strangers, read strictly and within bounds; locks that name the process that holds them."""
