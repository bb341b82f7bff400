"""The models, as lists of layer descriptions from which a rank builds only its own."""
