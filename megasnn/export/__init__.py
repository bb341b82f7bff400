"""The trained model: as a module for other programs, and as a NIR graph in both directions."""
