"""Models as lists of layer descriptions; a rank builds only its own layers."""
