"""Any nn.Module as a layer: converted to MegaSNN's layers, or whole on every tensor-parallel rank."""
