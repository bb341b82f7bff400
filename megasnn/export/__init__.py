"""The trained model: as a module for other programs, and as a graph of NIR in both directions."""
