"""The VGG for event cameras: its dimensions, its layers, and its names in other programs."""
