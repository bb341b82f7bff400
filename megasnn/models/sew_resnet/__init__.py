"""SEW-ResNet."""
