"""VGG for event cameras."""
